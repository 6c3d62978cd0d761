"""Program -> code object: lower, measure the stack, fix jump widths, write the tables.

A small assembler of our own: the `bytecode` library on PyPI takes three to four times as long to
decode and to assemble (measured on the standard library), and both run for every captured frame.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from types import CodeType

from .instr import (
    BACKWARD,
    CACHE_UNITS,
    EXTENDED_ARG,
    FOR_ITER_BACK,
    HAS_ARG,
    NO_FALL_THROUGH,
    FrameShape,
    Positions,
)
from .lower import Lowering, Raw
from .program import Item
from .tables import exception_table, location_table

_FOR_ITER = dis.opmap["FOR_ITER"]
_ENDS = frozenset(
    op
    for name, op in dis.opmap.items()
    if name.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")) or name in NO_FALL_THROUGH
)


class AssemblyError(Exception):
    """The program makes no code object: stack underflow or two depths for one place."""


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
        known = depths[index]
        if known is None:
            todo.append((index, depth))
        elif known != depth:
            raise AssemblyError(f"stack depth {known} and {depth} at raw instruction {index}")

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
