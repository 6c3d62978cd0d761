"""Computing a value again in the kernel that reads it, instead of passing it in memory.

Lowering stores what several nodes use. Where a reader in another kernel has nearly all at hand that
the value is made of, the maker joins that kernel as well, and nothing need be stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft_codegen.loops.expr import cost, walk
from weft_codegen.loops.program import CPU, Buffer, BufferRef, Buffers, Extern, Program, step_reads
from weft_codegen.loops.schedule.fuse import Unit
from weft_codegen.loops.schedule.group import Group, Member, join, single

# Operations for each element (in float adds) that a kernel may do again to save a store and a load.
_MOST = 8
# Bytes from which a value is worth it.
_LARGE = 16384


def outside_readers(units: Iterable[Unit], lowered: Program) -> dict[str, set[int]]:
    """The places of the units that read what they do not make, by buffer; -1: it is an output.

    What a group makes and is not in here has no memory.
    """
    found = {output.name: {-1} for output in lowered.outputs if isinstance(output, BufferRef)}
    for place, unit in enumerate(units):
        for name in loaded_buffers(unit):
            found.setdefault(name, set()).add(place)
    return found


def loaded_buffers(unit: Unit) -> set[str]:
    """What a unit reads and does not make itself."""
    if not isinstance(unit, Group):
        return set(step_reads(unit))
    made = {member.node.result for member in unit.members if not member.node.update}
    return {name for member in unit.members for name in step_reads(member.node)} - made


def rematerialize(units: list[Unit], lowered: Program) -> list[Unit]:
    """`units` in which values that are cheap for all their readers are no longer stored."""
    if lowered.mutations or any(isinstance(i, Extern) and i.mutates for i in lowered.steps):
        return units  # what a value is made of may have changed
    readers = outside_readers(units, lowered)
    for group in [unit for unit in units if isinstance(unit, Group)]:
        for member in reversed(group.members):
            node = member.node
            places = readers.get(node.result, {-1})
            if -1 in places or node.op or node.update or node.scan:
                continue
            limit = _limit(lowered.buffers[node.result], len(places))
            joined = {k: _joined(member, units[k], readers, lowered.buffers, limit) for k in places}
            if all(joined.values()):
                units = [joined.get(k) or unit for k, unit in enumerate(units)]
                units, readers = _without_unread(units, lowered)
    return units


def _without_unread(units: list[Unit], lowered: Program) -> tuple[list[Unit], dict[str, set[int]]]:
    """`units` but for groups that make only what nothing reads, and their `outside_readers`."""
    readers = outside_readers(units, lowered)
    read = [u for u in units if not isinstance(u, Group) or u.results.keys() & readers.keys()]
    return (units, readers) if len(read) == len(units) else _without_unread(read, lowered)


def storage_bytes(buffer: Buffer) -> int:
    """The bytes of a buffer; 0 if that is not known."""
    return buffer.bytes.value if buffer.bytes.is_const else 0


def _limit(value: Buffer, readers: int) -> float:
    """The bytes that each reader may read more, instead of the value. On a GPU, whose kernels
    find nothing in caches, those are seven eighths of what it saves to read and to store it."""
    size = storage_bytes(value)
    return size * 9 / 8 if value.device == CPU else size * (1 + 1 / readers) * 7 / 8


def _joined(
    member: Member, unit: Unit, readers: dict[str, set[int]], buffers: Buffers, limit: float
) -> Group | None:
    """`unit` with a pointwise `member` in it, if it hardly does more and reads up to `limit`."""
    name = member.node.result
    size = storage_bytes(buffers[name])
    if not isinstance(unit, Group) or size < _LARGE:
        return None
    group = join(single(member.order, member.node), unit, frozenset())
    if not isinstance(group, Group) or group.results[name].axes != frozenset(group.axes):
        return None
    node = group.results[name].node
    known = {part for m in group.members if m.node is not node for part in walk(*m.node.values)}
    new = [part for part in walk(*node.values) if part not in known]
    read = {load.buffer for load in node.loads} - loaded_buffers(unit) - unit.results.keys()
    sizes = {each: storage_bytes(buffers[each]) for each in read}
    stored = all(each in readers or 8 * sizes[each] <= size for each in read)
    return group if stored and cost(new) <= _MOST and sum(sizes.values()) <= limit else None
