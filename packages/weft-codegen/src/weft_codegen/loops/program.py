"""The loop program: what a graph becomes between lowering and a target language.

    Program = (sizes, inputs, constants, buffers, kernels, steps, outputs, mutations, hints)
    input   = Input(name, kind)                    kind: tensor (a buffer) or size (an int symbol)
    Buffer  = (name, dtype, shape, strides)        sizes and strides are IndexExpr, in elements
    step    = Launch(kernel, buffers, sizes)       run a kernel on these buffers
            | Extern(op, args, kwargs, results)    call a torch operator through the dispatcher
            | Alias(name, base, offset)            `name` shares the storage of `base`; no copy
            | Compute(result, axes, ...)           a loop nest that nothing is decided about yet
    output  = BufferRef(buffer) | IndexExpr | None       (a size, or nothing)

    Kernel  = (name, params, sizes, locals, body, origins)   formal parameters: no buffer names
    Param   = (name, dtype, written)
    stmt    = Loop(axis, body, kind, limit)        for axis in 0 .. min(axis.extent, limit)
            | Set(local, index, value)             local[index] = value
            | Reduce(op, targets, index, values)   local[index] = op(local[index], value)
            | Store(buffer, index, value, mode)    buffer[index] = value, or += for mode "add"

A body is a tuple of statements run in order, so a kernel is a textbook loop nest: softmax is

    for i0 in 0..4096 parallel:
        t0 = lowest
        for i1 in 0..512:  t0 max= a0[i0*512 + i1]
        t1 = 0
        for i1 in 0..512:  t2[i1] = exp(a0[i0*512 + i1] - t0);  t1 sum= t2[i1]
        for i1 in 0..512:  a1[i0*512 + i1] = t2[i1] / t1

and a column sum keeps a row of accumulators, so that the innermost loop stays contiguous:

    for i0 in 0..8 parallel:                            # blocks of 64 columns
        for i2 in 0..64:                   t0[i2] = 0
        for i1 in 0..4096:
            for i2 in 0..64:               t0[i2] sum= a0[i1*512 + i0*64 + i2]
        for i2 in 0..64:                   a1[i0*64 + i2] = t0[i2]

Rules (verify.py checks them):
  * An axis is bound by exactly one enclosing Loop wherever it is used; sibling loops may share it.
  * A local belongs to one iteration of the innermost `parallel` loops around its statements
    (every thread has its own); it is Set before it is read or reduced into.
  * Iterations of a `parallel` loop are independent; a kernel's outermost loops may be parallel,
    never a loop inside a serial one.
  * Inside one body a buffer that a statement stores to is not loaded by that or a later statement
    of the same body, except at the very element (the same index expression) before the store:
    loads of a body may all be done first.
  * Two different buffers of a Launch do not overlap, except that the memory plan may put an
    output on an input which the kernel reads only at the element it stores (`in_place`).

Lowering makes a Program of Compute, Extern and Alias steps; the scheduler turns the Computes into
kernels and Launches. Equal kernels are one object in `Program.kernels` (names of buffers and sizes
are abstracted), so repeated layers are emitted, compiled and cached once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from weft_codegen.loops.evaluate import evaluate_known
from weft_codegen.loops.expr import Expr, Load, Local, Read, computed_operands, walk
from weft_codegen.loops.index import ONE, ZERO, Axis, IndexExpr, Size, single

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Buffer:
    """Memory with a strided layout.  For a Buffer made by the program strides are dense."""

    name: str
    dtype: torch.dtype
    shape: tuple[IndexExpr, ...]
    strides: tuple[IndexExpr, ...]
    device: torch.device = CPU

    @property
    def storage(self) -> IndexExpr:
        """Number of elements from the first to past the last one."""
        if ZERO in self.shape:
            return ZERO
        dims = zip(self.shape, self.strides, strict=True)
        return sum(((extent - 1) * stride for extent, stride in dims), start=ONE)

    @property
    def bytes(self) -> IndexExpr:
        """The bytes that it needs."""
        return self.storage * self.dtype.itemsize


@dataclass(frozen=True)
class Input:
    """One positional argument of the program.

    kind "tensor": the buffer `name` (its sizes bind the size symbols that its shape names).
    kind "size": a Python int; `name` is a size symbol when `symbol` is set, else it is unused.
    kind "unused": anything; the program ignores it.
    """

    name: str
    kind: str = "tensor"


@dataclass(frozen=True)
class Param:
    """A formal buffer of a kernel."""

    name: str
    dtype: torch.dtype
    written: bool


@dataclass(frozen=True)
class Loop:
    """`for axis in 0 .. min(axis.extent, limit)`; kind is "parallel" or "serial".

    "serial" fixes the order only where a Reduce or a local carries a value from one iteration to
    the next; an emitter may vectorise any innermost loop.  `notes` are the origins of what the
    loop computes, for readers only.
    """

    axis: Axis
    body: Body
    kind: str = "serial"
    limit: IndexExpr | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_innermost(self) -> bool:
        """Whether it holds no other loop."""
        return not any(isinstance(stmt, Loop) for stmt in self.body)


@dataclass(frozen=True)
class Set:
    """local[index] = value"""

    local: Local
    index: IndexExpr
    value: Expr


@dataclass(frozen=True)
class Reduce:
    """targets[k][index] = op(targets[k][index], values[k]); `op` is a row of ops.REDUCTIONS.

    argmax and argmin have two targets and values: (value, index).
    """

    op: str
    targets: tuple[Local, ...]
    index: IndexExpr
    values: tuple[Expr, ...]


@dataclass(frozen=True)
class Store:
    """buffer[index] = value (mode "set") or += value (mode "add", atomic if iterations collide)."""

    buffer: str
    index: IndexExpr
    value: Expr
    mode: str = "set"


Stmt = Loop | Set | Reduce | Store
Body = tuple[Stmt, ...]


@dataclass(frozen=True)
class Kernel:
    """A loop nest over formal parameters.

    `params` are in order of first use, `sizes` are the formal size symbols its index expressions
    name, `locals` every local it uses.  `in_place` lists (written, read) parameter names that may
    share memory because each element is read only just before it is stored.
    """

    name: str
    params: tuple[Param, ...]
    sizes: tuple[str, ...]
    locals: tuple[Local, ...]
    body: Body
    in_place: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def loads(self) -> frozenset[str]:
        """The parameters it loads from (or adds to)."""
        every = list(statements(self.body))
        adds = {stmt.buffer for stmt in every if isinstance(stmt, Store) and stmt.mode != "set"}
        nodes = walk(*stmt_exprs(*every))
        return frozenset(node.buffer for node in nodes if isinstance(node, Load)) | adds


@dataclass(frozen=True)
class Launch:
    """Runs `kernel` (a name in Program.kernels) with actual buffers and sizes for its formals.

    `origins` says where it comes from: one "op at file:line: code" text for each fx node it
    computes.
    """

    kernel: str
    buffers: tuple[str, ...]
    sizes: tuple[IndexExpr, ...] = ()
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class BufferRef:
    """A buffer as an argument of an Extern or as an output."""

    name: str


@dataclass(frozen=True)
class Extern:
    """results = op(*args, **kwargs) through the dispatcher.

    Arguments are BufferRef, IndexExpr (a symbolic int), constants, and lists of these.  `results`
    names the buffer each returned tensor becomes, in order (None: the result is dropped, or is no
    tensor); they are freshly allocated unless the operator mutates an argument, which `mutates`
    names.  A result that is no Buffer of the program is not used.  `when` names an int64 scalar:
    the call is only made where that is not zero (see checks.py).  `reason` says why it is no loop.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[str | None, ...]
    mutates: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    when: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Alias:
    """The buffer `name` is a view of `base`'s storage that begins `offset` elements after it."""

    name: str
    base: str
    offset: IndexExpr = ZERO


@dataclass(frozen=True)
class Compute:
    """result[index] = op over `reduced` of values, for every point of `axes`.

    Without `op`, `reduced` is empty and there is one value.  argmax and argmin have two values
    (the compared one, the position) and store the position.  With `update` ("set" or "add", no
    `op`) the buffer was filled before and some of its elements, at computed places perhaps, are
    stored or added to, in the order of `axes` where they meet.  With `scan` (an op of one state;
    no `op`) the element stored is that of all values up to here along the axes `along`.
    """

    result: str
    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    op: str | None
    values: tuple[Expr, ...]
    index: IndexExpr
    origins: tuple[str, ...] = ()
    update: str | None = None
    scan: str | None = None
    along: tuple[Axis, ...] = ()

    @functools.cached_property
    def loads(self) -> tuple[Load, ...]:
        """Every distinct load of the node."""
        exprs = (*self.values, *computed_operands(self.index))
        return tuple(node for node in walk(*exprs) if isinstance(node, Load))


Step = Compute | Launch | Extern | Alias
Buffers = dict[str, Buffer]
Output = BufferRef | IndexExpr | None
Kernels = Mapping[str, Kernel]
_NO_KERNELS: Kernels = {}


@dataclass(frozen=True)
class Program:
    """A whole graph.  `buffers` holds every buffer: inputs, constants, results, aliases.

    `sizes` are the size symbols in use, each bound by a size Input or by a tensor input's shape.
    `mutations` names the inputs whose memory the steps write. `hints` are the values that size
    symbols had in the example that the graph was traced with: good for speed, true of no call.
    """

    sizes: tuple[str, ...]
    inputs: tuple[Input, ...]
    constants: dict[str, torch.Tensor]
    buffers: Buffers
    kernels: dict[str, Kernel]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    mutations: tuple[str, ...] = ()
    hints: dict[str, int] = field(default_factory=dict)

    def kernel_hints(self, step: Launch) -> dict[str, int]:
        """Likely values of the sizes of a launched kernel, by the kernel's names."""
        formal = self.kernels[step.kernel].sizes
        values = (evaluate_known(size, self.hints) for size in step.sizes)
        return {n: v for n, v in zip(formal, values, strict=True) if v is not None}

    @functools.cached_property
    def device(self) -> torch.device:
        """Where its kernels run: the first of its buffers' devices that is no CPU, if any."""
        devices = {buffer.device for buffer in self.buffers.values()} - {CPU}
        return min(devices, key=str, default=CPU)


def size_positions(program: Program) -> dict[str, tuple[int, int | None]]:
    """Where a call shows each size symbol: the input, and the dimension of one that is a tensor.

    An int comes before what a tensor shows.
    """
    found: dict[str, tuple[int, int | None]] = {}
    for position, item in enumerate(program.inputs):
        if item.kind == "size":
            found.setdefault(item.name, (position, None))
    for position, item in enumerate(program.inputs):
        shape = program.buffers[item.name].shape if item.kind == "tensor" else ()
        for dim, extent in enumerate(shape):
            atom = single(extent)
            if isinstance(atom, Size):
                found.setdefault(atom.key, (position, dim))
    return found


def index_exprs(program: Program) -> Iterator[IndexExpr]:
    """Every index expression outside of kernels."""
    for buffer in program.buffers.values():
        yield from (*buffer.shape, *buffer.strides)
    for step in program.steps:
        if isinstance(step, Compute):
            yield step.index
            yield from (axis.extent for axis in (*step.axes, *step.reduced))
            for node in walk(*step.values, *computed_operands(step.index)):
                yield from node.indices
        elif isinstance(step, Launch):
            yield from step.sizes
        elif isinstance(step, Alias):
            yield step.offset
        else:
            yield from (leaf for leaf in leaves(step) if isinstance(leaf, IndexExpr))
    yield from (output for output in program.outputs if isinstance(output, IndexExpr))


def expanded(program: Program, rule: Callable[[Step, Buffers], Iterable[Step]]) -> Program:
    """`program` with each step replaced by what `rule` makes of it, which may add buffers."""
    buffers = dict(program.buffers)
    steps = tuple(part for step in program.steps for part in rule(step, buffers))
    return replace(program, steps=steps, buffers=buffers)


def on_cpu(buffers: Iterable[Buffer], *dtypes: torch.dtype) -> bool:
    """Whether all buffers are on a CPU, and of one of these dtypes."""
    kinds = {(buffer.device, buffer.dtype) for buffer in buffers}
    return len(kinds) == 1 and kinds <= {(CPU, dtype) for dtype in dtypes}


def statements(body: Body) -> Iterator[Stmt]:
    """Every statement in `body` and below, in program order."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, Loop):
            yield from statements(stmt.body)


def perfect_nest(body: Body, *, parallel: bool) -> tuple[list[Axis], Body]:
    """The axes of the loops that stand alone inside each other, and what the innermost one holds.

    With `parallel` only such loops count; in none is a limit.
    """
    axes: list[Axis] = []
    while len(body) == 1 and isinstance(loop := body[0], Loop) and loop.limit is None:
        if parallel and loop.kind != "parallel":
            break
        axes.append(loop.axis)
        body = loop.body
    return axes, body


def stmt_exprs(*stmts: Stmt) -> list[Expr]:
    """The expressions that statements evaluate (a Loop none)."""
    found: list[Expr] = []
    for stmt in stmts:
        if isinstance(stmt, Store):
            found += (stmt.value, *computed_operands(stmt.index))
        elif not isinstance(stmt, Loop):
            found += stmt.values if isinstance(stmt, Reduce) else (stmt.value,)
    return found


def locals_read(*exprs: Expr) -> frozenset[Local]:
    """The locals that expressions read."""
    return frozenset(node.local for node in walk(*exprs) if isinstance(node, Read))


def locals_changed(body: Body) -> frozenset[Local]:
    """The locals that `body` changes."""
    sets = (stmt.local for stmt in statements(body) if isinstance(stmt, Set))
    reduced = (x for stmt in statements(body) if isinstance(stmt, Reduce) for x in stmt.targets)
    return frozenset((*sets, *reduced))


def leaves(step: Extern) -> list[Any]:
    """The arguments of an Extern, those inside of lists too."""
    found: list[Any] = []
    fx.node.map_aggregate((step.args, step.kwargs), found.append)
    return found


def step_reads(step: Step, kernels: Kernels = _NO_KERNELS) -> tuple[str, ...]:
    """The buffers a step reads, those it updates in place included; `kernels` are for Launches."""
    if isinstance(step, Compute):
        updated = [step.result] if step.update else []
        return tuple(dict.fromkeys([*(load.buffer for load in step.loads), *updated]))
    if isinstance(step, Alias):
        return (step.base,)
    if isinstance(step, Extern):
        return tuple(leaf.name for leaf in leaves(step) if isinstance(leaf, BufferRef))
    kernel = kernels[step.kernel]
    pairs = zip(kernel.params, step.buffers, strict=True)
    return tuple(name for param, name in pairs if param.name in kernel.loads)


def step_writes(step: Step, kernels: Kernels = _NO_KERNELS) -> tuple[str, ...]:
    """The buffers a step writes or makes."""
    if isinstance(step, Compute):
        return (step.result,)
    if isinstance(step, Alias):
        return (step.name,)
    if isinstance(step, Extern):
        return tuple(name for name in step.results if name is not None) + step.mutates
    pairs = zip(kernels[step.kernel].params, step.buffers, strict=True)
    return tuple(name for param, name in pairs if param.written)


def storage_roots(steps: Iterable[Any]) -> dict[str, str]:
    """For each alias among `steps`, the buffer whose storage it shares in the end."""
    roots: dict[str, str] = {}
    for step in steps:
        if isinstance(step, Alias):
            roots[step.name] = roots.get(step.base, step.base)
    return roots
