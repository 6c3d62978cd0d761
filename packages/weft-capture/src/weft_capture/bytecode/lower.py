"""Vocabulary -> the running CPython's raw instructions: the mirror image of decode.py.

One row of `_RULES` per opcode whose raw form differs from its vocabulary form; every other
opcode is written as it is, with its argument looked up as a slot, name or constant.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weft_capture.python_compat import PY312, PY313, PY314

from .instr import (
    COMMON_CONSTANTS,
    COMPARE_SHIFT,
    COMPARE_TO_BOOL,
    ENTER_WITH,
    INTRINSICS,
    KIND,
    SUBSCRIBE,
    Item,
    Label,
    Op,
)

_OPS = dis.opmap

# A comparison carries a mask of the outcomes that make it true
# (1 unordered, 2 less, 4 greater, 8 equal), which specialised comparisons test.
_COMPARE_MASK = {"<": 2, "<=": 10, "==": 8, "!=": 7, ">": 4, ">=": 12}
_MAKES_BOOL = frozenset(_OPS[n] for n in ("CONTAINS_OP", "IS_OP", "UNARY_NOT"))
#: The conditional jumps, and those on the opposite condition.
INVERSE = {
    "POP_JUMP_IF_TRUE": "POP_JUMP_IF_FALSE",
    "POP_JUMP_IF_FALSE": "POP_JUMP_IF_TRUE",
    "POP_JUMP_IF_NONE": "POP_JUMP_IF_NOT_NONE",
    "POP_JUMP_IF_NOT_NONE": "POP_JUMP_IF_NONE",
}


@dataclass(slots=True, eq=False)
class Raw:
    """One raw instruction; `jump` is resolved and `width` (code units) grown by the assembler."""

    op: int
    arg: int
    source: Op
    jump: Label | None
    width: int = 0


class Lowering:
    """Collects raw instructions and the constant and name tables they refer to."""

    def __init__(self, slots: Sequence[str]) -> None:
        self.raws: list[Raw] = []
        self.names: dict[str, int] = {}
        self._consts: dict[int, tuple[int, Any]] = {}  # by identity
        # Slot of a variable, cell or free variable; raises KeyError for an undeclared one.
        self.slot = {name: i for i, name in enumerate(slots)}.__getitem__
        self._index = {"const": self.const, "name": self.name, "local": self.slot}
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
            _RULES.get(item.opname, Lowering.plain)(self, item)
            self._fresh_block = False

    @property
    def consts(self) -> tuple[Any, ...]:
        """The constants in order."""
        return tuple([value for _, value in self._consts.values()])

    def add(self, opname: str, arg: int = 0, jump: Label | None = None) -> None:
        """Append one raw instruction with the source position and handler of the current op."""
        self.raws.append(Raw(_OPS[opname], arg, self._source, jump))

    def const(self, value: Any) -> int:
        """Index of `value` in the constants."""
        return self._consts.setdefault(id(value), (len(self._consts), value))[0]

    def name(self, name: str) -> int:
        """Index of `name` in co_names."""
        return self.names.setdefault(name, len(self.names))

    def plain(self, op: Op) -> None:
        """An opcode that is the same in both forms."""
        index = self._index.get(KIND.get(_OPS[op.opname], ""))
        self.add(op.opname, index(op.argval) if index else op.arg, op.jump)

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

    def call_function_ex(self, op: Op) -> None:
        if PY314 and not op.arg:
            self.add("PUSH_NULL")
        self.add("CALL_FUNCTION_EX", 0 if PY314 else op.arg)

    def before_with(self, op: Op) -> None:
        if not PY314:
            self.add(op.opname)
            return
        for name, arg in ENTER_WITH:
            asynchronous = name == "LOAD_SPECIAL" and op.opname == "BEFORE_ASYNC_WITH"
            self.add(name, arg + 2 * asynchronous)

    def subscribe(self, op: Op) -> None:
        if PY314:
            self.add("BINARY_OP", SUBSCRIBE)
        else:
            self.add("BINARY_SUBSCR")

    def assertion_error(self, op: Op) -> None:
        if PY314:
            self.add("LOAD_COMMON_CONSTANT", COMMON_CONSTANTS.index(AssertionError))
        else:
            self.add("LOAD_ASSERTION_ERROR")

    def load_method(self, op: Op) -> None:
        if PY312:
            self.add("LOAD_ATTR", self.name(op.argval) << 1 | 1)
        else:
            self.add("LOAD_METHOD", self.name(op.argval))

    def compare(self, op: Op) -> None:
        mask = _COMPARE_MASK[op.argval] if PY312 else 0
        self.add("COMPARE_OP", dis.cmp_op.index(op.argval) << COMPARE_SHIFT | mask)

    def make_function(self, op: Op) -> None:
        if not PY313:
            self.add("MAKE_FUNCTION", op.arg)
            return
        self.add("MAKE_FUNCTION")
        for flag in (8, 4, 16, 2, 1):
            if op.arg & flag:
                self.add("SET_FUNCTION_ATTRIBUTE", flag)

    def format_value(self, op: Op) -> None:
        if PY313:
            self.add("FORMAT_WITH_SPEC" if op.arg & 4 else "FORMAT_SIMPLE")
        else:
            self.add("FORMAT_VALUE", op.arg)

    def intrinsic(self, op: Op) -> None:
        if PY312:
            count, number = INTRINSICS[op.opname]
            self.add(f"CALL_INTRINSIC_{count}", number)
        else:
            self.add(op.opname)

    def to_bool(self) -> None:
        """Make the top of the stack an exact bool, which 3.13's branches insist on."""
        if not PY313:
            return
        last = None if self._fresh_block or not self.raws else self.raws[-1]
        if last is not None and last.op == _OPS["COMPARE_OP"]:
            last.arg |= COMPARE_TO_BOOL
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
            self.add(INVERSE[op.opname], 0, over)
            self.add("JUMP_BACKWARD", 0, op.jump)
            over.index = len(self.raws)


_CHECKED_LOAD = "LOAD_FAST_CHECK" if PY312 else "LOAD_FAST"
_LOAD_CLOSURE = "LOAD_FAST" if PY313 else "LOAD_CLOSURE"
_RULES: dict[str, Callable[[Lowering, Op], None]] = {
    "CALL": Lowering.call,
    "CALL_FUNCTION_EX": Lowering.call_function_ex,
    "BINARY_SUBSCR": Lowering.subscribe,
    **dict.fromkeys(("BEFORE_WITH", "BEFORE_ASYNC_WITH"), Lowering.before_with),
    "LOAD_ASSERTION_ERROR": Lowering.assertion_error,
    "LOAD_METHOD": Lowering.load_method,
    "LOAD_ATTR": lambda w, op: w.add("LOAD_ATTR", w.name(op.argval) << int(PY312)),
    "LOAD_GLOBAL": lambda w, op: w.add("LOAD_GLOBAL", w.name(op.argval) << 1),
    "LOAD_SUPER_ATTR": lambda w, op: w.add("LOAD_SUPER_ATTR", w.name(op.argval[0]) << 2 | op.arg),
    "LOAD_FAST": lambda w, op: w.add(_CHECKED_LOAD if op.arg else "LOAD_FAST", w.slot(op.argval)),
    "LOAD_CLOSURE": lambda w, op: w.add(_LOAD_CLOSURE, w.slot(op.argval)),
    "COMPARE_OP": Lowering.compare,
    "MAKE_FUNCTION": Lowering.make_function,
    "FORMAT_VALUE": Lowering.format_value,
    "UNARY_NOT": Lowering.unary_not,
    "JUMP": Lowering.jump,
    **dict.fromkeys(INVERSE, Lowering.pop_jump),
    **dict.fromkeys(INTRINSICS, Lowering.intrinsic),
}
