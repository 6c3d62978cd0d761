"""Lets sources write themselves: weft_guards' Builder protocol on top of the bytecode writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft_capture.bytecode import Writer


class SourceBuilder:
    """A Builder (see `weft_guards.sources`) that writes to a `Writer`."""

    def __init__(self, writer: Writer) -> None:
        self.load_local = writer.load_local
        self.load_global = writer.load_global
        self.load_deref = writer.load_cell
        self.load_const = writer.load_const
        self.load_attr = writer.load_attr
        self.binary_subscr = writer.binary_subscr
        # The writer places the NULL of a call itself; it wants to know where the callable begins.
        self.push_null = writer.begin_call
        self._writer = writer

    def call(self, count: int) -> Any:
        """Replace a callable and `count` arguments by the result."""
        self._writer.call(count)
