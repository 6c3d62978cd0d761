"""aten graphs to loop nodes: one row an operator (rows.py), one walk over the graph (graph.py)."""
