"""Which variables the rest of a frame still needs, by backward data flow over bit sets.

A plain variable is live where some path reads it before writing it. A cell is live where some
path touches it at all: writes through a cell may be seen by closures, so they never kill it.
An instruction with an exception handler can also go to the handler.
"""

from __future__ import annotations

import bdb
import sys
from collections.abc import Sequence
from typing import Any

from weft_capture.library_traits import DEBUGGER_MODULES

from .instr import NO_FALL_THROUGH, Decoded, Instr

_KILLS = frozenset({"STORE_FAST", "LOAD_FAST_AND_CLEAR"})
_USES = frozenset(
    {
        "LOAD_FAST",
        "DELETE_FAST",
        "LOAD_FAST_AND_CLEAR",
        "LOAD_DEREF",
        "STORE_DEREF",
        "DELETE_DEREF",
        "LOAD_CLOSURE",
        "LOAD_FROM_DICT_OR_DEREF",
    }
)
_READS_FRAME = frozenset(
    {"eval", "exec", "locals", "_getframe", "currentframe", "breakpoint", "set_trace"}
)
_READS_FRAME_ALONE = frozenset({"dir", "vars"})  # without arguments

_SHOWS_FRAME = frozenset(
    {"_getframe", "currentframe", "breakpoint", "set_trace", "settrace", "setprofile", "set_events"}
)

_LOOP_ENDS = ("END_FOR", "POP_TOP")


def shows_frame(decoded: Decoded, index: int) -> bool:
    """Whether instruction `index` calls a function that reads this frame (a debugger, say)."""
    instr = decoded.instrs[index]
    near = decoded.instrs[max(index - instr.arg - 3, 0) : index]
    names = [i.argval for i in near if i.opname.startswith("LOAD_") and i.opname != "LOAD_CONST"]
    return instr.opname == "CALL" and not _SHOWS_FRAME.isdisjoint(names)


def live_at(decoded: Decoded, index: int) -> frozenset[str]:
    """Names of the variables and cells that execution from instruction `index` on may use.

    Includes the first argument when a `super()` without arguments follows, which looks it up in
    the frame. Results for the whole code are computed once and kept on `decoded`.
    """
    table = decoded.derived.get("live")
    if table is None:
        table = decoded.derived["live"] = _solve(decoded)
    names, live = table
    bits = live[index]
    return frozenset(name for i, name in enumerate(names) if bits >> i & 1)


def _is_debugged() -> bool:
    """Whether a debugger runs in this thread: it may read every variable of every frame."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    trace = sys.gettrace()
    owner = getattr(trace, "__self__", trace)  # the debugger, where it is one of its methods
    module = type(owner).__module__
    return isinstance(owner, bdb.Bdb) or any(name in module for name in DEBUGGER_MODULES)


def successors(decoded: Decoded, index: int) -> list[int]:
    """Indices that can run after instruction `index`, its exception handler included."""
    instr = decoded.instrs[index]
    result = [] if instr.opname in NO_FALL_THROUGH else [index + 1]
    if instr.target is not None:
        result.append(instr.target)
    if instr.handler is not None:
        result.append(instr.handler.target)
    return result


def reachable(decoded: Decoded, start: int) -> list[bool]:
    """For every index, whether execution from `start` can come there."""
    seen = [False] * len(decoded.instrs)
    todo = [start]
    while todo:
        index = todo.pop()
        if not seen[index]:
            seen[index] = True
            todo += successors(decoded, index)
    # FOR_ITER's raw target lies before its label: END_FOR (and POP_TOP) must come along.
    for index, instr in enumerate(decoded.instrs):
        if seen[index] and instr.opname == "FOR_ITER" and instr.target is not None:
            at = instr.target - 1
            while at >= 0 and decoded.instrs[at].opname in _LOOP_ENDS and not seen[at]:
                seen[at] = True
                at -= 1
    return seen


def first_argument_of_super(decoded: Decoded) -> str | None:
    """The variable that `super()` without arguments would look up, if it can work here."""
    return decoded.varnames[0] if "__class__" in decoded.freevars and decoded.varnames else None


def _solve(decoded: Decoded) -> tuple[list[str], list[int]]:
    names = list(dict.fromkeys(decoded.varnames + decoded.cellvars + decoded.freevars))
    bit = {name: 1 << i for i, name in enumerate(names)}
    first = first_argument_of_super(decoded)
    effects = [_uses_and_kills(instr, bit, first, decoded.cells) for instr in decoded.instrs]
    if _is_debugged() or any(_reads_frame(decoded.instrs, i) for i in range(len(decoded.instrs))):
        return names, [-1] * (len(decoded.instrs) + 1)  # the callee sees every variable
    live = [0] * (len(decoded.instrs) + 1)
    follow = [successors(decoded, i) for i in range(len(decoded.instrs))]
    changed = True
    while changed:
        changed = False
        for index in range(len(decoded.instrs) - 1, -1, -1):
            out = 0
            for successor in follow[index]:
                out |= live[successor]
            uses, kills = effects[index]
            # A handler sees the variables as they were before the instruction's own store.
            handler = decoded.instrs[index].handler
            out = uses | out & ~kills | (live[handler.target] if handler else 0)
            if out != live[index]:
                live[index] = out
                changed = True
    return names, live


def _reads_frame(instrs: Sequence[Instr], index: int) -> bool:
    """Whether this loads a function that reads every variable of the frame."""
    if not instrs[index].opname.startswith("LOAD"):
        return False
    alone = any((i.opname, i.arg) == ("CALL", 0) for i in instrs[index + 1 : index + 3])
    name = instrs[index].argval
    return name in _READS_FRAME or (alone and name in _READS_FRAME_ALONE)


def _uses_and_kills(
    instr: Instr, bit: dict[str, int], first: str | None, cells: frozenset[str]
) -> tuple[int, int]:
    opname, name = instr.opname, instr.argval
    if opname in _KILLS and name in cells:  # an inlined comprehension restores the cell
        return bit[name], 0
    if opname in _USES or opname in _KILLS:
        return bit[name] * (opname in _USES), bit[name] * (opname in _KILLS)
    if first is not None and _may_be_super(instr):
        return bit[first] | bit["__class__"], 0
    return 0, 0


def _may_be_super(instr: Instr) -> bool:
    """Whether this may load or call `super` without arguments, in code that has __class__."""
    return (instr.opname, instr.argval) == ("LOAD_GLOBAL", "super") or (
        (instr.opname, instr.arg) == ("CALL", 0) or instr.opname == "LOAD_SUPER_ATTR"
    )
