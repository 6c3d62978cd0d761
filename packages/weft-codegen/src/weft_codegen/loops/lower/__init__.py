"""aten graphs to loop nodes: one row an operator (table.py), one walk over the graph (graph.py)."""

from importlib import import_module

_ELEMENTS = ("pointwise", "views", "creation", "random")
_NEIGHBOURS = ("reductions", "indexing", "pooling", "resample", "scans")


def install() -> None:
    """Import the modules whose rows fill the lowering table."""
    for name in (*_ELEMENTS, *_NEIGHBOURS):
        import_module(f"{__name__}.{name}")
