"""The rules of program.py as checks; tests run this after every stage.

`verify_program` raises InvalidProgram with the first rule that does not hold and where.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass
class _Scope:
    """What is visible at a statement."""

    kernel: ir.Kernel
    axes: frozenset[Axis] = frozenset()
    set_locals: set[Local] = field(default_factory=set)
    serial: bool = False


def verify_kernel(kernel: ir.Kernel) -> None:
    """Check one kernel's loops, locals, parameters and types."""
    _verify_body(kernel.body, _Scope(kernel))


def _verify_body(body: tuple[ir.Stmt, ...], scope: _Scope) -> None:
    stored: dict[str, ir.Store] = {}
    for stmt in body:
        if isinstance(stmt, ir.Loop):
            _verify_loop(stmt, scope)
            continue
        for value in ir.stmt_exprs(stmt):
            _verify_expr(value, scope, stored)
        _verify_index(stmt.index, scope)
        if isinstance(stmt, ir.Store):
            params = {param.name: param for param in scope.kernel.params}
            location = scope.kernel.name
            _check(stmt.buffer in params, f"store to unknown {stmt.buffer}", location)
            _check(params[stmt.buffer].written, f"{stmt.buffer} is not marked written", location)
            same = params[stmt.buffer].dtype is stmt.value.dtype
            _check(same, f"store of {stmt.value.dtype} to {stmt.buffer}", location)
            stored[stmt.buffer] = stmt
        else:
            _verify_local(stmt, scope)


def _verify_loop(loop: ir.Loop, scope: _Scope) -> None:
    location = scope.kernel.name
    _check(loop.axis not in scope.axes, f"axis {loop.axis.key} is bound twice", location)
    if loop.kind == "parallel":
        _check(not scope.serial, f"parallel loop {loop.axis.key} inside a serial one", location)
    inner = _Scope(
        scope.kernel,
        scope.axes | {loop.axis},
        scope.set_locals,
        scope.serial or loop.kind != "parallel",
    )
    if loop.limit is not None:
        _verify_index(loop.limit, scope)
    _verify_body(loop.body, inner)


def _verify_local(stmt: ir.Set | ir.Reduce, scope: _Scope) -> None:
    location = scope.kernel.name
    targets = (stmt.local,) if isinstance(stmt, ir.Set) else stmt.targets
    values = ir.stmt_exprs(stmt)
    _check(len(targets) == len(values), "one value a local", location)
    for local, value in zip(targets, values, strict=True):
        _check(local in scope.kernel.locals, f"undeclared local {local.name}", location)
        _check(local.dtype is value.dtype, f"{local.name} takes {local.dtype}", location)
        if isinstance(stmt, ir.Set):
            scope.set_locals.add(local)
        else:
            _check(local in scope.set_locals, f"{local.name} reduced before set", location)
    if isinstance(stmt, ir.Reduce):
        _check(REDUCTIONS[stmt.op].states == len(targets), f"states of {stmt.op}", location)


def _verify_expr(root: Expr, scope: _Scope, stored: dict[str, ir.Store]) -> None:
    location = scope.kernel.name
    params = {param.name: param.dtype for param in scope.kernel.params}
    for node in walk(root):
        for where in node.indices:
            _verify_index(where, scope)
        if isinstance(node, Apply):
            dtype = OPS[node.name].dtype(*(arg.dtype for arg in node.args))
            _verify_dtype(node, dtype, location)
        elif isinstance(node, Load):
            _verify_dtype(node, params.get(node.buffer), location)
            store = stored.get(node.buffer)
            _check(store is None, f"{node.buffer} is loaded after a store in one body", location)
        elif isinstance(node, Read):
            _check(node.local in scope.set_locals, f"{node.local.name} read before set", location)
        else:
            _check(isinstance(node, Const | Cast) or bool(node.indices), "unknown node", location)


def _verify_dtype(node: Expr, dtype: torch.dtype | None, location: str) -> None:
    # The text repeats all that an expression shares, so it is made only where it is needed.
    if dtype is not node.dtype:
        raise InvalidProgram(f"{location}: dtype of {expr_text(node)}")


def _verify_index(where: IndexExpr, scope: _Scope) -> None:
    for atom in atoms(where):
        if isinstance(atom, Axis):
            _check(atom in scope.axes, f"axis {atom.key} is not bound", scope.kernel.name)
        elif isinstance(atom, Size):
            known = atom.key in scope.kernel.sizes
            _check(known, f"size {atom.key} is no parameter", scope.kernel.name)
