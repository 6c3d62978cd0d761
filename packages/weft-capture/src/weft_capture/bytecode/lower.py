"""Vocabulary -> the running CPython's raw instructions: the mirror image of decode.py.

One row of `_RULES` per opcode whose raw form differs from its vocabulary form; every other
opcode is written as it is, with its argument looked up as a slot, name or constant.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable
from typing import Any

from .instr import PY312, PY313
from .program import FrameShape, Item, Label, Op

_OPS = dis.opmap
_LOCAL = frozenset(dis.haslocal) | frozenset(dis.hasfree)
_NAME = frozenset(dis.hasname)
_CONST = frozenset(dis.hasconst)

# A comparison carries a mask of the outcomes that make it true
# (1 unordered, 2 less, 4 greater, 8 equal), which specialised comparisons test.
_COMPARE_MASK = {"<": 2, "<=": 10, "==": 8, "!=": 7, ">": 4, ">=": 12}
_COMPARE_SHIFT = 5 if PY313 else 4
_TO_BOOL_BIT = 16
_INTRINSICS = {"IMPORT_STAR": 2, "UNARY_POSITIVE": 5, "LIST_TO_TUPLE": 6}
_INVERSE = {
    "POP_JUMP_IF_TRUE": "POP_JUMP_IF_FALSE",
    "POP_JUMP_IF_FALSE": "POP_JUMP_IF_TRUE",
    "POP_JUMP_IF_NONE": "POP_JUMP_IF_NOT_NONE",
    "POP_JUMP_IF_NOT_NONE": "POP_JUMP_IF_NONE",
}
#: How far before its label a FOR_ITER's raw target lies: END_FOR, and POP_TOP on 3.13.
FOR_ITER_BACK = 2 if PY313 else 1 if PY312 else 0


class Raw:
    """One raw instruction; `jump` is resolved and `width` (code units) grown by the assembler."""

    __slots__ = ("arg", "back", "jump", "op", "source", "width")

    def __init__(self, op: int, arg: int, source: Op, jump: Label | None, back: int) -> None:
        self.op = op
        self.arg = arg
        self.source = source
        self.jump = jump
        self.back = back
        self.width = 0


class Lowering:
    """Collects raw instructions and the constant and name tables they refer to."""

    def __init__(self, shape: FrameShape) -> None:
        self.raws: list[Raw] = []
        self.consts: list[Any] = []
        self.names: list[str] = []
        self._slots = {name: i for i, name in enumerate(shape.slots)}
        self._const_index: dict[int, int] = {}
        self._name_index: dict[str, int] = {}
        self._source = Op("NOP")
        self._fresh_block = True

    def run(self, items: Iterable[Item]) -> None:
        """Lower the program and give each label its index in `raws`."""
        for item in items:
            if isinstance(item, Label):
                item.index = len(self.raws)
                self._fresh_block = True
                continue
            self._source = item
            rule = _RULES.get(item.opname)
            if rule is not None:
                rule(self, item)
            else:
                self._plain(item)
            self._fresh_block = False

    def add(self, opname: str, arg: int = 0, jump: Label | None = None, back: int = 0) -> None:
        """Append one raw instruction with the source position and handler of the current op."""
        self.raws.append(Raw(_OPS[opname], arg, self._source, jump, back))

    def const(self, value: Any) -> int:
        """Index of `value` in the constants (by identity)."""
        index = self._const_index.get(id(value))
        if index is None:
            index = self._const_index[id(value)] = len(self.consts)
            self.consts.append(value)
        return index

    def name(self, name: str) -> int:
        """Index of `name` in co_names."""
        index = self._name_index.get(name)
        if index is None:
            index = self._name_index[name] = len(self.names)
            self.names.append(name)
        return index

    def slot(self, name: str) -> int:
        """Slot of a variable, cell or free variable; raises KeyError for an undeclared one."""
        return self._slots[name]

    def _plain(self, op: Op) -> None:
        raw = _OPS[op.opname]
        if op.jump is not None:
            self.add(op.opname, 0, op.jump)
        elif raw in _LOCAL:
            self.add(op.opname, self.slot(op.argval))
        elif raw in _NAME:
            self.add(op.opname, self.name(op.argval))
        elif raw in _CONST:
            self.add(op.opname, self.const(op.argval))
        else:
            self.add(op.opname, op.arg)

    def call(self, op: Op) -> None:
        if PY313 and op.argval:
            self.add("LOAD_CONST", self.const(op.argval))
            self.add("CALL_KW", op.arg)
            return
        if op.argval:
            self.add("KW_NAMES", self.const(op.argval))
        if not PY312:
            self.add("PRECALL", op.arg)
        self.add("CALL", op.arg)

    def load_method(self, op: Op) -> None:
        if PY312:
            self.add("LOAD_ATTR", self.name(op.argval) << 1 | 1)
        else:
            self.add("LOAD_METHOD", self.name(op.argval))

    def load_attr(self, op: Op) -> None:
        self.add("LOAD_ATTR", self.name(op.argval) << int(PY312))

    def compare(self, op: Op) -> None:
        index = dis.cmp_op.index(op.argval)
        if PY312:
            index = index << _COMPARE_SHIFT | _COMPARE_MASK[op.argval]
        self.add("COMPARE_OP", index)

    def make_function(self, op: Op) -> None:
        if not PY313:
            self.add("MAKE_FUNCTION", op.arg)
            return
        self.add("MAKE_FUNCTION")
        for flag in (8, 4, 2, 1):
            if op.arg & flag:
                self.add("SET_FUNCTION_ATTRIBUTE", flag)

    def format_value(self, op: Op) -> None:
        if PY313:
            self.add("FORMAT_WITH_SPEC" if op.arg & 4 else "FORMAT_SIMPLE")
        else:
            self.add("FORMAT_VALUE", op.arg)

    def intrinsic(self, op: Op) -> None:
        if PY312:
            self.add("CALL_INTRINSIC_1", _INTRINSICS[op.opname])
        else:
            self.add(op.opname)

    def to_bool(self) -> None:
        """Make the top of the stack an exact bool, which 3.13's branches insist on."""
        if not PY313:
            return
        last = None if self._fresh_block or not self.raws else self.raws[-1]
        if last is not None and last.op == _OPS["COMPARE_OP"]:
            last.arg |= _TO_BOOL_BIT
        elif last is None or last.op not in _MAKES_BOOL:
            self.add("TO_BOOL")

    def unary_not(self, op: Op) -> None:
        self.to_bool()
        self.add("UNARY_NOT")

    def jump(self, op: Op) -> None:
        assert op.jump is not None
        if op.jump.index is None:
            self.add("JUMP_FORWARD", 0, op.jump)
        else:
            self.add("JUMP_BACKWARD_NO_INTERRUPT" if op.arg else "JUMP_BACKWARD", 0, op.jump)

    def pop_jump(self, op: Op) -> None:
        assert op.jump is not None
        if op.opname.endswith(("TRUE", "FALSE")):
            self.to_bool()
        backward = op.jump.index is not None
        if not PY312:
            direction = "BACKWARD" if backward else "FORWARD"
            self.add(op.opname.replace("JUMP", f"JUMP_{direction}"), 0, op.jump)
        elif not backward:
            self.add(op.opname, 0, op.jump)
        else:  # 3.12 and later branch forward only
            over = Label()
            self.add(_INVERSE[op.opname], 0, over)
            self.add("JUMP_BACKWARD", 0, op.jump)
            over.index = len(self.raws)

    def for_iter(self, op: Op) -> None:
        self.add("FOR_ITER", 0, op.jump, FOR_ITER_BACK)

    def load_fast(self, op: Op) -> None:
        self.add("LOAD_FAST_CHECK" if PY312 and op.arg else "LOAD_FAST", self.slot(op.argval))

    def load_closure(self, op: Op) -> None:
        self.add("LOAD_FAST" if PY313 else "LOAD_CLOSURE", self.slot(op.argval))

    def load_global(self, op: Op) -> None:
        self.add("LOAD_GLOBAL", self.name(op.argval) << 1)

    def load_super_attr(self, op: Op) -> None:
        self.add("LOAD_SUPER_ATTR", self.name(op.argval[0]) << 2 | op.arg)


_MAKES_BOOL = frozenset(_OPS[n] for n in ("CONTAINS_OP", "IS_OP", "UNARY_NOT"))
_RULES: dict[str, Callable[[Lowering, Op], None]] = {
    "CALL": Lowering.call,
    "LOAD_METHOD": Lowering.load_method,
    "LOAD_ATTR": Lowering.load_attr,
    "LOAD_GLOBAL": Lowering.load_global,
    "LOAD_SUPER_ATTR": Lowering.load_super_attr,
    "LOAD_FAST": Lowering.load_fast,
    "LOAD_CLOSURE": Lowering.load_closure,
    "COMPARE_OP": Lowering.compare,
    "MAKE_FUNCTION": Lowering.make_function,
    "FORMAT_VALUE": Lowering.format_value,
    "UNARY_NOT": Lowering.unary_not,
    "JUMP": Lowering.jump,
    "FOR_ITER": Lowering.for_iter,
    **dict.fromkeys(_INVERSE, Lowering.pop_jump),
    **dict.fromkeys(_INTRINSICS, Lowering.intrinsic),
}
