"""aten graphs to loop nodes: one row an operator (see table.py)."""
