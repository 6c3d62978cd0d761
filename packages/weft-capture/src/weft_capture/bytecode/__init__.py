"""Read, analyse and write CPython 3.11 to 3.14 bytecode through one vocabulary.

`decode` turns a code object into `Instr`s that mean the same on every version, `live_at` returns
the live variables of an instruction, `Writer` assembles new code objects, and
`make_resume` builds the function that continues a frame after a graph break.
Nothing here imports torch. docs/architecture/capture-bytecode.md has the vocabulary.
"""

from .decode import decode
from .encode import AssemblyError, stack_after
from .instr import (
    NO_FALL_THROUGH,
    NULL_BELOW,
    Decoded,
    Handler,
    Instr,
    Label,
    call_pair,
    docstring_of,
)
from .liveness import live_at, reachable, shows_frame
from .resume import Resume, in_prologue, is_resume, make_resume, original, stack_name, state_at
from .writer import Writer

__all__ = [
    "NO_FALL_THROUGH",
    "NULL_BELOW",
    "AssemblyError",
    "Decoded",
    "Handler",
    "Instr",
    "Label",
    "Resume",
    "Writer",
    "call_pair",
    "decode",
    "docstring_of",
    "in_prologue",
    "is_resume",
    "live_at",
    "make_resume",
    "original",
    "reachable",
    "shows_frame",
    "stack_after",
    "stack_name",
    "state_at",
]
