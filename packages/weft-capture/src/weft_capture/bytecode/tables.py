"""The two side tables of a code object: source locations and exception handlers.

Formats: CPython's Objects/locations.md and Objects/exception_handling_notes.txt (3.11 to 3.13
agree). Both are byte strings of variable-length integers, six bits a byte.
"""

from __future__ import annotations

from collections.abc import Iterable

from .instr import Positions

_MAX_UNITS = 8  # code units one location entry can cover
_LONG, _NONE = 14, 15  # the kinds of entries used; the others only save bytes


def _varint(out: bytearray, value: int) -> None:
    while value >= 64:
        out.append(value & 63 | 64)
        value >>= 6
    out.append(value)


def _signed_varint(out: bytearray, value: int) -> None:
    _varint(out, -value << 1 | 1 if value < 0 else value << 1)


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

    def head(kind: int) -> None:
        out.append(0x80 | kind << 3 | units - 1)

    if start is None:
        head(_NONE)
        return line
    head(_LONG)
    _signed_varint(out, start - line)
    _varint(out, max((end or start) - start, 0))
    for place in (column, end_column):
        _varint(out, 0 if place is None else place + 1)
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
