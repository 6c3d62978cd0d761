"""Loop programs: the IR between aten graphs and generated code (see program.py)."""
