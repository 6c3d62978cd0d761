"""What an instruction does to the operand stack, in terms of values and NULLs.

A stack is a list with True for a value and False for a NULL, bottom first, as `make_resume` takes
it. The number of operands comes from the instruction's raw form and CPython's own stack effects;
the table below only says how many results there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .encode import raw_effect
from .instr import Instr, call_pair
from .lower import Lowering
from .program import FrameShape, Op

# fmt: off
_NO_RESULT = frozenset((
    "COPY_FREE_VARS", "DELETE_ATTR", "DELETE_DEREF", "DELETE_FAST", "DELETE_GLOBAL",
    "DELETE_NAME", "DELETE_SUBSCR", "DICT_MERGE", "DICT_UPDATE", "END_FOR", "JUMP", "LIST_APPEND",
    "LIST_EXTEND", "MAKE_CELL", "MAP_ADD", "NOP", "POP_EXCEPT", "POP_JUMP_IF_FALSE",
    "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_IF_TRUE", "POP_TOP", "RAISE_VARARGS",
    "RERAISE", "RESUME", "RETURN_VALUE", "SETUP_ANNOTATIONS", "SET_ADD", "SET_UPDATE",
    "STORE_ATTR", "STORE_DEREF", "STORE_FAST", "STORE_GLOBAL", "STORE_NAME", "STORE_SUBSCR",
))
# fmt: on
_RESULTS: dict[str, Callable[[Instr], int]] = {
    "BEFORE_WITH": lambda i: 2,
    "CHECK_EG_MATCH": lambda i: 2,
    "CHECK_EXC_MATCH": lambda i: 2,
    "CLEANUP_THROW": lambda i: 2,
    "FOR_ITER": lambda i: 2,
    "LOAD_METHOD": lambda i: 2,
    "LOAD_SUPER_ATTR": lambda i: 2 if i.argval[1] else 1,
    "PUSH_EXC_INFO": lambda i: 2,
    "UNPACK_EX": lambda i: (i.arg & 0xFF) + 1 + (i.arg >> 8),
    "UNPACK_SEQUENCE": lambda i: i.arg,
}
# Conditional jumps are written in a way that depends on the direction; their effect does not.
_NET = {
    "FOR_ITER": 1,
    "JUMP": 0,
    "LOAD_METHOD": 1,
    "POP_JUMP_IF_FALSE": -1,
    "POP_JUMP_IF_NONE": -1,
    "POP_JUMP_IF_NOT_NONE": -1,
    "POP_JUMP_IF_TRUE": -1,
    "SEND": 0,
}


def net_effect(instr: Instr) -> int:
    """By how much the instruction changes the depth of the stack when it does not jump."""
    known = _NET.get(instr.opname)
    if known is not None:
        return known
    names = (instr.argval,) if isinstance(instr.argval, str) else ()
    lowering = Lowering(FrameShape("", "", "", 1, 0, names, (), (), 0, 0, 0))
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
    count = _RESULTS.get(opname)
    results = count(instr) if count is not None else int(opname not in _NO_RESULT)
    kept = before[: len(before) + net_effect(instr) - results]
    if opname == "LOAD_METHOD" or (opname == "LOAD_SUPER_ATTR" and results == 2):
        pair: tuple[bool, bool] = call_pair(True, False)
        return kept + pair
    return kept + (True,) * results
