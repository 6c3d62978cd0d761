"""The lookup of a code cache: rows of (check, code, entry), of which the first that holds is taken.

The type of that name in `_native.c` does the same; `Table` is for where C cannot be used.
"""

from __future__ import annotations

from types import CodeType
from typing import Any, cast

from weft_guards.abi import extension
from weft_guards.config import settings

Row = tuple[Any, CodeType, Any]  # check, code, entry


class Table:
    """The rows of one code object, the one hit last in front."""

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self.hits = 0
        self.misses = 0

    def __call__(self, func: object, *flat_locals: object) -> CodeType | None:
        """Return the code whose check holds, or None."""
        rows = self.rows
        for row in rows:
            if row[0](func, *flat_locals):
                self.hits += 1
                if row is not rows[0] and self.rows is rows:
                    self.rows = (row, *[other for other in rows if other is not row])
                return row[1]
        self.misses += 1
        return None


def new_table() -> Table:
    """Return an empty table, in C where that can be used."""
    native: Any = extension() if settings.native_checks else None
    return cast(Table, Table() if native is None else native.Table())
