"""Compiled autograd: a whole backward pass as one graph, hooks included.

    from weft_compiled_autograd import enable

    with enable(torch.compile):      # or weft.compile(...), or any gm -> callable
        loss.backward()

Read in this order: `engine.py` (the seam), `tape.py` (what the engine says), `lower.py` (the aten
graph), `cache.py` (which graph runs).
"""

from weft_core.events import counters

from weft_compiled_autograd.api import disable, enable, enable_everywhere, is_enabled, reset
from weft_compiled_autograd.config import settings
from weft_compiled_autograd.pieces import (
    compile_pieces,
    graph_compiler,
    op_only_inputs,
    runs_user_code,
)

__all__ = [
    "compile_pieces",
    "counters",
    "disable",
    "enable",
    "enable_everywhere",
    "graph_compiler",
    "is_enabled",
    "op_only_inputs",
    "reset",
    "runs_user_code",
    "settings",
]
