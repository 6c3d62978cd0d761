"""The slow reference: runs a Program with torch operations, loop by loop.

Tests compare it with eager (is the program right?) and generated code with it (is the emitter
right?).  Outer loops run in Python; an innermost loop is evaluated for all its iterations at once,
which is allowed because a body's loads may all be done first (see program.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from weft_codegen.loops import program as ir
from weft_codegen.loops.evaluate import evaluate
from weft_codegen.loops.expr import Apply, Cast, Const, Expr, Index, Load, Local, Read
from weft_codegen.loops.index import Atom, Axis, ComputedIndex, IndexExpr
from weft_codegen.loops.ops import OPS, REDUCTIONS

Sizes = dict[str, int]


def run_program(program: ir.Program, args: Sequence[Any]) -> list[Any]:
    """The outputs of `program` on `args` (tensors and ints, in the order of its inputs).

    Inputs that the program mutates are written in place.
    """
    return _Run(program, args).run()


class _Run:
    """One execution: the memory of every buffer, as tensors."""

    def __init__(self, program: ir.Program, args: Sequence[Any]) -> None:
        self._program = program
        self._memory: dict[str, torch.Tensor] = dict(program.constants)
        self._sizes: Sizes = {
            name: int(args[position]) if dim is None else args[position].shape[dim]
            for name, (position, dim) in ir.size_positions(program).items()
        }
        for item, arg in zip(program.inputs, args, strict=True):
            if item.kind == "tensor":
                self._memory[item.name] = arg.detach()

    def run(self) -> list[Any]:
        for step in self._program.steps:
            if isinstance(step, ir.Launch):
                self._launch(step)
            elif isinstance(step, ir.Extern):
                self._extern(step)
            elif isinstance(step, ir.Alias):
                self._alias(step)
        return [self._output(output) for output in self._program.outputs]

    def _output(self, output: Any) -> Any:
        if isinstance(output, ir.BufferRef):
            return self._memory[output.name]
        return None if output is None else self._int(output)

    def _int(self, where: IndexExpr) -> int:
        return int(evaluate(where, lambda atom: self._sizes[atom.key]))

    def _allocate(self, name: str) -> torch.Tensor:
        buffer = self._program.buffers[name]
        return torch.empty_strided(
            [self._int(n) for n in buffer.shape],
            [self._int(n) for n in buffer.strides],
            dtype=buffer.dtype,
        )

    def _alias(self, step: ir.Alias) -> None:
        buffer, base = self._program.buffers[step.name], self._memory[step.base]
        self._memory[step.name] = base.as_strided(
            [self._int(n) for n in buffer.shape],
            [self._int(n) for n in buffer.strides],
            base.storage_offset() + self._int(step.offset),
        )

    def _extern(self, step: ir.Extern) -> None:
        if step.when is not None and not self._memory[step.when].any():
            return
        args, kwargs = fx.node.map_aggregate((step.args, dict(step.kwargs)), self._argument)
        with torch.no_grad():
            results = step.op(*args, **kwargs)
        if not isinstance(results, tuple | list):
            results = () if results is None else (results,)
        for name, result in zip(step.results, results, strict=True):
            if name is not None:
                self._memory[name] = self._laid_out(name, result)

    def _laid_out(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """`result` with the strides that the program relies on."""
        buffer = self._program.buffers.get(name)
        if buffer is None or result.layout is not torch.strided:
            return result
        strides = tuple(self._int(n) for n in buffer.strides)
        dims = zip(result.shape, result.stride(), strides, strict=True)
        if result.numel() == 0 or all(n == 1 or actual == want for n, actual, want in dims):
            return result
        return self._allocate(name).copy_(result)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, ir.BufferRef):
            return self._memory[value.name]
        return self._int(value) if isinstance(value, IndexExpr) else value

    def _launch(self, step: ir.Launch) -> None:
        kernel = self._program.kernels[step.kernel]
        for name in step.buffers:
            if name not in self._memory:
                self._memory[name] = self._allocate(name)
        sizes = {n: self._int(v) for n, v in zip(kernel.sizes, step.sizes, strict=True)}
        run_kernel(kernel, [self._memory[name] for name in step.buffers], sizes)


def run_kernel(kernel: ir.Kernel, buffers: Sequence[torch.Tensor], sizes: Sizes) -> None:
    """Run a kernel on tensors, which it writes in place."""
    pairs = zip(kernel.params, buffers, strict=True)
    memory = {param.name: _flat(tensor) for param, tensor in pairs}
    KernelRun(kernel, memory, sizes).body(kernel.body)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory from its first element on, as one dimension."""
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((length,), (1,), tensor.storage_offset())


class KernelRun:
    """One run of a kernel: `memory` maps parameters to flat tensors, which it writes."""

    def __init__(self, kernel: ir.Kernel, memory: dict[str, torch.Tensor], sizes: Sizes) -> None:
        self._memory = memory
        self._sizes = sizes
        self._axes: dict[Axis, Any] = {}
        self._count = 1  # iterations of the loop that is evaluated at once
        self._at_once = False
        self._locals: dict[str, torch.Tensor] = {
            local.name: torch.zeros(self._index(local.extent), dtype=local.dtype)
            for local in kernel.locals
        }
        self._scalars: dict[str, torch.Tensor] = {}

    def body(self, body: ir.Body) -> None:
        """Run statements in order."""
        for stmt in body:
            if isinstance(stmt, ir.Loop):
                self._loop(stmt)
            else:
                self._simple(stmt, {})

    def _loop(self, loop: ir.Loop) -> None:
        count = self._index(loop.axis.extent)
        if loop.limit is not None:
            count = min(count, self._index(loop.limit))
        if not loop.is_innermost or _runs_on(loop.body):
            for position in range(count):
                self._axes[loop.axis] = position
                self.body(loop.body)
        elif count > 0:
            self._axes[loop.axis] = torch.arange(count)
            self._count, self._at_once = count, True
            seen: dict[Expr, torch.Tensor] = {}
            for stmt in loop.body:
                self._simple(stmt, seen)
            self._count, self._at_once = 1, False
        self._axes.pop(loop.axis, None)
        self._scalars.clear()

    def _simple(self, stmt: ir.Stmt, seen: dict[Expr, torch.Tensor]) -> None:
        if isinstance(stmt, ir.Reduce):
            self._reduce(stmt, seen)
            return
        assert isinstance(stmt, ir.Set | ir.Store)
        value = self._value(stmt.value, seen)
        where = self._index(stmt.index)
        if isinstance(stmt, ir.Store):
            target = self._memory[stmt.buffer]
            if stmt.mode == "add":
                place, value = torch.broadcast_tensors(torch.as_tensor(where), value)
                target.index_put_((place,), value, accumulate=True)
            else:
                target[where] = value
        elif self._at_once and not isinstance(where, torch.Tensor):
            self._scalars[stmt.local.name] = value  # one value an iteration
            if value.dim() == 0:
                self._locals[stmt.local.name][where] = value
        else:
            self._locals[stmt.local.name][where] = value

    def _reduce(self, stmt: ir.Reduce, seen: dict[Expr, torch.Tensor]) -> None:
        values = [self._value(value, seen) for value in stmt.values]
        where = self._index(stmt.index)
        targets = [self._locals[target.name] for target in stmt.targets]
        if len(targets) == 2:
            self._arg_reduce(stmt.op, targets, where, values)
            return
        combine = OPS[REDUCTIONS[stmt.op].combine].reference
        value, name = values[0], stmt.targets[0].name
        if name in self._scalars:  # begun in this iteration: nothing is shared between them
            self._scalars[name] = combine(self._scalars[name], value)
            return
        if value.dim() == 0 and self._count > 1:
            value = value.expand(self._count)
        if value.dim() and not isinstance(where, torch.Tensor):
            value = REDUCTIONS[stmt.op].reference(value).to(value.dtype)
        targets[0][where] = combine(targets[0][where], value)

    def _arg_reduce(
        self, op: str, targets: Sequence[torch.Tensor], where: Any, values: list[torch.Tensor]
    ) -> None:
        """Keep the first extreme (value, position); nan counts as the extreme."""
        best, at = targets
        places, *pair = (torch.as_tensor(item).expand(self._count) for item in (where, *values))
        for place, value, position in zip(places.tolist(), *pair, strict=True):
            if _better(op, (value, position), (best[place], at[place])):
                best[place], at[place] = value, position

    def _value(self, root: Expr, seen: dict[Expr, torch.Tensor]) -> torch.Tensor:
        found = seen.get(root)
        if found is None:
            found = self._compute(root, seen)
            if not isinstance(root, Read):
                seen[root] = found
        return found

    def _compute(self, node: Expr, seen: dict[Expr, torch.Tensor]) -> torch.Tensor:
        if isinstance(node, Const):
            return torch.tensor(node.value, dtype=node.dtype)
        if isinstance(node, Index):
            return torch.as_tensor(self._index(node.index)).to(node.dtype)
        if isinstance(node, Load):
            return self._load(node, seen)
        if isinstance(node, Read):
            return self._read(node.local, node.index)
        if isinstance(node, Cast):
            return self._value(node.arg, seen).to(node.dtype)
        assert isinstance(node, Apply)
        args = [self._value(arg, seen) for arg in node.args]
        result = OPS[node.name].reference(*args)
        assert result.dtype is node.dtype, f"{node.name}: {result.dtype} is not {node.dtype}"
        return result

    def _load(self, node: Load, seen: dict[Expr, torch.Tensor]) -> torch.Tensor:
        where = torch.as_tensor(self._index(node.index))
        memory = self._memory[node.buffer]
        if node.mask is None:
            return memory[where]
        mask = self._value(node.mask, seen)
        inside = torch.where(mask, where, torch.zeros_like(where))
        if memory.numel() == 0:
            return torch.zeros(inside.shape, dtype=node.dtype)
        return torch.where(mask, memory[inside], torch.zeros((), dtype=node.dtype))

    def _read(self, local: Local, where: IndexExpr) -> torch.Tensor:
        if local.name in self._scalars:
            return self._scalars[local.name]
        return self._locals[local.name][self._index(where)].clone()

    def _index(self, where: IndexExpr) -> Any:
        return evaluate(where, self._leaf)

    def _leaf(self, atom: Atom) -> Any:
        if isinstance(atom, Axis):
            return self._axes[atom]
        if isinstance(atom, ComputedIndex):
            return self._value(atom.expr, {})
        return self._sizes[atom.key]


def _runs_on(body: ir.Body) -> bool:
    """Whether a body reads what it reduces (a scan): its iterations come one after another."""
    reads = ir.locals_read(*ir.stmt_exprs(*body))
    return any(isinstance(stmt, ir.Reduce) and reads & {*stmt.targets} for stmt in body)


def _better(
    op: str, new: tuple[torch.Tensor, torch.Tensor], old: tuple[torch.Tensor, torch.Tensor]
) -> bool:
    """Whether a (value, position) replaces another: nan comes first, then the lower of equals."""
    (value, position), (best, at) = new, old
    if bool(value.isnan()) or bool(best.isnan()):
        return bool(value.isnan() & (~best.isnan() | (position < at)))
    beyond = value > best if op == "argmax" else value < best
    return bool(beyond | ((value == best) & (position < at)))
