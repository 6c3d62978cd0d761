"""What an instruction does to the operand stack, in terms of values and NULLs.

A stack is a list with True for a value and False for a NULL, bottom first, as `make_resume` takes
it. CPython's own stack effects say how deep it is after an instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

from .encode import raw_effect
from .instr import Instr, call_pair
from .lower import INVERSE, Lowering
from .program import Op

# Conditional jumps are written in a way that depends on the direction; their effect does not.
_NET = {"FOR_ITER": 1, "JUMP": 0, "LOAD_METHOD": 1, "SEND": 0} | dict.fromkeys(INVERSE, -1)


def net_effect(instr: Instr) -> int:
    """By how much the instruction changes the depth of the stack when it does not jump."""
    known = _NET.get(instr.opname)
    if known is not None:
        return known
    lowering = Lowering((instr.argval,) if isinstance(instr.argval, str) else ())
    lowering.run([Op(instr.opname, instr.arg, instr.argval)])
    return sum(raw_effect(raw.op, raw.arg, False) for raw in lowering.raws)


def stack_after(
    instr: Instr, stack: Sequence[bool], *, jump: bool = False, bound: bool = True
) -> tuple[bool, ...]:
    """The stack after an instruction that ran for real.

    Args:
        instr: the instruction.
        stack: the stack before it.
        jump: whether it jumped.
        bound: for LOAD_FAST_AND_CLEAR, whether the variable was bound.

    A LOAD_METHOD (or the method form of LOAD_SUPER_ATTR) is taken to have found an attribute that
    is no method: what it really pushes is known only at run time, so a break at one has to load
    the attribute and push the NULL itself.
    """
    before = tuple(stack)
    opname = instr.opname
    if jump:
        return before if opname == "JUMP" else before[:-1]
    if opname == "PUSH_NULL":
        return (*before, False)
    if opname == "COPY":
        return (*before, before[-instr.arg])
    if opname == "LOAD_FAST_AND_CLEAR":
        return (*before, bound)
    if opname == "SWAP":
        items = list(before)
        items[-1], items[-instr.arg] = items[-instr.arg], items[-1]
        return tuple(items)
    depth = len(before) + net_effect(instr)
    if opname == "LOAD_METHOD" or (opname == "LOAD_SUPER_ATTR" and instr.argval[1]):
        pair: tuple[bool, bool] = call_pair(True, False)
        return before[: depth - 2] + pair
    # Operands and results are values, but for the NULL below a call, where its result will lie.
    kept = before[: depth - 1] if opname.startswith("CALL") else before[:depth]
    return kept + (True,) * (depth - len(kept))
