"""Calling compiled code with the inputs it reads from modules and containers.

A graph of many layers has hundreds of parameters for inputs. Reading each through its chain of
dicts takes bytecode longer than the guards take, so C does it, from the roots that the bytecode
loads, and remembers what it read as a check does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from weft_guards.abi import extension
from weft_guards.config import settings
from weft_guards.native import Assembler
from weft_guards.sources import AttrSource, CallSource, DictSource, ItemSource, Source, TypeSource

_READS = (AttrSource, DictSource, ItemSource, TypeSource)
_FEW = 8  # so few reads are made by bytecode as fast


class _Reads(Assembler):
    """Assembles reads alone; whatever is not a read is a root, which the caller passes."""

    def __init__(self) -> None:
        super().__init__((), ())
        self.roots: list[Source] = []

    @override
    def fetch(self, source: Source) -> int:
        looked_up = isinstance(source, CallSource) and source.function is operator.getitem
        if looked_up or isinstance(source, _READS) or source in self.registers:
            return super().fetch(source)
        register = self.registers[source] = len(self.registers)
        self.rows.append((self.code.ARG, 0, len(self.roots), None))
        self.roots.append(source)
        return register


def call_with(
    target: Callable[..., Any], sources: Sequence[Source]
) -> tuple[Callable[..., Any], list[Source]] | None:
    """Return a function that calls `target` with the values of sources, and what to pass it.

    The function takes None and then the values of the returned roots. None instead of the pair
    where that would gain nothing, or C cannot be used.
    """
    native: Any = extension() if settings.native_checks else None
    if native is None:
        return None
    reads = _Reads()
    registers = tuple([reads.fetch(source) for source in sources])
    if len(reads.rows) - len(reads.roots) <= _FEW:
        return None
    return native.Check(tuple(reads.rows), len(reads.roots), registers, target), reads.roots
