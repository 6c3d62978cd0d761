"""From a group of loop nodes to a kernel: loops, locals, sweeps and stores.

    pointwise   for all axes:  stores
    rows        for kept axes (parallel): { for reduced axes: sweep;  per-row work; ... }
    columns     for other kept axes, blocks of the lane axis (parallel):
                    { for reduced axes: for lane: sweep;  for lane: per-column work; ... }

Rows are chosen when a reduced axis is the contiguous one, columns when a kept one (the *lane*) is.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from weft_codegen.loops.evaluate import evaluate_known
from weft_codegen.loops.expr import Expr, Load, Local, cast, compute_dtype, constant, read
from weft_codegen.loops.index import ONE, Axis, IndexExpr, const, in_range, product
from weft_codegen.loops.ops import REDUCTIONS
from weft_codegen.loops.program import CPU, Body, Buffers, Loop, Reduce, Set, Stmt, Store
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule.align import linear, replacing, row_major, walk_order
from weft_codegen.loops.schedule.group import Group, Member
from weft_codegen.loops.schedule.hoist import hoist, split_conflicts
from weft_codegen.loops.schedule.merge import merge_axes
from weft_codegen.loops.schedule.scan import split_scan
from weft_codegen.loops.schedule.split import rewritten, split_loops
from weft_codegen.loops.schedule.sweeps import SweepPlan, plan_sweeps
from weft_codegen.loops.schedule.tile import (
    CPU_TILE,
    OTHER_TILE,
    TILE,
    Blocked,
    blocked,
    inside_tile,
    product_block,
    substituted,
    transpose_reads,
    transposed,
)
from weft_codegen.loops.steps import are_distinct

# Columns per block: four AVX-512 registers of float32, a cache line or more of every row.
_BLOCK = 64
_WIDE_BLOCK = 1024
# Columns that are summed together in tiles of rows.
_COLUMNS = 256
# Elements from which there may be as many blocks as threads, if only a cache line wide.
_WORTH_THREADS = 16384
# Columns that a program on a GPU sums: four warps read so many neighbours of each row.
GPU_COLUMNS = 128
# Those of a program of few, which has to sum many rows at once.
GPU_FEW_COLUMNS, _FEW_PROGRAMS, _MANY_ROWS = 32, 64, 32
# Lanes of a program on a GPU: a shorter row has no program of its own. And elements of a row that
# its registers hold.
GPU_LANES, GPU_ROW = 1024, 16384


def identity(op: str, dtype: torch.dtype) -> Expr:
    """What a reduction's state starts from."""
    start = REDUCTIONS[op].identity
    if isinstance(start, str):
        least = start == "lowest"
        if dtype.is_floating_point:
            start = -math.inf if least else math.inf
        elif dtype is torch.bool:
            start = not least
        else:
            start = torch.iinfo(dtype).min if least else torch.iinfo(dtype).max
    return constant(start, dtype)


def assemble(
    group: Group,
    needed: frozenset[str],
    mutated: frozenset[str],
    buffers: Buffers,
    hints: Mapping[str, int],
) -> Body:
    """The loop nest of a group, its names not yet canonical; `needed` are read outside it.

    `hints` are likely values of symbolic sizes.
    """
    if not any(map(group.sums_columns, group.members)):  # those keep the tiles they were cut into
        group = merge_axes(group)
    on_cpu = _on_cpu(group, buffers)
    # A program on a GPU has its lanes along one axis, and so a row.
    fits = in_range(product(loop.extent for loop in group.swept) - 1, const(GPU_ROW))
    rows = on_cpu or (len(group.swept) == 1 and fits and _lane(group, on_cpu) is None)
    order = plan_sweeps(group, needed, mutated, rows=rows, on_cpu=on_cpu)
    body = _Assembly(group, order, mutated, buffers, hints).build()
    return split_loops(body) if on_cpu else body  # lanes are masked at no cost


def _on_cpu(group: Group, buffers: Buffers) -> bool:
    return buffers[group.members[0].node.result].device == CPU


class _Assembly:
    """Builds one nest: values by sweep, then statements, then the loops around them."""

    def __init__(
        self,
        group: Group,
        plan_: SweepPlan,
        mutated: frozenset[str],
        buffers: Buffers,
        hints: Mapping[str, int],
    ) -> None:
        self._plan, self._hints = plan_, hints
        self._mutated = mutated
        self._buffers = buffers
        self._locals: dict[str, tuple[Local, ...]] = {}
        self._rows: dict[Expr, Local] = {}
        self._temporaries: dict[str, Local] = {}
        self._names = (f"t{number}" for number in itertools.count())
        self._memo: dict[tuple[str, int], Expr] = {}
        self._group = group
        self._on_cpu = _on_cpu(group, buffers)
        self._lanes: tuple[Axis, ...] = ()  # rows of a block (products only), and its columns
        self._limit: IndexExpr | None = None
        self._tile: tuple[Axis, ...] = ()  # rows that sums of columns take together
        lanes = _lane(group, self._on_cpu)
        if lanes is not None:
            self._split_lane(*lanes)

    # ---- loops

    def _split_lane(self, lane: Axis, row: Axis | None) -> None:
        """Block the lane axis, and the row axis of a product."""
        extent = lane.extent
        if self._on_cpu:
            size = self._columns(lane) if extent.is_const else _BLOCK
        else:
            size = self._gpu_columns(lane)
        cuts: dict[Axis, Blocked] = {}
        if row is not None and (shape := product_block(row.extent, extent)):
            height, size = shape
            cuts.update({row: blocked(row, height, "row")} if height > 1 else {})
        cuts[lane] = blocked(lane, size or _BLOCK, "lane")
        kept = tuple(loop for loop in self._group.kept if loop not in cuts)
        blocks = tuple(cut.block for cut in cuts.values() if cut.block is not None)
        self._lanes, self._limit = tuple(cut.inner for cut in cuts.values()), cuts[lane].limit
        axes = (*kept, *blocks, *self._lanes, *self._group.swept)
        self._group = substituted(self._group, cuts, axes)

    def _columns(self, lane: Axis) -> int:
        """Columns of a block: many, so that a page of wide rows serves long, but one a thread."""
        extent, threads = lane.extent.value, torch.get_num_threads()
        others = product(loop.extent for loop in self._group.kept if loop is not lane)
        around = max(1, others.value) if others.is_const else 1
        least, elements = _BLOCK, product(loop.extent for loop in self._group.axes)
        if elements.is_const and elements.value >= _WORTH_THREADS:
            least = min(_BLOCK, max(TILE, extent * around // threads // TILE * TILE))
        wide = extent // -(-max(4, threads) // around) // _BLOCK * _BLOCK
        return min(extent, max(least, min(wide, _WIDE_BLOCK)))

    def _gpu_columns(self, lane: Axis) -> int:
        """Columns of a program on a GPU: fewer where there would be few programs of many rows."""
        group = self._group
        kept = evaluate_known(product(loop.extent for loop in group.kept), self._hints)
        rows = evaluate_known(product(loop.extent for loop in group.swept), self._hints)
        few = kept is not None and kept <= _FEW_PROGRAMS * GPU_COLUMNS
        few &= rows is not None and rows >= _MANY_ROWS
        extent = evaluate_known(lane.extent, self._hints)
        return min(extent or GPU_COLUMNS, GPU_FEW_COLUMNS if few else GPU_COLUMNS)

    def build(self) -> Body:
        group = self._group
        if not group.reduced:
            return self._pointwise()
        columns = [member for member in group.members if group.sums_columns(member)]
        self._tile = columns[0].node.reduced[-1:] if columns else ()
        first = [stmt for member in columns for stmt in self._start(member, str(member.node.op))]
        end = min((self._plan.sweep[m.node.result] for m in columns), default=self._plan.sweeps)
        body: list[Stmt] = []
        for sweep in range(self._plan.sweeps + 1):
            body += self._across(self._between(sweep))
            if sweep < end:
                body += self._sweep(sweep)
        outer = [loop for loop in group.kept if loop not in self._lanes]
        if columns:
            body = self._with_columns(columns, first, body, self._statements(end))
            outer = [loop for loop in outer if loop not in columns[0].node.reduced]
        return _loops(outer, tuple(body), "parallel")

    def _with_columns(
        self, columns: list[Member], first: list[Stmt], body: list[Stmt], sums: list[Stmt]
    ) -> list[Stmt]:
        """`body` for the rows of each tile and then, while they are in cache, sums of columns:
        block by block, so that the first cache holds what the rows are added to."""
        cut = blocked(self._group.swept[-1], _COLUMNS, "column")
        position = Rewriter(at=replacing({self._group.swept[-1]: cut.position}))
        before, sums = hoist(sums, frozenset(self._group.swept), self._new_local)
        inner: Body = tuple(rewritten(stmt, position) for stmt in sums)
        inner = _loops(self._group.swept[:-1], (Loop(cut.inner, inner, limit=cut.limit),), "serial")
        sums_of = [read(self._locals[m.node.result][0], self._place(m)) for m in columns]
        last = list(map(self._store, columns, sums_of))
        rows = _loops(self._tile, tuple(body), "serial")
        blocks = () if cut.block is None else (cut.block,)
        rows += _loops((*blocks, *self._tile), (*before, *inner), "serial")
        return [
            *_loops(self._group.swept, tuple(first), "serial"),
            *_loops(columns[0].node.reduced[:-1], rows, "serial"),
            *_loops(self._group.swept, tuple(last), "serial"),
        ]

    def _pointwise(self) -> Body:
        """Every axis kept, one sweep: outer loops parallel, the innermost one a vector loop."""
        axes = self._group.axes
        updates = [member.node.index for member in self._group.members if member.node.update]
        tile = transposed(self._group) if len(axes) > 1 and not updates else None
        sizes = zip(tile or (), OTHER_TILE, strict=False)
        if tile and (self._on_cpu or all(loop.extent.value % n == 0 for loop, n in sizes)):
            return self._tiled(*tile)
        statements = self._statements(0)
        kind = "serial" if updates else "parallel"  # what meets at one place keeps its order
        if not axes:
            return tuple(statements)
        outer, inner = axes[:-1], axes[-1]
        if not outer:
            return (Loop(inner, tuple(statements), kind, notes=self._notes(0)),)
        if updates and self._on_cpu and all(are_distinct(where, outer) for where in updates):
            kind = "parallel"
        before: list[Stmt] = []
        if self._on_cpu or not inner.extent.is_const or inner.extent.value >= GPU_LANES:
            before, statements = hoist(statements, frozenset((inner,)), self._new_local)
        body = (*before, Loop(inner, tuple(statements), notes=self._notes(0)))
        return _loops(outer, body, kind)

    def _tiled(self, row: Axis, inner: Axis) -> Body:
        """A pointwise nest over tiles of two axes; the tiles are parallel."""
        rows, columns = CPU_TILE if self._on_cpu else OTHER_TILE
        cuts = {row: blocked(row, rows, "row"), inner: blocked(inner, columns, "column")}
        others = [loop for loop in self._group.axes if loop not in cuts]
        tiles = [cut.block for cut in cuts.values() if cut.block is not None]
        inside = [cut.inner for cut in cuts.values()]
        axes = (*others, *tiles, *inside)
        self._group = substituted(self._group, cuts, axes)
        if not self._on_cpu:  # a block of lanes takes a tile, which stays in its cache
            return _loops(axes, tuple(self._statements(0)), "parallel")
        reads = self._statements(0), cuts[row], cuts[inner]
        fills, statements = transpose_reads(*reads, self._local)
        body = (*fills, *inside_tile(statements, cuts[row], cuts[inner], self._notes(0)))
        return _loops([*others, *tiles], body, "parallel")

    def _sweep(self, sweep: int) -> list[Stmt]:
        statements = self._statements(sweep)
        if not statements:
            return []
        reduced = self._group.swept
        if not self._lanes:
            before, statements = hoist(statements, frozenset(reduced), self._new_local)
            notes, outer = self._notes(sweep), reduced[:-1]
            rows, statements = hoist(statements, frozenset(reduced[-1:]), self._new_local)
            inner = split_scan(statements, reduced[-1], self._local, () if outer else notes)
            return [*before, *_loops(outer, (*rows, *inner), "serial", notes)]
        inside = tuple(self._across(statements))
        return list(_loops(reduced, inside, "serial", self._notes(sweep)))

    def _notes(self, sweep: int) -> tuple[str, ...]:
        """The origins of what a sweep computes."""
        members = (m for m in self._group.members if self._plan.sweep.get(m.node.result) == sweep)
        return tuple(dict.fromkeys(origin for m in members for origin in m.node.origins))

    def _across(self, statements: list[Stmt]) -> list[Stmt]:
        """Per-row statements as they are, per-column ones in a loop over the lanes."""
        if not self._lanes or not statements:
            return statements
        inner = Loop(self._lanes[-1], tuple(statements), "serial", self._limit)
        return list(_loops(self._lanes[:-1], (inner,), "serial"))

    # ---- statements

    def _between(self, sweep: int) -> list[Stmt]:
        """Work before a sweep: per-row values that became ready, and fresh accumulators."""
        statements: list[Stmt] = []
        for member in self._group.members:
            node, name = member.node, member.node.result
            if self._plan.ready.get(name) == sweep:
                if node.op is None:
                    statements += self._set_row(name, self._value(member, sweep))
                if name in self._plan.stored:
                    result = read(self._locals[name][-1], self._at)
                    statements.append(self._store(member, result))
        for member in self._group.members:
            running = member.node.op or member.node.scan
            across = self._group.sums_columns(member)
            if running and self._plan.sweep[member.node.result] == sweep and not across:
                statements += self._start(member, running)
        return statements

    def _set_row(self, name: str, value: Expr) -> list[Stmt]:
        """Put a per-row value into a local, unless one holds it already."""
        if value in self._rows:
            self._locals[name] = (self._rows[value],)
            return []
        local = self._rows[value] = self._new_local(value.dtype, self._row)
        self._locals[name] = (local,)
        return [Set(local, self._at, cast(value, local.dtype))]

    def _start(self, member: Member, op: str) -> list[Stmt]:
        """Accumulators of a reduction or scan, set to its identity."""
        statements: list[Stmt] = []
        made: list[Local] = []
        for position, value in enumerate(member.node.values):
            local = self._new_local(value.dtype, product(x.extent for x in self._along(member)))
            made.append(local)
            first = constant(0, value.dtype) if position else identity(op, value.dtype)
            statements.append(Set(local, self._place(member), first))
        self._locals[member.node.result] = tuple(made)
        return statements

    def _statements(self, sweep: int) -> list[Stmt]:
        """What one iteration of a sweep does; stores to inputs last."""
        statements: list[Stmt] = []
        last: list[Stmt] = []
        for member in self._group.members:
            node, name = member.node, member.node.result
            if node.scan is not None and self._plan.sweep[name] == sweep:
                value = self._rewrite(node.values[0], sweep, member.order)
                statements.append(Reduce(node.scan, self._locals[name], self._at, (value,)))
                so_far = read(self._locals[name][0], self._at)
                self._memo[name, sweep] = cast(so_far, self._buffers[name].dtype)
            if self._plan.temporaries.get(name) == sweep:
                statements.append(self._keep(member, sweep))
            if self._plan.sweep.get(name) != sweep:
                continue
            if node.op is not None:
                values = tuple(self._rewrite(value, sweep) for value in node.values)
                statements.append(Reduce(node.op, self._locals[name], self._place(member), values))
            elif name in self._mutated:
                last.append(self._store(member, self._value(member, sweep)))
            elif name in self._plan.stored:
                statements.append(self._store(member, self._value(member, sweep)))
        return statements + split_conflicts(last, self._new_local)

    def _keep(self, member: Member, sweep: int) -> Stmt:
        """Fill a row temporary."""
        loops = (*self._tile, *self._group.swept, *self._lanes)
        value = self._value(member, sweep)
        local = self._new_local(value.dtype, product(loop.extent for loop in loops))
        self._temporaries[member.node.result] = local
        return Set(local, row_major(loops), cast(value, local.dtype))

    def _store(self, member: Member, value: Expr) -> Stmt:
        buffer = self._buffers[member.node.result]
        mode = member.node.update or "set"
        return Store(buffer.name, member.node.index, cast(value, buffer.dtype), mode)

    # ---- values

    def _value(self, member: Member, sweep: int) -> Expr:
        """A pointwise member's value as computed in `sweep`."""
        key = (member.node.result, sweep)
        if key not in self._memo:
            self._memo[key] = self._rewrite(member.node.values[0], sweep, member.order)
        return self._memo[key]

    def _rewrite(self, value: Expr, sweep: int, order: int | None = None) -> Expr:
        """`value` with loads of what the group makes replaced by the values themselves."""
        makers = self._group.results

        def leaf(node: Expr) -> Expr | None:
            if not isinstance(node, Load) or node.buffer not in makers:
                return None
            maker = makers[node.buffer]
            if node.buffer in self._mutated or (order is not None and maker.order >= order):
                return None
            return self._forward(maker, node, sweep)

        return Rewriter(leaf)(value)

    def _forward(self, maker: Member, node: Load, sweep: int) -> Expr | None:
        name = maker.node.result
        if name in self._plan.ready:
            return cast(read(self._locals[name][-1], self._at), node.dtype)
        made = self._plan.sweep[name]
        if name in self._temporaries and self._plan.temporaries[name] < sweep:
            place = row_major((*self._tile, *self._group.swept, *self._lanes))
            return cast(read(self._temporaries[name], place), node.dtype)
        if name in self._plan.stored and made < sweep:
            return None
        return self._value(maker, sweep)

    # ---- locals

    def _along(self, member: Member) -> tuple[Axis, ...]:
        """The axes that the accumulators of a member lie along."""
        return self._group.swept if self._group.sums_columns(member) else self._lanes or self._tile

    def _place(self, member: Member) -> IndexExpr:
        return row_major(self._along(member))

    @property
    def _row(self) -> IndexExpr:
        return product(loop.extent for loop in self._lanes or self._tile)

    @property
    def _at(self) -> IndexExpr:
        """Where a per-row (per-column) local is accessed."""
        return row_major(self._lanes or self._tile)

    def _new_local(self, dtype: torch.dtype, extent: IndexExpr = ONE) -> Local:
        return self._local(compute_dtype(dtype), extent)

    def _local(self, dtype: torch.dtype, extent: IndexExpr) -> Local:
        return Local(next(self._names), dtype, extent)


def _loops(axes: Sequence[Axis], body: Body, kind: str, notes: tuple[str, ...] = ()) -> Body:
    """`body` in loops over `axes`, outermost first; the outermost one takes the notes."""
    for position, loop in reversed(list(enumerate(axes))):
        body = (Loop(loop, body, kind, notes=() if position else notes),)
    return body


def _lane(group: Group, on_cpu: bool) -> tuple[Axis, Axis | None] | None:
    """The kept axis along which most full accesses are contiguous, unless a reduced one is; and
    for products on a CPU the axis of rows."""
    if not group.reduced or not group.kept:
        return None
    wheres = itertools.chain(*group.accesses.values())
    walks = [walk_order(where, group.axes) for where in wheres]
    full = [strides[-1] for strides in walks if len(strides) == len(group.axes)]
    votes = Counter(loop for stride, loop in full if stride is ONE)
    if not votes:
        return _product_lanes(group) if on_cpu else None
    best = max(votes, key=lambda loop: votes[loop])
    return None if best in group.reduced else (best, None)


def _product_lanes(group: Group) -> tuple[Axis, Axis | None] | None:
    """For reductions of products of smaller operands (a matrix product): the axis along which the
    result and an operand are contiguous, and the one before it.  The other operand is then one
    value a row."""
    for member in group.members:
        stored = linear(member.node.index, group.axes) if member.node.op is not None else None
        for load in member.node.loads if stored else ():
            strides = linear(load.index, group.axes)
            if strides and stored and strides[-1][0] is ONE and strides[-1] == stored[-1]:
                return stored[-1][1], stored[-2][1] if len(stored) > 1 else None
    return None
