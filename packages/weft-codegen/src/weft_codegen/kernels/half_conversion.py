"""Which 16-bit elements of a loop are converted in blocks, apart from the lanes that use them.

Compilers convert float16 one element at a time, or by a dozen integer instructions, and round to
bfloat16 by eight.  Where a loop walks through memory element by element, a block of 64 float16 is
widened into a local by the CPU's own instruction (`weft_widen_f16`), the lanes read that, and a
block of results of either type is narrowed at the end.  (Widening bfloat16 is one shift.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft_codegen.kernels.exprs import rounds
from weft_codegen.loops.expr import Cast, Load, walk
from weft_codegen.loops.index import ONE
from weft_codegen.loops.program import Loop, Store, stmt_exprs
from weft_codegen.loops.steps import coefficient


@dataclass(frozen=True)
class HalfConversions:
    """The casts of elements read (and those), and the stores of casts, to be done in blocks."""

    reads: tuple[tuple[Cast, Load], ...]
    stores: tuple[Store, ...]

    def __bool__(self) -> bool:
        return bool(self.reads or self.stores)


def find_half_conversions(loop: Loop) -> HalfConversions:
    """What of an innermost loop whose iterations are independent can be converted in blocks."""
    reads: dict[Cast, Load] = {}
    stores: list[Store] = []
    stored: set[str] = set()
    unsafe: set[str] = set()  # buffers read after a store: a block's stores come last
    for stmt in loop.body:
        for node in walk(*stmt_exprs(stmt)):
            if isinstance(node, Load) and node.buffer in stored:
                unsafe.add(node.buffer)
            match node:
                case Cast(torch.float32, Load(torch.float16, mask=None) as element):
                    if coefficient(element.index, loop.axis) is ONE:
                        reads[node] = element
        match stmt:
            case Store(buffer, index, value, mode):
                stored.add(buffer)
                if rounds(value) and mode == "set" and coefficient(index, loop.axis) is ONE:
                    stores.append(stmt)
    return HalfConversions(
        tuple((node, item) for node, item in reads.items() if item.buffer not in unsafe),
        tuple(stmt for stmt in stores if stmt.buffer not in unsafe),
    )
