"""aten graphs to loop nodes: one row an operator (table.py), one walk over the graph (graph.py)."""

from importlib import import_module

_ROWS = ("pointwise", "views", "random", "reductions", "indexing", "pooling", "resample")


def install() -> None:
    """Import the modules whose rows fill the lowering table."""
    for name in _ROWS:
        import_module(f"{__name__}.{name}")
