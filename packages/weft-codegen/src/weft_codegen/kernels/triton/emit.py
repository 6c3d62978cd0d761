"""Write a loop kernel as Triton source.

A Triton program is one point of the grid and computes on blocks of lanes. How a loop nest maps:

* A *flat* nest (loops inside each other around plain stores) is pointwise: all axes together become
  one linear index, a block of consecutive elements per program.
* Otherwise the outer parallel loops are the grid, one program per iteration, and inside it
  every innermost loop is spread over lanes: a reduction over it into a scalar accumulates a block
  and combines the lanes at the end; a reduction into a row adds lane by lane, and a block may take
  several iterations of the loop around them at once. Other loops between the two stay loops.
* A row (a local with one element per lane) lives in registers, so its loop must fit one block.
* Where rows are short, a program takes several points of the grid: blocks are rows times lanes, and
  what is a scalar of a row is a block of one lane.

Each top-level parallel loop of a kernel becomes a Triton function, launched in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from weft_codegen.kernels.exprs import locals_of
from weft_codegen.kernels.triton.blocks import Blocks, Tile, leaf_of
from weft_codegen.kernels.triton.triton_expr import (
    Dimension,
    Lanes,
    NoTritonForm,
    ValueWriter,
    literal,
    type_name,
)
from weft_codegen.loops import program as ir
from weft_codegen.loops.evaluate import evaluate
from weft_codegen.loops.expr import Const, Local
from weft_codegen.loops.index import ZERO, Axis, IndexExpr, product
from weft_codegen.loops.ops import REDUCTIONS
from weft_codegen.loops.schedule.assemble import GPU_LANES, GPU_ROW, identity
from weft_codegen.loops.steps import coefficient

# Iterations whose loads are in flight together: of few elements a thread, of many (both unrolled),
# and of tiles (a pipeline through shared memory).
UNROLL, UNROLL_CHUNKS, STAGES = 16, 4, 3

HEADER = """\
import triton
import triton.language as tl
from weft_codegen.kernels.triton.jit import libdevice
from weft_codegen.kernels.triton.prelude import *
"""

# Names that Python reserves; and bits have no sum, which the extrema of other types fall back to.
_COMBINE = {"and": "and_", "or": "or_"}
_COMBINE_BITS = {"maximum": "or_", "minimum": "and_"}


@dataclass(frozen=True)
class Phase:
    """One Triton function: `grid` is the number of programs, as an index expression over sizes."""

    name: str
    grid: IndexExpr
    block: int  # points of a program: of a pointwise one, or rows; 0 where it is one
    warps: int

    def programs(self, sizes: dict[str, int]) -> int:
        """The number of programs for given sizes."""
        points = int(evaluate(self.grid, lambda atom: sizes[atom.key]))
        return -(-points // self.block) if self.block else points


@dataclass(frozen=True)
class TritonKernel:
    """Triton source of a kernel: every function takes its parameters, then its sizes."""

    kernel: ir.Kernel
    source: str
    phases: tuple[Phase, ...]


def emit(kernel: ir.Kernel, hints: Mapping[str, int] | None = None) -> TritonKernel:
    """Write `kernel` as Triton source; `hints` are likely values of its sizes, by name.

    Raises:
        NoTritonForm: when a row does not fit a block, or is not indexed by its lane.
    """
    sources, phases = [HEADER], []
    groups = _phases(kernel.body)
    for number, statements_of in enumerate(groups):
        # A prefix of its own, so that no kernel hides a function of the prelude.
        name = f"weft_{kernel.name}" + (f"_{number}" if len(groups) > 1 else "")
        writer = _Function(kernel, name, Blocks(hints or {}))
        phases.append(writer.write(statements_of))
        sources.append(writer.source())
    return TritonKernel(kernel, "\n\n".join(sources), tuple(phases))


def _phases(body: ir.Body) -> list[ir.Body]:
    """Split at parallel loops, which need a grid of their own; what shares locals stays together.

    A local lives in one iteration of a parallel loop, so none reaches from one phase to another.
    """
    groups: list[ir.Body] = []
    for parallel, found in itertools.groupby(body, _is_parallel):
        group = tuple(found)
        groups += [(part,) for s in group for part in _distributed(s)] if parallel else [group]
    return groups


def _distributed(stmt: ir.Stmt) -> list[ir.Stmt]:
    """A parallel loop around several others as one loop around each."""
    if not isinstance(stmt, ir.Loop) or not all(map(_is_parallel, stmt.body)):
        return [stmt]
    inner = (part for s in stmt.body for part in _distributed(s))
    return [replace(stmt, body=(part,)) for part in inner]


def _is_parallel(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Loop) and stmt.kind == "parallel"


class _Function(ValueWriter):
    """Writer of one Triton function: the loop nest and its statements."""

    def __init__(self, kernel: ir.Kernel, name: str, blocks: Blocks) -> None:
        super().__init__()
        self.kernel, self.title, self.blocks = kernel, name, blocks
        self.sums: dict[Local, str] = {}
        self.tile: Tile | None = None
        self.rows: Dimension | None = None
        self.widest, self.tiled = 1, False  # lanes of a row, and whether a loop is tiled

    def source(self) -> str:
        """The function's source."""
        parameters = [p.name for p in self.kernel.params] + list(self.kernel.sizes)
        head = f"@triton.jit\ndef {self.title}({', '.join(parameters)}):"
        return "\n".join([head, *self.lines]) + "\n"

    # The nest.

    def write(self, nest: ir.Body) -> Phase:
        """Write the body of the function for `nest`."""
        grid, body = ir.perfect_nest(nest, parallel=True)
        flat_axes, flat_body = ir.perfect_nest(nest, parallel=False)
        others = (s for s in flat_body if not (isinstance(s, ir.Set) and s.local.is_scalar))
        if flat_axes and all(isinstance(s, ir.Store) for s in others):
            points = product(axis.extent for axis in flat_axes)
            return self._write_flat(flat_axes, flat_body, points)
        rows = self.blocks.rows(grid, body)
        points = product(axis.extent for axis in grid)
        self.line("lane = tl.program_id(0)")
        if rows > 1:
            self.line(f"lane = (lane * {rows} + tl.arange(0, {rows}))[:, None]")
            even = points.is_const and points.value % rows == 0
            if not even:
                self.line(f"inside_rows = lane < {self.at(points)}")
            self.rows = Dimension(rows, frozenset(grid), None if even else "inside_rows")
        self._unravel(grid)
        self._spread_over(None)
        self._body_that_may_fit(body)
        warps = self.blocks.warps(grid, body, rows * self.widest, self.tiled)
        return Phase(self.title, points, rows if rows > 1 else 0, warps)

    def _body_that_may_fit(self, body: ir.Body) -> None:
        """`body`, and before it a variant without loops for lengths that fit the example's blocks:
        there what several loops load is loaded once."""
        loops = [s for s in ir.statements(body) if isinstance(s, ir.Loop)]
        known, fitting = self.blocks, replace(self.blocks, fitting=True)
        fits = {s.axis.extent: fitting.columns(s) for s in loops if known.may_fit(s)}
        if not fits:
            self.body(body)
            return
        tests = [f"({self.at(extent)} <= {block})" for extent, block in fits.items()]
        for head, self.blocks in ((f"if {' & '.join(tests)}:", fitting), ("else:", known)):
            self.line(head)
            self.depth += 1
            self.body(body)
            self.depth -= 1

    def _spread_over(self, lanes: Dimension | None) -> None:
        """Let what follows be computed on `lanes` of the program's rows."""
        if self.rows is not None:
            self.lanes = Lanes((self.rows, lanes or Dimension(1)))
        else:
            self.lanes = Lanes((lanes,)) if lanes else None

    def _write_flat(self, axes: list[Axis], body: ir.Body, points: IndexExpr) -> Phase:
        block = GPU_LANES
        wide = "" if points.is_const and points.value < 2**31 - block else ".to(tl.int64)"
        self.line(f"lane = tl.program_id(0){wide} * {block} + tl.arange(0, {block})")
        mask = None
        if not (points.is_const and points.value % block == 0):
            self.line(f"inside = lane < {self.at(points)}")
            mask = "inside"
        self._unravel(axes)
        self._spread_over(Dimension(block, frozenset(axes), mask))
        self._scope(body, {})
        return Phase(self.title, points, block, 4)

    def _unravel(self, axes: list[Axis]) -> None:
        """Name each axis as a digit of the linear index `lane`, last axis fastest."""
        for axis in reversed(axes[1:]):
            extent = self.at(axis.extent)
            self.line(f"{axis.key} = lane % ({extent})")
            self.line(f"lane = lane // ({extent})")
        for axis in axes[:1]:
            self.line(f"{axis.key} = lane")

    def body(self, body: ir.Body) -> None:
        """Statements outside lanes: loops become `for`, innermost loops become lanes."""
        with self.scope(body):
            for statement in body:
                if not isinstance(statement, ir.Loop):
                    self.statement(statement, {})
                    continue
                self.forget(ir.locals_changed(statement.body))
                sums: list[ir.Reduce] = []
                if not self.sums:
                    self.tile = self.blocks.tile(statement)
                    sums = self._start_sums(leaf_of(statement))
                (self._spread if statement.is_innermost else self._for)(statement)
                for s in sums:
                    self._combine_lanes(s)
                if sums and self.tile:
                    self.line(f"{self.tile.leaf.axis.key} = tl.arange(0, {self.tile.columns})")

    def _for(self, loop: ir.Loop) -> None:
        stop = self.at(loop.axis.extent)
        if loop.limit is not None:
            stop = f"min({stop}, {self.at(loop.limit)})"
        if self.tile is not None and loop is self.tile.loop:
            self._spread_tile(self.tile, stop)
            return
        inner = [s for s in ir.statements(loop.body) if isinstance(s, ir.Loop)]
        # Loops unrolled inside of unrolled loops take LLVM minutes.
        factor = UNROLL if all(map(self.blocks.is_whole, inner)) else 1
        self.line(f"for {loop.axis.key} in tl.range(0, {stop}, loop_unroll_factor={factor}):")
        self.depth += 1
        self.body(loop.body)
        self.depth -= 1

    def _spread(self, loop: ir.Loop) -> None:
        """An innermost loop over lanes: in one block where it fits, else in chunks."""
        block, extent, axis = self.blocks.columns(loop), loop.axis.extent, loop.axis.key
        whole, lanes = self.blocks.is_whole(loop), self._arange(block)
        self.widest = max(self.widest, block)
        self._check_rows(loop, whole, set(self.sums))
        if whole:
            self.line(f"{axis} = {lanes}")
        else:
            self.line(
                f"for {axis}_start in tl.range(0, {self.at(extent)}, {block}, "
                f"loop_unroll_factor={1 if self.blocks.may_fit(loop) else UNROLL_CHUNKS}):"
            )
            self.depth += 1
            self.line(f"{axis} = {axis}_start + {lanes}")
        full = whole and extent.is_const and extent.value == block
        bounds = [] if full else [extent]
        bounds += [loop.limit] if loop.limit is not None else []
        if bounds:
            tests = [f"({axis} < {self.at(bound)})" for bound in bounds]
            self.line(f"inside{block} = {' & '.join(tests)}")
        # In a loop a variable of Triton keeps its type, and so its block.
        mask = f"inside{block}" if bounds else None
        self._spread_over(Dimension(block, frozenset([loop.axis]), mask))
        self._scope(loop.body, self.sums)
        self._spread_over(None)
        self.depth -= 0 if whole else 1

    def _arange(self, block: int) -> str:
        return f"tl.arange(0, {block})" + ("[None, :]" if self.rows else "")

    def _spread_tile(self, tile: Tile, stop: str) -> None:
        """A loop and the lanes inside of it, several iterations a block."""
        row, lanes = tile.loop.axis.key, tile.lanes
        self._check_rows(tile.leaf, True, set(self.sums))
        self.line(f"for {row}_start in tl.range(0, {stop}, {tile.rows}, num_stages={STAGES}):")
        self.depth += 1
        self.line(f"{row} = {row}_start + tl.arange(0, {lanes}) // {tile.columns}")
        tests = [f"({axis.key} < {self.at(end)})" for axis, end in tile.bounds()]
        if tests:
            self.line(f"inside{lanes} = {' & '.join(tests)}")
        axes = frozenset([tile.loop.axis, tile.leaf.axis])
        self._spread_over(Dimension(lanes, axes, f"inside{lanes}" if tests else None))
        self._scope(tile.leaf.body, self.sums)
        self._spread_over(None)
        self.depth -= 1

    def _start_sums(self, leaf: ir.Loop | None) -> list[ir.Reduce]:
        """Blocks of lanes for what `leaf` reduces to scalars, also over the loops around it; or
        for the rows that a tile reduces to."""
        if leaf is None:
            return []
        reduces = [s for s in leaf.body if isinstance(s, ir.Reduce)]
        found = [s for s in reduces if self.tile or coefficient(s.index, leaf.axis) is ZERO]
        sums = list({s.targets: s for s in found}.values())  # what is concatenated adds to one
        block = self.tile.lanes if self.tile else self.blocks.columns(leaf)
        shape = f"[{block}]" if self.rows is None else f"[{self.rows.size}, {block}]"
        self.widest, self.tiled = max(self.widest, block), self.tiled or self.tile is not None
        if self.tile:  # before all loops: in one a variable of Triton keeps its type
            self.line(f"{leaf.axis.key} = tl.arange(0, {block}) % {self.tile.columns}")
        for s in sums:
            for target, start in zip(s.targets, _identities(s), strict=True):
                if not target.is_scalar and not self.tile:
                    raise NoTritonForm(f"row {target.name} is reduced across lanes")
                name = self.sums[target] = f"{target.name}_lanes{block}"
                self.line(f"{name} = tl.full({shape}, {start}, {type_name(target.dtype)})")
        return sums

    def _check_rows(self, loop: ir.Loop, whole: bool, accumulated: set[Local]) -> None:
        for local in locals_of(loop.body):
            if not local.is_scalar and not whole:
                raise NoTritonForm(
                    f"row {local.name} of kernel {self.kernel.name}: its loop over "
                    f"{loop.axis.extent} elements does not fit one block of {GPU_ROW}"
                )
        for local in ir.locals_read(*ir.stmt_exprs(*loop.body)) & accumulated:
            raise NoTritonForm(
                f"{local.name} of kernel {self.kernel.name} is read while it is reduced"
            )

    def _combine_lanes(self, s: ir.Reduce) -> None:
        combine = _combiner(s)
        names = [target.name for target in s.targets]
        lanes = [self.sums.pop(target) for target in s.targets]
        if self.tile is not None:
            shape = f"[{self.tile.rows}, {self.tile.columns}]"
            lanes = [f"tl.reshape({name}, {shape})" for name in lanes]
        across = f"0, {combine}" if self.rows is None else f"1, {combine}, keep_dims=True"
        if len(names) == 1:
            self.line(f"{names[0]} = {combine}({names[0]}, tl.reduce({lanes[0]}, {across}))")
            return
        parts = [f"{name}_part" for name in names]
        self.line(f"{', '.join(parts)} = tl.reduce(({', '.join(lanes)}), {across})")
        operands = [*names, *parts]
        self.line(f"{', '.join(names)} = {combine}({', '.join(operands)})")

    # Statements.

    def _scope(self, body: ir.Body, blocks: dict[Local, str]) -> None:
        with self.scope(body):
            for statement in body:
                self.statement(statement, blocks)

    def statement(self, statement: ir.Stmt, blocks: dict[Local, str]) -> None:
        """A statement that is no loop, on lanes or on scalars."""
        for line in self.define(*ir.stmt_exprs(statement)):
            self.line(line)
        if isinstance(statement, ir.Store):
            self._store(statement)
        elif isinstance(statement, ir.Set):
            self.check_row_index(statement.local, statement.index)
            value = self.text(statement.value)
            if self.lanes and (self.rows or not statement.local.is_scalar):
                value = f"tl.broadcast_to({value}, {self.lanes.shape()})"
            self.line(
                f"{statement.local.name} = tl.cast({value}, {type_name(statement.local.dtype)})"
            )
            self.forget([statement.local])
        elif isinstance(statement, ir.Reduce):
            self._reduce(statement, blocks)

    def _store(self, s: ir.Store) -> None:
        value = self.text(s.value)
        mask = self.lanes.mask if self.lanes else None
        tail = f", mask={mask}" if mask else ""
        call = "tl.store" if s.mode == "set" else "tl.atomic_add"
        # A lane-free value or address still writes (or adds) once per lane.
        self.line(f"{call}({s.buffer} + {self.places(s.index)}, {value}{tail})")

    def _reduce(self, s: ir.Reduce, blocks: dict[Local, str]) -> None:
        combine = _combiner(s)
        values = [self.text(value) for value in s.values]
        targets = [blocks.get(target, target.name) for target in s.targets]
        crossing = s.targets[0] in blocks
        if not crossing:
            self.check_row_index(s.targets[0], s.index)
        operands = []
        for target, value, start in zip(s.targets, values, _identities(s), strict=True):
            kind = type_name(target.dtype)
            typed = f"tl.cast({value}, {kind})"
            if self.lanes and self.lanes.mask and crossing:
                typed = f"tl.where({self.lanes.mask}, {typed}, tl.full((), {start}, {kind}))"
            operands.append(typed)
        self.line(f"{', '.join(targets)} = {combine}({', '.join([*targets, *operands])})")
        self.forget(s.targets)


def _combiner(s: ir.Reduce) -> str:
    name = REDUCTIONS[s.op].combine
    if s.targets[0].dtype is torch.bool and name in _COMBINE_BITS:
        return _COMBINE_BITS[name]
    return _COMBINE.get(name, name)


def _identities(s: ir.Reduce) -> list[str]:
    """Text of the value each target starts from; an index starts past every real one."""
    start = identity(s.op, s.targets[0].dtype)
    assert isinstance(start, Const)
    first = literal(start.value)
    return [first] if len(s.targets) == 1 else [first, str(2**31 - 1)]
