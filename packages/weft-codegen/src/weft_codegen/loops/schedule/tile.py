"""Tiles for pointwise nests that read one way and write the other (transposing copies).

Walking rows of the result reads a column of the source: each load takes a new cache line, and by
the time the next row needs the rest of the line it is gone.  In tiles of 16 by 16 every line is
used up while it is in the first-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft_codegen.loops.index import ONE, ZERO, Axis, IndexExpr, as_axis, axis, coefficient
from weft_codegen.loops.schedule.group import Group, rewritten

# Float32 elements in a cache line.
TILE = 16
# Smaller matrices stay in cache anyway.
_LEAST = 4 * TILE


@dataclass(frozen=True)
class Blocked:
    """An axis cut into blocks: axis = block * size + inner, while inner < limit.

    `block` is None when one block covers the axis; `limit` is None when blocks fit evenly.
    """

    block: Axis | None
    inner: Axis
    limit: IndexExpr | None
    position: IndexExpr


def blocked(loop: Axis, size: int, name: str) -> Blocked:
    """`loop` in blocks of `size`; `name` begins the names of the new axes."""
    blocks = axis(f"{name}_block", (loop.extent + size - 1) // size)
    inner = axis(name, size)
    even = loop.extent.is_const and loop.extent.value % size == 0
    return Blocked(
        None if blocks is ZERO else as_axis(blocks),
        as_axis(inner),
        None if even else loop.extent - blocks * size,
        blocks * size + inner,
    )


def transposed(group: Group) -> tuple[Axis, Axis] | None:
    """(row, inner) axes to tile: some load is contiguous along `row`, not along the inner one."""
    inner = group.axes[-1]
    large = [loop for loop in group.axes[:-1] if _large(loop)]
    if not _large(inner):
        return None
    for member in group.members:
        for load in member.node.loads:
            if coefficient(load.index, inner) in (None, ZERO, ONE):
                continue
            for loop in large:
                if coefficient(load.index, loop) is ONE:
                    return loop, inner
    return None


def _large(loop: Axis) -> bool:
    return loop.extent.is_const and loop.extent.value >= _LEAST


def substituted(group: Group, blocks: dict[Axis, Blocked], axes: tuple[Axis, ...]) -> Group:
    """`group` over `axes`, each key of `blocks` replaced by its blocked position."""
    mapped = {loop: axis(loop.key, loop.extent) for loop in group.axes}
    mapped.update({loop: cut.position for loop, cut in blocks.items()})
    members = tuple(rewritten(member, mapped) for member in group.members)
    return Group(members, axes, group.reduced)
