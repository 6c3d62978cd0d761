"""Write a loop kernel as Triton source.

A Triton program is one point of the grid and computes on blocks of lanes. How a loop nest maps:

* A *flat* nest (loops inside each other around plain stores) is pointwise: all axes together become
  one linear index, a block of consecutive elements per program.
* Otherwise the outer parallel loops are the grid, one program per iteration, and inside it
  every innermost loop is spread over lanes: a reduction over it into a scalar accumulates a block
  and combines the lanes at the end; a reduction into a row adds lane by lane. Loops between the two
  stay loops.
* A row (a local with one element per lane) lives in registers, so its loop must fit one block.

Each top-level parallel loop of a kernel becomes a Triton function, launched in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from weft_core.errors import WeftError

from weft_codegen.loops.expr import Cast, Const, Expr, Index, Load, Local, Op, Read, walk
from weft_codegen.loops.index import (
    Atom,
    Axis,
    IndexExpr,
    Least,
    Quotient,
    Remainder,
    Value,
    atoms,
    coefficient,
    evaluate,
    nonnegative,
    product,
    render,
    upper,
)
from weft_codegen.loops.ops import OPS, REDUCTIONS
from weft_codegen.loops.program import Kernel, Loop, Reduce, Set, Stmt, Store, statements

POINTWISE_BLOCK = 1024
LARGEST_BLOCK = 16384  # lanes of one program: beyond it a row no longer fits the registers
CHUNK = 2048

HEADER = """\
import triton
import triton.language as tl
from weft_codegen.kernels.triton.launch import libdevice
from weft_codegen.kernels.triton.prelude import *
"""

_TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
_COMBINE = {"and": "and_", "or": "or_"}  # the names that Python reserves


class NoTritonForm(WeftError):
    """The nest has no Triton form here; the message says which statement and why."""


@dataclass(frozen=True)
class Phase:
    """One Triton function: `grid` is the number of programs, as an index expression over sizes."""

    name: str
    grid: IndexExpr
    block: int  # lanes of a pointwise program, 0 where a program is one grid point
    warps: int

    def programs(self, sizes: dict[str, int]) -> int:
        """The number of programs for given sizes."""
        points: int = _number(self.grid, sizes)
        return -(-points // self.block) if self.block else points


@dataclass(frozen=True)
class TritonKernel:
    """Triton source of a kernel: every function takes its parameters, then its sizes."""

    kernel: Kernel
    source: str
    phases: tuple[Phase, ...]


def emit(kernel: Kernel) -> TritonKernel:
    """Write `kernel` as Triton source.

    Raises:
        NoTritonForm: when a row does not fit a block, or is not indexed by its lane.
    """
    sources, phases = [HEADER], []
    groups = _phases(kernel.body)
    for number, statements_of in enumerate(groups):
        # A prefix of its own, so that no kernel hides a function of the prelude.
        name = f"weft_{kernel.name}" + (f"_{number}" if len(groups) > 1 else "")
        writer = _Function(kernel, name)
        phases.append(writer.write(statements_of))
        sources.append(writer.text())
    return TritonKernel(kernel, "\n\n".join(sources), tuple(phases))


def _phases(body: tuple[Stmt, ...]) -> list[tuple[Stmt, ...]]:
    """Split at parallel loops, which need a grid of their own; what shares locals stays together.

    A local lives in one iteration of a parallel loop, so none reaches from one phase to another.
    """
    if not any(isinstance(s, Loop) and s.kind == "parallel" for s in body):
        return [body]
    groups: list[tuple[Stmt, ...]] = []
    serial: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop) and s.kind == "parallel":
            groups += [tuple(serial)] if serial else []
            groups.append((s,))
            serial = []
        else:
            serial.append(s)
    return [*groups, tuple(serial)] if serial else groups


@dataclass
class _Lanes:
    """The block that the current statements are spread over."""

    size: int
    mask: str | None
    axes: frozenset[Axis]


@dataclass
class _Function:
    """Writer of one Triton function."""

    kernel: Kernel
    name: str
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    lanes: _Lanes | None = None
    known: dict[Expr, str] = field(default_factory=dict)
    counter: int = 0

    def text(self) -> str:
        """The function's source."""
        parameters = [p.name for p in self.kernel.params] + list(self.kernel.sizes)
        head = f"@triton.jit\ndef {self.name}({', '.join(parameters)}):"
        return "\n".join([head, *self.lines]) + "\n"

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def fresh(self) -> str:
        self.counter += 1
        return f"v{self.counter - 1}"

    # The nest.

    def write(self, nest: tuple[Stmt, ...]) -> Phase:
        """Write the body of the function for `nest`."""
        grid, body = _peel(nest, parallel_only=True)
        flat_axes, flat_body = _peel(nest, parallel_only=False)
        if flat_axes and _is_flat(flat_body):
            points = product(axis.extent for axis in flat_axes)
            return self._write_flat(flat_axes, flat_body, points)
        self._unravel(grid, "tl.program_id(0)")
        self.body(body)
        widest = max([_block_of(loop) for loop in _leaf_loops(body)], default=1)
        warps = 4 if widest <= CHUNK else 8 if widest <= 4 * CHUNK else 16
        return Phase(self.name, product(axis.extent for axis in grid), 0, warps)

    def _write_flat(self, axes: list[Axis], body: tuple[Stmt, ...], points: IndexExpr) -> Phase:
        block = POINTWISE_BLOCK
        self.line(f"lane = {_start(points)} * {block} + tl.arange(0, {block})")
        mask = None
        if not (points.is_const and points.value % block == 0):
            self.line(f"inside = lane < {self.index(points)}")
            mask = "inside"
        self._unravel(axes, "lane")
        self.lanes = _Lanes(block, mask, frozenset(axes))
        self._scope(body)
        return Phase(self.name, points, block, 4)

    def _unravel(self, axes: list[Axis], linear: str) -> None:
        """Name each axis as a digit of the linear index, last axis fastest."""
        if linear != "lane":
            self.line(f"lane = {linear}")
        for position, axis in enumerate(reversed(axes)):
            last = position == len(axes) - 1
            extent = self.index(axis.extent)
            self.line(f"{axis.key} = lane" + ("" if last else f" % ({extent})"))
            if not last:
                self.line(f"lane = lane // ({extent})")

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Statements outside lanes: loops become `for`, innermost loops become lanes."""
        self.known = {}
        for statement in body:
            if not isinstance(statement, Loop):
                self.statement(statement)
            elif any(isinstance(inner, Loop) for inner in statement.body):
                self._for(statement)
            else:
                self._spread(statement)

    def _for(self, loop: Loop) -> None:
        stop = self.index(loop.axis.extent)
        if loop.limit is not None:
            stop = f"min({stop}, {self.index(loop.limit)})"
        self.line(f"for {loop.axis.key} in range({stop}):")
        self.depth += 1
        self.body(loop.body)
        self.depth -= 1
        self.known = {}

    def _spread(self, loop: Loop) -> None:
        """An innermost loop over lanes: in one block where it fits, else in chunks."""
        block, extent, axis = _block_of(loop), loop.axis.extent, loop.axis.key
        whole = extent.is_const and block >= extent.value
        sums = [s for s in loop.body if isinstance(s, Reduce) and _crosses_lanes(s, loop.axis)]
        blocks = {target: f"{target.name}_lanes" for s in sums for target in s.targets}
        self._check_rows(loop, whole, set(blocks))
        for s in sums:
            for target, start in zip(s.targets, _identities(s), strict=True):
                self.line(f"{blocks[target]} = tl.full([{block}], {start}, {_state(target)})")
        if whole:
            self.line(f"{axis} = tl.arange(0, {block})")
        else:
            self.line(f"for {axis}_start in range(0, {self.index(extent)}, {block}):")
            self.depth += 1
            self.line(f"{axis} = {axis}_start + tl.arange(0, {block})")
        bounds = [] if whole and extent.value == block else [extent]
        bounds += [loop.limit] if loop.limit is not None else []
        if bounds:
            tests = [f"({axis} < {self.index(bound)})" for bound in bounds]
            self.line(f"inside = {' & '.join(tests)}")
        self.lanes = _Lanes(block, "inside" if bounds else None, frozenset([loop.axis]))
        self._scope(loop.body, blocks)
        self.lanes = None
        self.depth -= 0 if whole else 1
        for s in sums:
            self._combine_lanes(s, blocks)
        self.known = {}

    def _check_rows(self, loop: Loop, whole: bool, accumulated: set[Local]) -> None:
        for local in _locals_of(loop.body):
            row = not (local.extent.is_const and local.extent.value == 1)
            if row and not whole:
                raise NoTritonForm(
                    f"row {local.name} of kernel {self.kernel.name}: its loop over "
                    f"{loop.axis.extent} elements does not fit one block of {LARGEST_BLOCK}"
                )
        reads = [n for s in loop.body for n in _reads(s) if n.local in accumulated]
        if reads:
            raise NoTritonForm(
                f"{reads[0].local.name} of kernel {self.kernel.name} is read while it is reduced"
            )

    def _combine_lanes(self, s: Reduce, blocks: dict[Local, str]) -> None:
        combine = _combiner(s)
        names = [target.name for target in s.targets]
        lanes = [blocks[target] for target in s.targets]
        if len(names) == 1:
            self.line(f"{names[0]} = {combine}({names[0]}, tl.reduce({lanes[0]}, 0, {combine}))")
            return
        parts = [f"{name}_part" for name in lanes]
        self.line(f"{', '.join(parts)} = tl.reduce(({', '.join(lanes)}), 0, {combine})")
        operands = [*names, *parts]
        self.line(f"{', '.join(names)} = {combine}({', '.join(operands)})")

    # Statements.

    def _scope(self, body: tuple[Stmt, ...], blocks: dict[Local, str] | None = None) -> None:
        self.known = {}
        for statement in body:
            self.statement(statement, blocks or {})

    def statement(self, statement: Stmt, blocks: dict[Local, str] | None = None) -> None:
        """A statement that is no loop, on lanes or on scalars."""
        if isinstance(statement, Store):
            self._store(statement)
        elif isinstance(statement, Set):
            self._check_row_index(statement.local, statement.index)
            value = self.value(statement.value)
            if self.lanes and not _is_scalar(statement.local):
                value = f"tl.broadcast_to({value}, [{self.lanes.size}])"
            self.line(f"{statement.local.name} = tl.cast({value}, {_state(statement.local)})")
            self._forget(statement.local)
        elif isinstance(statement, Reduce):
            self._reduce(statement, blocks or {})

    def _store(self, s: Store) -> None:
        value = self.value(s.value)
        address = f"{s.buffer} + {self.address(s.index)}"
        mask = self.lanes.mask if self.lanes else None
        tail = f", mask={mask}" if mask else ""
        call = "tl.store" if s.mode == "set" else "tl.atomic_add"
        if self.lanes:
            # A lane-free value or address still writes (or adds) once per lane.
            address = f"{s.buffer} + tl.broadcast_to({self.address(s.index)}, [{self.lanes.size}])"
        self.line(f"{call}({address}, {value}{tail})")

    def _reduce(self, s: Reduce, blocks: dict[Local, str]) -> None:
        combine = _combiner(s)
        values = [self.value(value) for value in s.values]
        targets = [blocks.get(target, target.name) for target in s.targets]
        crossing = s.targets[0] in blocks
        if not crossing:
            self._check_row_index(s.targets[0], s.index)
        operands = []
        for target, value, start in zip(s.targets, values, _identities(s), strict=True):
            typed = f"tl.cast({value}, {_state(target)})"
            if self.lanes and self.lanes.mask and crossing:
                typed = f"tl.where({self.lanes.mask}, {typed}, {start})"
            operands.append(typed)
        self.line(f"{', '.join(targets)} = {combine}({', '.join([*targets, *operands])})")
        for target in s.targets:
            self._forget(target)

    def _check_row_index(self, local: Local, where: IndexExpr) -> None:
        if _is_scalar(local) or self.lanes is None:
            if not _is_scalar(local):
                raise NoTritonForm(f"row {local.name} is used outside its lanes")
            return
        axes = [atom for atom in atoms(where) if isinstance(atom, Axis)]
        one_to_one = len(axes) == 1 and where.terms == (((axes[0],), 1),)
        if not one_to_one or axes[0] not in self.lanes.axes:
            raise NoTritonForm(f"row {local.name} is indexed by {where}, not by its lane")

    def _forget(self, local: Local) -> None:
        """Values computed from a local that has changed are no longer known."""
        self.known = {
            node: name
            for node, name in self.known.items()
            if not any(isinstance(n, Read) and n.local is local for n in walk(node))
        }

    # Values.

    def value(self, root: Expr) -> str:
        """Text of an expression; nodes used twice get a name, in this scope."""
        uses: dict[Expr, int] = {}
        for node in walk(root):
            for child in node.children:
                uses[child] = uses.get(child, 0) + 1
        for node in walk(root):
            named = uses.get(node, 0) > 1 or isinstance(node, Load)
            if named and node not in self.known and not isinstance(node, Const | Index | Read):
                text = self.node(node)
                self.known[node] = self.fresh()
                self.line(f"{self.known[node]} = {text}")
        return self.node(root)

    def node(self, node: Expr) -> str:
        """Text of one node, operands in place unless they are named."""
        if node in self.known:
            return self.known[node]
        return _WRITERS[type(node)](self, node)

    def _const(self, node: Const) -> str:
        return f"tl.full((), {_literal(node.value)}, {_TYPES[node.dtype]})"

    def _index(self, node: Index) -> str:
        return f"tl.cast({self.index(node.index)}, {_TYPES[node.dtype]})"

    def _load(self, node: Load) -> str:
        masks = [self.lanes.mask] if self.lanes and self.lanes.mask else []
        masks += [f"({self.node(node.mask)})"] if node.mask is not None else []
        # A scalar address takes no block mask: every lane would read the same valid element.
        on_lanes = node.mask is not None or bool(self.lanes and node.axes & self.lanes.axes)
        tail = f", mask={' & '.join(masks)}, other=0" if masks and on_lanes else ""
        address = f"{node.buffer} + {self.address(node.index)}"
        if tail and self.lanes:
            address = f"{node.buffer} + tl.broadcast_to({self.address(node.index)}, "
            address += f"[{self.lanes.size}])"
        return f"tl.load({address}{tail})"

    def _read(self, node: Read) -> str:
        self._check_row_index(node.local, node.index)
        return node.local.name

    def _op(self, node: Op) -> str:
        return OPS[node.name].triton.format(*(self.node(arg) for arg in node.args))

    def _cast(self, node: Cast) -> str:
        if node.dtype is torch.bool:
            return f"({self.node(node.arg)} != 0)"
        return f"tl.cast({self.node(node.arg)}, {_TYPES[node.dtype]})"

    # Indices.

    def index(self, where: IndexExpr) -> str:
        """Text of an index expression."""
        return f"({render(where, self._leaf, _DIVISIONS)})" if where.terms else "0"

    def address(self, where: IndexExpr) -> str:
        """Text of an element offset, in 64 bits unless it surely fits 32."""
        top = upper(where)
        small = top is not None and top.is_const and top.value < 2**31
        return self.index(where) if small else f"tl.cast({self.index(where)}, tl.int64)"

    def _leaf(self, atom: Atom) -> str:
        if isinstance(atom, Value):
            return f"tl.cast({self.node(atom.expr)}, tl.int64)"
        return atom.key


_WRITERS = {
    Const: _Function._const,
    Index: _Function._index,
    Load: _Function._load,
    Read: _Function._read,
    Op: _Function._op,
    Cast: _Function._cast,
}


def _division(atom: Atom, left: str, right: str, exact: str, sign: str) -> str:
    """Triton's integer / and % truncate: equal to floor for non-negative numerators only."""
    assert isinstance(atom, Quotient | Remainder)
    if nonnegative(atom.num):
        return f"(({left}) {sign} ({right}))"
    return f"{exact}(tl.cast({left}, tl.int64), tl.cast({right}, tl.int64))"


_DIVISIONS = {
    Quotient: lambda atom, a, b: _division(atom, a, b, "floordiv", "//"),
    Remainder: lambda atom, a, b: _division(atom, a, b, "remainder", "%"),
    Least: lambda atom, a, b: f"tl.minimum({a}, {b})",
}


def _peel(body: tuple[Stmt, ...], *, parallel_only: bool) -> tuple[list[Axis], tuple[Stmt, ...]]:
    """The axes of the loops that stand alone inside each other, and what the innermost holds."""
    axes: list[Axis] = []
    while len(body) == 1 and isinstance(loop := body[0], Loop) and loop.limit is None:
        if parallel_only and loop.kind != "parallel":
            break
        axes.append(loop.axis)
        body = loop.body
    return axes, body


def _is_flat(body: tuple[Stmt, ...]) -> bool:
    return all(isinstance(s, Store) or (isinstance(s, Set) and _is_scalar(s.local)) for s in body)


def _leaf_loops(body: tuple[Stmt, ...]) -> Iterator[Loop]:
    for stmt in statements(body):
        if isinstance(stmt, Loop) and not any(isinstance(inner, Loop) for inner in stmt.body):
            yield stmt


def _block_of(loop: Loop) -> int:
    extent = loop.axis.extent
    if extent.is_const and extent.value <= LARGEST_BLOCK:
        return max(16, 1 << (extent.value - 1).bit_length())
    return CHUNK


def _is_scalar(local: Local) -> bool:
    return local.extent.is_const and local.extent.value == 1


def _crosses_lanes(s: Reduce, axis: Axis) -> bool:
    along = coefficient(s.index, axis)
    return along is not None and not along.terms


def _reads(stmt: Stmt) -> Iterator[Read]:
    roots = () if isinstance(stmt, Loop) else getattr(stmt, "values", None) or (stmt.value,)
    yield from (n for n in walk(*roots) if isinstance(n, Read))


def _locals_of(body: tuple[Stmt, ...]) -> Iterator[Local]:
    for stmt in body:
        yield from (n.local for n in _reads(stmt))
        if isinstance(stmt, Set):
            yield stmt.local
        elif isinstance(stmt, Reduce):
            yield from stmt.targets


def _combiner(s: Reduce) -> str:
    name = REDUCTIONS[s.op].combine
    return _COMBINE.get(name, name)


def _state(local: Local) -> str:
    return _TYPES[local.dtype]


def _identities(s: Reduce) -> list[str]:
    """Text of the value each target starts from; an index starts past every real one."""
    row = REDUCTIONS[s.op]
    dtype = s.targets[0].dtype
    if isinstance(row.identity, str):
        low = row.identity == "lowest"
        if dtype.is_floating_point:
            first = _literal(-math.inf if low else math.inf)
        elif dtype is torch.bool:
            first = "0" if low else "1"
        else:
            bounds = torch.iinfo(dtype)
            first = str(bounds.min if low else bounds.max)
    else:
        first = str(float(row.identity) if dtype.is_floating_point else int(row.identity))
    return [first] if row.states == 1 else [first, str(2**31 - 1)]


def _literal(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(int(value) if isinstance(value, bool) else value)


def _start(points: IndexExpr) -> str:
    small = points.is_const and points.value < 2**31 - POINTWISE_BLOCK
    return "tl.program_id(0)" if small else "tl.program_id(0).to(tl.int64)"


def _number(where: IndexExpr, sizes: dict[str, int]) -> int:
    return int(evaluate(where, lambda atom: sizes[atom.key]))
