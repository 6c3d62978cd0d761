"""The rules of program.py as checks; tests run this after every stage.

`verify_program` raises InvalidProgram with the first rule that does not hold and where.
"""

from __future__ import annotations

import torch

from weft_codegen.loops import program as ir
from weft_codegen.loops.expr import Apply, Cast, Const, Expr, Load, Local, Read, expr_text, walk
from weft_codegen.loops.index import Axis, IndexExpr, Size, atoms
from weft_codegen.loops.ops import OPS, REDUCTIONS


class InvalidProgram(AssertionError):
    """A loop program breaks a rule of loops/program.py."""


def _check(condition: bool, rule: str, location: str) -> None:
    if not condition:
        raise InvalidProgram(f"{location}: {rule}")


def verify_program(program: ir.Program) -> None:
    """Check every kernel, and that each step uses buffers that exist by then."""
    for kernel in program.kernels.values():
        verify_kernel(kernel)
    known = {item.name for item in program.inputs} | set(program.constants)
    for position, step in enumerate(program.steps):
        location = f"step {position}"
        writes = ir.step_writes(step, program.kernels)
        for name in ir.step_reads(step, program.kernels):
            # A kernel may reload what it has stored itself.
            made = name in known or (isinstance(step, ir.Launch) and name in writes)
            _check(made, f"reads {name} before it is made", location)
        known.update(writes)
        if isinstance(step, ir.Launch):
            _verify_launch(step, program, location)
        for name in writes:
            _check(name in program.buffers, f"writes unknown buffer {name}", location)
        if isinstance(step, ir.Alias):
            same = program.buffers[step.name].dtype is program.buffers[step.base].dtype
            _check(same, "a view keeps its dtype", location)
        if isinstance(step, ir.Extern):
            declared = not step.op._schema.is_mutable or bool(step.mutates)
            _check(declared, "hidden mutation", location)
    for output in program.outputs:
        if isinstance(output, ir.BufferRef):
            _check(output.name in known, f"output {output.name} is never made", "outputs")


def _verify_launch(step: ir.Launch, program: ir.Program, location: str) -> None:
    kernel = program.kernels[step.kernel]
    _check(len(step.buffers) == len(kernel.params), "one buffer a parameter", location)
    _check(len(set(step.buffers)) == len(step.buffers), "buffers of a launch differ", location)
    _check(len(step.sizes) == len(kernel.sizes), "one size a size parameter", location)
    for name, param in zip(step.buffers, kernel.params, strict=True):
        buffer = program.buffers.get(name)
        _check(buffer is not None, f"unknown buffer {name}", location)
        if buffer is not None:
            _check(buffer.dtype is param.dtype, f"{name} is not {param.dtype}", location)


def verify_kernel(kernel: ir.Kernel) -> None:
    """Check one kernel's loops, locals, parameters and types."""
    _KernelCheck(kernel).body(kernel.body, frozenset(), serial=False)


class _KernelCheck:
    """Checks the statements of one kernel."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self._kernel = kernel
        self._params = {param.name: param for param in kernel.params}
        self._set: set[Local] = set()  # locals that have a value by now

    def _check(self, condition: bool, rule: str) -> None:
        _check(condition, rule, self._kernel.name)

    def body(self, body: ir.Body, axes: frozenset[Axis], *, serial: bool) -> None:
        """Check statements in loops over `axes`; `serial`: one of those is."""
        stored: set[str] = set()
        for stmt in body:
            if isinstance(stmt, ir.Loop):
                self._check(stmt.axis not in axes, f"axis {stmt.axis.key} is bound twice")
                parallel = stmt.kind == "parallel"
                rule = f"parallel loop {stmt.axis.key} inside a serial one"
                self._check(not (parallel and serial), rule)
                if stmt.limit is not None:
                    self._index(stmt.limit, axes)
                self.body(stmt.body, axes | {stmt.axis}, serial=serial or not parallel)
                continue
            for value in ir.stmt_exprs(stmt):
                self._expr(value, axes, stored)
            self._index(stmt.index, axes)
            if isinstance(stmt, ir.Store):
                self._check(stmt.buffer in self._params, f"store to unknown {stmt.buffer}")
                param, dtype = self._params[stmt.buffer], stmt.value.dtype
                self._check(param.written, f"{stmt.buffer} is not marked written")
                self._check(param.dtype is dtype, f"store of {dtype} to {stmt.buffer}")
                stored.add(stmt.buffer)
            else:
                self._local(stmt)

    def _local(self, stmt: ir.Set | ir.Reduce) -> None:
        targets = (stmt.local,) if isinstance(stmt, ir.Set) else stmt.targets
        values = ir.stmt_exprs(stmt)
        self._check(len(targets) == len(values), "one value a local")
        for local, value in zip(targets, values, strict=True):
            self._check(local in self._kernel.locals, f"undeclared local {local.name}")
            self._check(local.dtype is value.dtype, f"{local.name} takes {local.dtype}")
            if isinstance(stmt, ir.Set):
                self._set.add(local)
            self._check(local in self._set, f"{local.name} reduced before set")
        if isinstance(stmt, ir.Reduce):
            self._check(REDUCTIONS[stmt.op].states == len(targets), f"states of {stmt.op}")

    def _expr(self, root: Expr, axes: frozenset[Axis], stored: set[str]) -> None:
        for node in walk(root):
            for where in node.indices:
                self._index(where, axes)
            dtype: torch.dtype | None = node.dtype
            if isinstance(node, Apply):
                dtype = OPS[node.name].dtype(*(arg.dtype for arg in node.args))
            elif isinstance(node, Load):
                param = self._params.get(node.buffer)
                dtype = None if param is None else param.dtype
                rule = f"{node.buffer} is loaded after a store in one body"
                self._check(node.buffer not in stored, rule)
            elif isinstance(node, Read):
                self._check(node.local in self._set, f"{node.local.name} read before set")
            else:
                self._check(isinstance(node, Const | Cast) or bool(node.indices), "unknown node")
            if dtype is not node.dtype:  # the text repeats what an expression shares
                self._check(False, f"dtype of {expr_text(node)}")

    def _index(self, where: IndexExpr, axes: frozenset[Axis]) -> None:
        for atom in atoms(where):
            if isinstance(atom, Axis):
                self._check(atom in axes, f"axis {atom.key} is not bound")
            elif isinstance(atom, Size):
                self._check(atom.key in self._kernel.sizes, f"size {atom.key} is no parameter")
