"""The instruction type, the decoded code object, and the few facts about the running CPython.

An `Instr` says the same on every supported version (the vocabulary is in the package docstring);
`Decoded` is a whole code object in that form. Both are immutable; indices into
`Decoded.instrs` are how every other module here names a place in the code.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

PY312 = sys.version_info >= (3, 12)
PY313 = sys.version_info >= (3, 13)

#: On 3.11 and 3.12 the NULL of a call lies below the callable, from 3.13 on above it.
NULL_BELOW = not PY313

CO_VARARGS = 0x04
CO_VARKEYWORDS = 0x08
CO_NESTED = 0x10
CO_GENERATOR = 0x20
CO_COROUTINE = 0x80
CO_ASYNC_GENERATOR = 0x200

Positions = tuple[int | None, int | None, int | None, int | None]
NO_POSITION: Positions = (None, None, None, None)


class Handler(NamedTuple):
    """Where an exception goes: cut the stack to `depth`, push the offset if `lasti`, push it."""

    target: int
    depth: int
    lasti: bool


class Instr(NamedTuple):
    """One instruction of the vocabulary; a named tuple because a frame has hundreds of them.

    `offset` is the byte offset in the original code, `target` the index a jump goes to,
    `positions` (line, end line, column, end column), `handler` the innermost exception handler.
    """

    opname: str
    arg: int
    argval: Any
    offset: int
    target: int | None
    positions: Positions
    handler: Handler | None

    @property
    def lineno(self) -> int | None:
        """Line of the user's source, None where the compiler made the instruction up."""
        return self.positions[0]


@dataclass(frozen=True, eq=False)
class Decoded:
    """A code object as instructions, with what is needed to build variants of it.

    It holds no reference to the code object, so that caches keyed by the code can hold it.
    `local_names` are all names in slot order: variables, then cells that are no variables,
    then free variables. `derived` caches what other modules compute once per code object.
    """

    instrs: tuple[Instr, ...]
    name: str
    qualname: str
    filename: str
    firstlineno: int
    flags: int
    varnames: tuple[str, ...]
    cellvars: tuple[str, ...]
    freevars: tuple[str, ...]
    argcount: int
    kwonly: int
    code_ref: weakref.ref[CodeType]
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def code(self) -> CodeType:
        """The code object this came from; raises ReferenceError when it is gone."""
        code = self.code_ref()
        if code is None:
            raise ReferenceError(f"the code object of {self.qualname} is gone")
        return code

    @property
    def flat_args(self) -> tuple[str, ...]:
        """Argument names in the hook's order: positional, keyword-only, *args, **kwargs."""
        return self.varnames[: self.flat_count]

    @property
    def flat_count(self) -> int:
        """Number of argument slots, *args and **kwargs counting one each."""
        extra = bool(self.flags & CO_VARARGS) + bool(self.flags & CO_VARKEYWORDS)
        return self.argcount + self.kwonly + extra

    @property
    def cells(self) -> frozenset[str]:
        """Names whose slot holds a cell."""
        return frozenset(self.cellvars + self.freevars)

    @property
    def is_generator(self) -> bool:
        """Whether calling the function makes a generator or coroutine of any kind."""
        return bool(self.flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR))


def call_pair(func: Any, null: Any) -> tuple[Any, Any]:
    """The two stack slots, lower first, that hold a callable without self on this version."""
    return (null, func) if NULL_BELOW else (func, null)


def localsplus_names(
    varnames: tuple[str, ...], cellvars: tuple[str, ...], freevars: tuple[str, ...]
) -> tuple[str, ...]:
    """Names by slot of the frame's variable array (a cell that is an argument has one slot)."""
    known = set(varnames)
    return varnames + tuple(c for c in cellvars if c not in known) + freevars
