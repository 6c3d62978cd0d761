"""Row and column reductions of the same elements in one kernel, which reads them once.

    for i:  rows[i] = sum over j of f(i, j);  ...        columns[j] = sum over i of g(i, j)

become, for blocks b of tiles t of rows r, with a row of accumulators for each block,

    for b:  for t:  for r:  rows[b, t, r] = ...;   for r:  for j:  parts[b, j] += g(b, t, r, j)
    columns[j] = sum over b of parts[b, j]
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from weft_codegen.loops.expr import Expr, load
from weft_codegen.loops.index import IndexExpr, as_axis, const, product
from weft_codegen.loops.lower.lazy_tensor import contiguous_strides
from weft_codegen.loops.ops import REDUCTIONS
from weft_codegen.loops.program import CPU, Alias, Buffer, Buffers, Extern, Program, step_writes
from weft_codegen.loops.schedule.align import linear, new_axis, row_major
from weft_codegen.loops.schedule.fuse import Unit
from weft_codegen.loops.schedule.group import Group, Member, join, rewritten
from weft_codegen.loops.schedule.merge import merge_axes
from weft_codegen.loops.schedule.rematerialize import loaded_buffers, storage_bytes

# Bytes of what both read; less stays in the last cache, where two kernels are as fast or faster.
LARGE = 1 << 24
# Rows that are summed while they are in cache.
_TILE = 8
# Elements of all accumulators of a block: they should stay in the first two caches.
_MOST = 1 << 14


def fuse_rows_and_columns(units: list[Unit], lowered: Program, buffers: Buffers) -> list[Unit]:
    """`units` with column reductions in the kernels that reduce rows of what they read.

    `buffers` gets those of the blocks' results.
    """
    mutated = frozenset(lowered.mutations)
    if any(isinstance(item, Extern) and item.mutates for item in lowered.steps):
        return units
    if any(isinstance(item, Alias) and item.base in mutated for item in lowered.steps):
        return units  # memory changes under another name than that of the unit that writes it
    large = [unit for unit in units if isinstance(unit, Group) and _is_large(unit, buffers)]
    for columns, rows in itertools.permutations(large, 2):
        if not _reads_same(rows, columns, buffers):
            continue
        place = _shared_position(units, rows, columns)
        made = None if place is None else _shared(rows, columns, buffers, mutated)
        if made is not None:
            first, later = (
                [unit for unit in part if unit is not rows and unit is not columns]
                for part in (units[:place], units[place:])
            )
            units = [*first, *made, *later]
    return units


def _is_large(group: Group, buffers: Buffers) -> bool:
    """Whether a group on the CPU reduces what does not fit into a cache, over constant extents."""
    nodes = [member.node for member in group.members]
    return (
        bool(group.reduced)
        and not any(node.scan or node.update for node in nodes)
        and all(buffers[node.result].device == CPU for node in nodes)
        and all(loop.extent.is_const for loop in group.axes)
        and sum(storage_bytes(buffers[name]) for name in loaded_buffers(group)) >= LARGE
    )


def _reads_same(rows: Group, columns: Group, buffers: Buffers) -> bool:
    """Whether `columns` reads enough of what `rows` reads or makes, and makes little."""
    both = loaded_buffers(columns) & (loaded_buffers(rows) | rows.results.keys())
    width = product(loop.extent for loop in columns.kept)
    return (
        sum(storage_bytes(buffers[name]) for name in both) >= LARGE
        and len(_sums(columns)) * width.value <= _MOST
    )


def _sums(columns: Group) -> list[Member]:
    return [member for member in columns.members if member.node.op is not None]


def _shared_position(units: list[Unit], rows: Group, columns: Group) -> int | None:
    """Where one kernel can take the place of both: at the first's or, else, at the second's."""
    places = [k for k, unit in enumerate(units) if unit is rows or unit is columns]
    if len(places) < 2:
        return None
    begin, end = places
    between = units[begin + 1 : end]
    if not any(_ordered(unit, units[end]) for unit in between):
        return begin
    return None if any(_ordered(units[begin], unit) for unit in between) else end


def _ordered(first: Unit, then: Unit) -> bool:
    """Whether two units have to run in this order."""
    (a, b), (c, d) = (_touched(unit) for unit in (first, then))
    return bool(a & d or b & (c | d))


def _touched(unit: Unit) -> tuple[set[str], set[str]]:
    """What a unit reads and what it writes."""
    nodes = [member.node for member in unit.members] if isinstance(unit, Group) else [unit]
    return loaded_buffers(unit), {name for node in nodes for name in step_writes(node)}


def _shared(
    rows: Group, columns: Group, buffers: Buffers, mutated: frozenset[str]
) -> tuple[Group, Group] | None:
    """The joined group and the one that adds up its blocks, if that is possible."""
    sums = _sums(columns)
    if any(REDUCTIONS[str(member.node.op)].states > 1 for member in sums):
        return None
    full = [member for member in columns.members if member.axes == frozenset(columns.axes)]
    finished = {m.node.result for m in columns.members if m in sums or m not in full}
    if loaded_buffers(rows) & finished or loaded_buffers(columns) & mutated:
        return None
    # As pointwise nodes the sums align with the rows; `along` remembers what they reduce.
    place = row_major(columns.kept)
    loose = [
        _with(m, op=None, axes=columns.axes, reduced=(), along=m.node.reduced, index=place)
        if m in sums
        else m
        for m in full
        if m.node.result not in rows.results
    ]
    joined = join(rows, Group(tuple(loose), columns.axes), mutated)
    if not isinstance(joined, Group):
        return None
    joined = merge_axes(joined)
    added = [member for member in joined.members if member.node.result in finished]
    fits = (m.axes == frozenset(joined.axes) and m.node.along == joined.kept for m in added)
    if len(joined.kept) != 1 or not all(fits):
        return None
    blocks = _blocks(joined.kept[0].extent.value)
    if blocks is None or not _walks_rows(joined):
        return None
    made = _in_blocks(joined, blocks, columns, sums, buffers)
    return made, _totals(columns, sums, blocks)


def _with(member: Member, **changes: Any) -> Member:
    return replace(member, node=replace(member.node, **changes))


def _blocks(rows: int) -> int | None:
    """How many blocks of whole tiles there are: enough for the threads, and even."""
    most, (tiles, rest) = max(16, 2 * torch.get_num_threads()), divmod(rows, _TILE)
    counts = (*range(most, 3, -1), *range(most + 1, 65))
    return next((n for n in counts if not rest and tiles % n == 0 and tiles > n), None)


def _in_blocks(
    joined: Group, blocks: int, columns: Group, sums: list[Member], buffers: Buffers
) -> Group:
    """`joined` over blocks, tiles and rows, its sums of columns one for each block."""
    (row,) = joined.kept
    tiles = row.extent.value // _TILE // blocks
    block, tile, inner = (new_axis(const(n)) for n in (blocks, tiles, _TILE))
    loops = (as_axis(block), as_axis(tile), as_axis(inner))
    mapped = {loop: loop.at for loop in joined.axes}
    mapped[row] = (block * tiles + tile) * _TILE + inner
    shape = (const(blocks), product(loop.extent for loop in columns.kept))
    ops = {member.node.result: member.node.op for member in sums}
    members = [rewritten(member, mapped) for member in joined.members]
    for k, node in enumerate([member.node for member in members]):
        if node.result in ops:
            name = _partial_name(node.result)
            buffers[name] = Buffer(name, node.values[0].dtype, shape, contiguous_strides(shape))
            place = block * shape[1] + node.index
            axes, op = tuple(x for x in node.axes if x not in loops[1:]), ops[node.result]
            changes = {"axes": axes, "reduced": loops[1:], "along": (), "index": place}
            members[k] = _with(members[k], result=name, op=op, **changes)
    return Group(tuple(members), (*loops, *joined.axes[1:]), joined.reduced)


def _totals(columns: Group, sums: list[Member], blocks: int) -> Group:
    """What `columns` makes of the sums of each block."""
    block = new_axis(const(blocks))
    place = block * product(x.extent for x in columns.kept) + row_major(columns.kept)
    reduced = (as_axis(block),)
    members = [
        _with(m, reduced=reduced, values=(_load(m, place),)) if m in sums else m
        for m in columns.members
        if m in sums or m.axes == frozenset(columns.kept)
    ]
    return Group(tuple(members), (*columns.kept, *reduced), frozenset(reduced))


def _load(member: Member, place: IndexExpr) -> Expr:
    return load(_partial_name(member.node.result), place, member.node.values[0].dtype)


def _partial_name(name: str) -> str:
    return f"{name}_blocks"


def _walks_rows(group: Group) -> bool:
    """Whether rows lie in memory one after another wherever all axes are walked along."""
    wheres = itertools.chain(*group.accesses.values())
    walks = [linear(where, group.axes) or [] for where in wheres]
    return all(strides[-1][1] in group.reduced for strides in walks if len(strides) > 1)
