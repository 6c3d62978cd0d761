"""Program -> code object: lower, measure the stack, fix jump widths, write the tables.

A small assembler: the `bytecode` library on PyPI takes three to four times as long to decode and to
assemble (measured on the standard library), and both run for every captured frame.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from types import CodeType

from weft_capture.python_compat import PY312, PY314

from .instr import (
    BACKWARD,
    CACHE_UNITS,
    EXTENDED_ARG,
    FOR_ITER_BACK,
    HAS_ARG,
    NO_FALL_THROUGH,
    FrameShape,
    Instr,
    Item,
    Op,
    Positions,
    call_pair,
)
from .lower import INVERSE, Lowering, Raw

_FOR_ITER = dis.opmap["FOR_ITER"]
_ENDS = frozenset(
    op
    for name, op in dis.opmap.items()
    if name.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")) or name in NO_FALL_THROUGH
)


class AssemblyError(Exception):
    """The program is no valid code: stack underflow, or two depths for one instruction."""


def assemble(items: Iterable[Item], shape: FrameShape) -> CodeType:
    """Assemble a program into a code object.

    Constants may be any object; a code object with unhashable constants cannot be hashed itself.
    Raises AssemblyError for an inconsistent stack and KeyError for an undeclared variable.
    """
    lowering = Lowering(shape.slots)
    lowering.run(items)
    raws = lowering.raws
    stack_size = _stack_size(raws)
    starts = _place(raws)
    return CodeType(
        shape.argcount,
        shape.posonlyargcount,
        shape.kwonlyargcount,
        len(shape.varnames),
        stack_size,
        shape.flags,
        _code_bytes(raws),
        lowering.consts,
        tuple(lowering.names),
        shape.varnames,
        shape.filename,
        shape.name,
        shape.qualname,
        shape.firstlineno,
        location_table(_location_rows(raws), shape.firstlineno),
        exception_table(_exception_entries(raws, starts)),
        shape.freevars,
        shape.cellvars,
    )


@cache
def raw_effect(op: int, arg: int, jump: bool) -> int:
    """The stack effect of a raw instruction, as CPython states it."""
    if dis.opname[op] == "RETURN_GENERATOR":
        return 1  # the None that resuming pushes; dis says so only from 3.13 on
    return dis.stack_effect(op, arg if op in HAS_ARG else None, jump=jump)


def _target(raw: Raw) -> int:
    assert raw.jump is not None
    if raw.jump.index is None:
        raise AssemblyError(f"{dis.opname[raw.op]} goes to a label that was never placed")
    return raw.jump.index - (FOR_ITER_BACK if raw.op == _FOR_ITER else 0)


def _stack_size(raws: list[Raw]) -> int:
    """Largest stack over all paths, following jumps and exception handlers from the start."""
    depths: list[int | None] = [None] * len(raws)
    todo = [(0, 0)]
    largest = 0

    def reach(index: int, depth: int) -> None:
        existing = depths[index]
        if existing is None:
            todo.append((index, depth))
        elif existing != depth:
            raise AssemblyError(f"stack depth {existing} and {depth} at raw instruction {index}")

    while todo:
        index, depth = todo.pop()
        while index < len(raws) and depths[index] is None:
            raw = raws[index]
            depths[index] = depth
            cover = raw.source.cover
            if cover is not None and cover.label.index is not None:
                reach(cover.label.index, cover.depth + cover.lasti + 1)
            if raw.jump is not None:
                reach(_target(raw), depth + raw_effect(raw.op, raw.arg, True))
            # What an instruction pushes before it pops is bounded by its operands.
            depth += raw_effect(raw.op, raw.arg, False)
            if depth < 0:
                raise AssemblyError(f"{dis.opname[raw.op]} takes more than the stack holds")
            largest = max(largest, depth)
            if raw.op in _ENDS:
                break
            index += 1
        else:
            if index < len(raws):
                reach(index, depth)
    return max(largest, *(d for d in depths if d is not None)) + 1


def _place(raws: list[Raw]) -> list[int]:
    """Start of every raw instruction in code units (and the end); sets `width` and jump `arg`."""
    for raw in raws:
        raw.width = 1 + CACHE_UNITS.get(raw.op, 0) + _extensions(raw.arg)
    jumps = [(i, raw, _target(raw)) for i, raw in enumerate(raws) if raw.jump is not None]
    while True:
        starts = [0]
        for raw in raws:
            starts.append(starts[-1] + raw.width)
        grown = False
        for index, raw, target in jumps:
            distance = starts[target] - starts[index + 1]
            raw.arg = -distance if raw.op in BACKWARD else distance
            if raw.arg < 0:
                raise AssemblyError(f"{dis.opname[raw.op]} goes the wrong way")
            width = 1 + CACHE_UNITS.get(raw.op, 0) + _extensions(raw.arg)
            if width > raw.width:
                raw.width, grown = width, True
        if not grown:
            return starts


def _extensions(arg: int) -> int:
    return 0 if arg < 0x100 else 1 if arg < 0x10000 else 2 if arg < 0x1000000 else 3


def _code_bytes(raws: list[Raw]) -> bytes:
    out = bytearray()
    for raw in raws:
        caches = CACHE_UNITS.get(raw.op, 0)
        for extension in range(raw.width - caches - 1, 0, -1):
            out += bytes((EXTENDED_ARG, raw.arg >> 8 * extension & 0xFF))
        out += bytes((raw.op, raw.arg & 0xFF))
        out += bytes(2 * caches)
    return bytes(out)


def _location_rows(raws: list[Raw]) -> Iterator[tuple[int, Positions]]:
    """(width, positions) of each run of instructions with one position."""
    for positions, run in groupby(raws, lambda raw: raw.source.positions):
        yield sum(raw.width for raw in run), positions


def _exception_entries(
    raws: list[Raw], starts: list[int]
) -> Iterator[tuple[int, int, int, int, bool]]:
    """(start, end, target, depth, lasti) of each run of instructions with one handler."""
    begin = end = 0
    for cover, run in groupby(raws, lambda raw: raw.source.cover):
        begin, end = end, end + sum(raw.width for raw in run)
        if cover is not None:
            if cover.label.index is None:
                raise AssemblyError("an exception handler was never placed")
            yield begin, end, starts[cover.label.index], cover.depth, cover.lasti


# ---- the side tables: source locations and exception handlers


_MAX_UNITS = 8  # code units one location entry can cover
_LONG, _NONE = 14, 15  # the kinds of entries used; the others only save bytes


def _varint(out: bytearray, value: int) -> None:
    while value >= 64:
        out.append(value & 63 | 64)
        value >>= 6
    out.append(value)


def location_table(rows: Iterable[tuple[int, Positions]], firstlineno: int) -> bytes:
    """Encode (width in code units, positions) rows as co_linetable."""
    out = bytearray()
    line = firstlineno
    for width, positions in rows:
        while width > 0:
            units = min(width, _MAX_UNITS)
            line = _location(out, units, positions, line)
            width -= units
    return bytes(out)


def _location(out: bytearray, units: int, positions: Positions, line: int) -> int:
    """Append one entry and return the line that the next one's delta starts from."""
    start, end, column, end_column = positions

    def head(form: int) -> None:
        out.append(0x80 | form << 3 | units - 1)

    if start is None:
        head(_NONE)
        return line
    head(_LONG)
    _varint(out, abs(start - line) << 1 | (start < line))  # signed
    _varint(out, max((end or start) - start, 0))
    for column_offset in (column, end_column):
        _varint(out, 0 if column_offset is None else column_offset + 1)
    return start


def exception_table(entries: Iterable[tuple[int, int, int, int, bool]]) -> bytes:
    """Encode (start, end, target in code units, depth, lasti) entries as co_exceptiontable."""
    out = bytearray()
    for start, end, target, depth, lasti in entries:
        first = len(out)
        for value in (start, end - start, target, depth << 1 | lasti):
            _big_endian(out, value)
        out[first] |= 0x80
    return bytes(out)


def _big_endian(out: bytearray, value: int) -> None:
    shift = 24
    while shift and not value >> shift:
        shift -= 6
    while shift:
        out.append(value >> shift & 63 | 64)
        shift -= 6
    out.append(value & 63)


# ---- what an instruction does to the operand stack


# Conditional jumps are written in a way that depends on the direction; their effect does not.
_NET = {"FOR_ITER": 1, "JUMP": 0, "LOAD_METHOD": 1, "SEND": 0} | dict.fromkeys(INVERSE, -1)


def net_effect(instr: Instr) -> int:
    """The change of the stack depth when the instruction does not jump."""
    effect = _NET.get(instr.opname)
    if effect is not None:
        return effect
    lowering = Lowering((instr.argval,) if isinstance(instr.argval, str) else ())
    lowering.run([Op(instr.opname, instr.arg, instr.argval)])
    return sum(raw_effect(raw.op, raw.arg, False) for raw in lowering.raws)


def stack_after(
    instr: Instr, stack: Sequence[bool], *, jump: bool = False, bound: bool = True
) -> tuple[bool, ...]:
    """The stack after an instruction that ran eagerly.

    Args:
        instr: the instruction.
        stack: the stack before it.
        jump: whether it jumped.
        bound: for LOAD_FAST_AND_CLEAR, whether the variable was bound.

    A LOAD_METHOD (or the method form of LOAD_SUPER_ATTR) is treated as one that found an attribute
    that is no method: its result is known only at run time, so a break at one has to load the
    attribute and push the NULL itself. The same holds for the `__exit__` that 3.14 pushes.
    """
    before = tuple(stack)
    opname = instr.opname
    if jump:
        pops_all = opname == "JUMP" or (opname == "SEND" and PY312)  # END_SEND follows
        return before if pops_all else before[:-1]
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
    if PY314 and opname in ("BEFORE_WITH", "BEFORE_ASYNC_WITH"):
        return (*before[:-1], *call_pair(True, False), True)
    if opname == "LOAD_METHOD" or (opname == "LOAD_SUPER_ATTR" and instr.argval[1]):
        pair: tuple[bool, bool] = call_pair(True, False)
        return before[: depth - 2] + pair
    # Operands and results are values, but for the NULL below a call, where its result will lie.
    kept = before[: depth - 1] if opname.startswith("CALL") else before[:depth]
    return kept + (True,) * (depth - len(kept))
