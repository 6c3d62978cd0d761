"""Code object -> `Decoded`: three passes over the raw bytes.

`_raw` unpacks code units, `_Normal` rewrites each raw instruction to the vocabulary (one method
or one table row per opcode that differs between versions), and `_build` resolves jump targets
and exception handlers to indices. Results are cached for the life of the code object.
"""

from __future__ import annotations

import dis
import opcode
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

from weft_capture.python_compat import PY312, PY313, PY314

from .instr import (
    BACKWARD,
    CACHE_UNITS,
    COMMON_CONSTANTS,
    COMPARE_SHIFT,
    COMPARE_TO_BOOL,
    ENTER_WITH,
    EXTENDED_ARG,
    FOR_ITER_BACK,
    INTRINSICS,
    KIND,
    NO_POSITION,
    NULL_BELOW,
    SUBSCRIBE,
    UNBOUND,
    Decoded,
    FrameShape,
    Handler,
    Instr,
    Positions,
)

_INTRINSIC_NAMES = {number: name for name, number in INTRINSICS.items()}

_Cache = dict[int, tuple[weakref.ref[CodeType], Decoded]]
_cache: _Cache = {}


def decode(code: CodeType) -> Decoded:
    """Decode `code`; a second call for the same living object returns the same `Decoded`."""
    key = id(code)
    hit = _cache.get(key)
    if hit is not None and hit[0]() is code:
        return hit[1]

    def forget(dead: weakref.ref[CodeType], cache: _Cache = _cache) -> None:
        # `cache` is bound early: at interpreter exit the module's globals are gone.
        if key in cache and cache[key][0] is dead:
            del cache[key]

    ref = weakref.ref(code, forget)
    decoded = _build(code, ref)
    _cache[key] = (ref, decoded)
    return decoded


def _raw(code: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start offset, offset behind the caches, opcode, full argument)."""
    extended = 0
    start = None
    at, end = 0, len(code)
    while at < end:
        op, arg = code[at], code[at + 1] | extended
        if start is None:
            start = at
        at += 2
        if op == EXTENDED_ARG:
            extended = arg << 8
            continue
        at += 2 * CACHE_UNITS.get(op, 0)
        yield start, at, op, arg
        extended, start = 0, None


class _Normal:
    """Collects vocabulary rows `[opname, arg, argval, offset, target offset, positions]`."""

    def __init__(self, code: CodeType, shape: FrameShape) -> None:
        self.consts = code.co_consts
        self.names = code.co_names
        self.cells = shape.cells
        self.slots = shape.slots
        self.tables = {"const": self.consts, "name": self.names, "local": self.slots}
        self.rows: list[list[Any]] = []
        self.index_of: dict[int, int] = {}
        self.kwnames: tuple[str, ...] = ()
        self.offset = 0
        self.follower = ""
        self.rest = 0  # number of instructions merged into the last one
        self.positions: Positions = NO_POSITION

    def emit(
        self, opname: str, arg: int = 0, argval: Any = None, target: int | None = None
    ) -> None:
        self.rows.append([opname, arg, argval, self.offset, target, self.positions])

    def run(self, code: CodeType) -> None:
        """Rewrite every raw instruction of `code`."""
        positions = list(code.co_positions())
        raws = list(_raw(code.co_code))
        for at, (start, end, op, arg) in enumerate(raws):
            self.follower = dis.opname[raws[at + 1][2]] if at + 1 < len(raws) else ""
            self.index_of[start] = len(self.rows)
            if self.rest:
                self.rest -= 1
                continue
            self.offset = start
            # The EXTENDED_ARG prefix and the opcode share one position entry.
            self.positions = positions[start >> 1]
            name = dis.opname[op]
            special = _SPECIAL.get(name)
            if special is not None:
                special(self, arg)
                continue
            operand_kind = KIND.get(op)
            if operand_kind == "jump":
                self.jump(name, op, arg, end)
            elif operand_kind in self.tables:
                self.emit(name, 0, self.tables[operand_kind][arg])
            else:
                self.emit(name, arg if operand_kind else 0, arg if operand_kind else None)

    def jump(self, name: str, op: int, arg: int, end: int) -> None:
        target = end + (-2 if op in BACKWARD else 2) * arg
        if name.endswith("_OR_POP"):  # 3.11
            self.emit("COPY", 1, 1)
            self.emit("POP_" + name.removesuffix("_OR_POP"), 0, None, target)
            self.emit("POP_TOP")
        elif name.startswith("JUMP_"):
            self.emit("JUMP", int(name.endswith("NO_INTERRUPT")), None, target)
        elif name == "FOR_ITER":
            self.emit(name, 0, None, target + 2 * FOR_ITER_BACK)
        else:
            name = name.replace("JUMP_FORWARD_", "JUMP_").replace("JUMP_BACKWARD_", "JUMP_")
            self.emit(name, 0, None, target)

    def call(self, arg: int) -> None:
        self.emit("CALL", arg, self.kwnames)
        self.kwnames = ()

    def kw_names(self, arg: int) -> None:  # 3.11 and 3.12
        self.kwnames = self.consts[arg]

    def call_kw(self, arg: int) -> None:  # 3.13
        names = self.rows.pop()[2]
        self.emit("CALL", arg, names)

    def load_global(self, arg: int) -> None:
        null = arg & 1
        if null and NULL_BELOW:
            self.emit("PUSH_NULL")
        self.emit("LOAD_GLOBAL", 0, self.names[arg >> 1])
        if null and not NULL_BELOW:
            self.emit("PUSH_NULL")

    def load_attr(self, arg: int) -> None:  # 3.12 merged LOAD_METHOD into it
        if PY312:
            self.emit("LOAD_METHOD" if arg & 1 else "LOAD_ATTR", 0, self.names[arg >> 1])
        else:
            self.emit("LOAD_ATTR", 0, self.names[arg])

    def load_super_attr(self, arg: int) -> None:
        # Bit 1 (two-argument form) changes only what an error message says, but is kept in arg.
        self.emit("LOAD_SUPER_ATTR", arg & 3, (self.names[arg >> 2], bool(arg & 1)))

    def load_fast(self, arg: int, checked: int) -> None:
        name = self.slots[arg]
        if name in self.cells:  # 3.13 loads cells for closures with LOAD_FAST
            self.emit("LOAD_CLOSURE", checked, name)
        else:
            self.emit("LOAD_FAST", checked, name)

    def pair(self, first: str, second: str, arg: int) -> None:  # 3.13 superinstructions
        for name, slot in ((first, arg >> 4), (second, arg & 15)):
            if name == "LOAD_FAST":
                self.load_fast(slot, 0)
            else:
                self.emit(name, 0, self.slots[slot])

    def return_const(self, arg: int) -> None:
        self.emit("LOAD_CONST", 0, self.consts[arg])
        self.emit("RETURN_VALUE")

    def slice_op(self, last: str) -> None:
        self.emit("BUILD_SLICE", 2, 2)
        self.emit(last)

    def intrinsic(self, count: int, arg: int) -> None:
        name = _INTRINSIC_NAMES.get((count, arg))
        self.emit(name or f"CALL_INTRINSIC_{count}", 0 if name else arg, None if name else arg)

    def function_attribute(self, arg: int) -> None:  # 3.13: fold back into MAKE_FUNCTION's flags
        row = self.rows[-1]
        if row[0] != "MAKE_FUNCTION":
            raise ValueError("SET_FUNCTION_ATTRIBUTE does not follow MAKE_FUNCTION")
        row[1] |= arg
        row[2] = row[1]

    def compare(self, arg: int) -> None:
        self.emit("COMPARE_OP", 0, dis.cmp_op[arg >> COMPARE_SHIFT])
        if PY313 and arg & COMPARE_TO_BOOL:
            self.to_bool()

    def to_bool(self, arg: int = 0) -> None:  # 3.13; what follows asks for the truth by itself,
        if self.follower not in _ASKS_TRUTH:  # but for `not not x`
            self.emit("UNARY_NOT")
            self.emit("UNARY_NOT")

    def call_function_ex(self, arg: int) -> None:
        if PY314:  # a NULL means no keywords
            arg = int(self.rows[-1][0] != "PUSH_NULL")
            if not arg:
                self.rows.pop()
                self.index_of[self.offset] = len(self.rows)
        self.emit("CALL_FUNCTION_EX", arg & 1, arg & 1)

    def binary(self, arg: int) -> None:
        if arg == SUBSCRIBE:
            self.emit("BINARY_SUBSCR")
        else:
            self.emit("BINARY_OP", arg, _op_symbol(arg))

    def common_constant(self, arg: int) -> None:
        value = COMMON_CONSTANTS[arg]
        if value is AssertionError:
            self.emit("LOAD_ASSERTION_ERROR")
        else:
            self.emit("LOAD_COMMON_CONSTANT", arg, value)

    def load_special(self, arg: int) -> None:
        """Fold the instructions that enter a `with` block: this is the first lookup of two."""
        if arg & 1:
            self.rows.pop()  # COPY
            self.emit("BEFORE_ASYNC_WITH" if arg & 2 else "BEFORE_WITH")
            self.rest = len(ENTER_WITH) - 2

    def skip(self, arg: int) -> None:
        """Skip the instruction, which has no meaning in the vocabulary."""


def _op_symbol(arg: int) -> str:
    return opcode._nb_ops[arg][1]  # type: ignore[attr-defined,no-any-return]


_SLOT = {
    **{op: op for op in ("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR")},
    "LOAD_CLOSURE": "LOAD_FAST",  # as `load_fast` took it
}
_ASKS_TRUTH = frozenset(("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "UNARY_NOT"))
_RESTORES = frozenset(("END_FOR", "POP_TOP", "SWAP", "STORE_FAST", "JUMP", "NOP"))

_Rule = Callable[[_Normal, int], None]
_SPECIAL: dict[str, _Rule] = {
    "CACHE": _Normal.skip,
    "PRECALL": _Normal.skip,
    "TO_BOOL": _Normal.to_bool,
    "CALL": _Normal.call,
    "KW_NAMES": _Normal.kw_names,
    "CALL_KW": _Normal.call_kw,
    "CALL_FUNCTION_EX": _Normal.call_function_ex,
    "LOAD_GLOBAL": _Normal.load_global,
    "LOAD_ATTR": _Normal.load_attr,
    "LOAD_SUPER_ATTR": _Normal.load_super_attr,
    "LOAD_FAST": lambda n, a: n.load_fast(a, 0 if PY312 else 1),
    "LOAD_FAST_BORROW": lambda n, a: n.load_fast(a, 0),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": lambda n, a: n.pair("LOAD_FAST", "LOAD_FAST", a),
    "LOAD_SMALL_INT": lambda n, a: n.emit("LOAD_CONST", 0, a),
    "LOAD_COMMON_CONSTANT": _Normal.common_constant,
    "LOAD_SPECIAL": _Normal.load_special,
    "NOT_TAKEN": _Normal.skip,
    "POP_ITER": lambda n, a: n.emit("POP_TOP"),
    "END_ASYNC_FOR": lambda n, a: n.emit("END_ASYNC_FOR"),
    "LOAD_FAST_CHECK": lambda n, a: n.load_fast(a, 1),
    "LOAD_FAST_LOAD_FAST": lambda n, a: n.pair("LOAD_FAST", "LOAD_FAST", a),
    "STORE_FAST_LOAD_FAST": lambda n, a: n.pair("STORE_FAST", "LOAD_FAST", a),
    "STORE_FAST_STORE_FAST": lambda n, a: n.pair("STORE_FAST", "STORE_FAST", a),
    "RETURN_CONST": _Normal.return_const,
    "COMPARE_OP": _Normal.compare,
    "CONTAINS_OP": lambda n, a: n.emit("CONTAINS_OP", a, bool(a)),
    "IS_OP": lambda n, a: n.emit("IS_OP", a, bool(a)),
    "BINARY_OP": _Normal.binary,
    "BINARY_SLICE": lambda n, a: n.slice_op("BINARY_SUBSCR"),
    "STORE_SLICE": lambda n, a: n.slice_op("STORE_SUBSCR"),
    "CALL_INTRINSIC_1": lambda n, a: n.intrinsic(1, a),
    "CALL_INTRINSIC_2": lambda n, a: n.intrinsic(2, a),
    "SET_FUNCTION_ATTRIBUTE": _Normal.function_attribute,
    "FORMAT_SIMPLE": lambda n, a: n.emit("FORMAT_VALUE", 0, 0),
    "FORMAT_WITH_SPEC": lambda n, a: n.emit("FORMAT_VALUE", 4, 4),
}


def _handlers(
    code: CodeType, rows: list[list[Any]], index_of: dict[int, int]
) -> list[Handler | None]:
    """The innermost handler of each row (the compiler's table has no overlapping ranges)."""
    result: list[Handler | None] = [None] * len(rows)
    for start, end, target, depth, lasti in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        handler = Handler(index_of[target], depth, lasti)
        at = index_of[start]
        while at < len(rows) and rows[at][3] < end:
            result[at] = handler
            at += 1
    for at, covering in enumerate(result):
        if covering is not None and rows[covering.target][2] == UNBOUND:  # added by weft
            target = covering.target
            result[at] = result[target + [row[0] for row in rows[target:]].index("RERAISE")]
    return result


def _part_inlined(
    rows: list[list[Any]],
    index_of: dict[int, int],
    handlers: Sequence[Handler | None],
    cells: frozenset[str],
) -> set[str]:
    """Rename the plain variables of inlined comprehensions where a cell has their name.

    From 3.12 the two share a slot, and the comprehension saves the cell. Returns the new names.
    """
    variables: set[str] = set()
    seen: set[int] = set()  # inner comprehensions come behind their outer ones
    for at, (opname, _, name, *_) in reversed(list(enumerate(rows))):
        if opname != "LOAD_FAST_AND_CLEAR" or name not in cells:
            continue
        begin = next(i for i in range(at, len(rows)) if rows[i][0].startswith("BUILD_"))
        cleanup, loop = handlers[begin], rows[begin + 2]
        if cleanup is None or loop[0] != "FOR_ITER":
            continue
        loop_end = end = index_of[loop[4]]
        while rows[end][0] in _RESTORES and rows[end][2] != name:
            end = index_of[rows[end][4]] if rows[end][0] == "JUMP" else end + 1
        raises = next(i for i in range(cleanup.target, len(rows)) if rows[i][0] == "RERAISE")
        is_cell = rows[at + 1][0] == "MAKE_CELL"
        for i in (*range(at, loop_end), end, *range(cleanup.target, raises)):
            row = rows[i]
            if row[2] == name and row[0] in _SLOT and i not in seen:
                seen.add(i)
                if not is_cell:
                    row[0], row[2] = _SLOT[row[0]], f".{name}"
                    variables.add(f".{name}")
    return variables


def _build(code: CodeType, ref: weakref.ref[CodeType]) -> Decoded:
    shape = FrameShape.of(code)
    normal = _Normal(code, shape)
    normal.run(code)
    rows, index_of = normal.rows, normal.index_of
    handlers = _handlers(code, rows, index_of) if code.co_exceptiontable else [None] * len(rows)
    if PY312:
        added = _part_inlined(rows, index_of, handlers, shape.cells)
        shape = replace(shape, varnames=shape.varnames + tuple(sorted(added)))
    instrs = tuple(
        Instr(name, arg, value, offset, None if to is None else index_of[to], pos, handler)
        for (name, arg, value, offset, to, pos), handler in zip(rows, handlers, strict=True)
    )
    return Decoded(**vars(shape), instrs=instrs, code_ref=ref)
