"""Readable text of expressions, kernels and programs: the `schedule` artifact and kernel keys.

A kernel's text names only its formal parameters, so it is also its identity: two kernels with the
same text are the same kernel.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from weft_codegen.loops import program as ir
from weft_codegen.loops.expr import (
    Const,
    Expr,
    Read,
    dtype_text,
    element_text,
    expr_text,
    index_text,
    walk,
)
from weft_codegen.loops.index import IndexExpr
from weft_codegen.loops.lower.origins import by_line


def body_text(body: ir.Body, indent: str = "    ") -> str:
    """Text of a body, one statement a line."""
    return "\n".join(_body(body, indent, itertools.count()))


def _body(body: ir.Body, indent: str, numbers: Iterator[int]) -> Iterator[str]:
    """The lines of one body; a value used twice is printed once, as `vN = ...`."""
    roots = ir.stmt_exprs(*body)
    uses = Counter([*roots, *(child for node in walk(*roots) for child in node.children)])
    names: dict[Expr, str] = {}
    for stmt in body:
        if isinstance(stmt, ir.Loop):
            limit = "" if stmt.limit is None else f" while < {index_text(stmt.limit)}"
            kind = " parallel" if stmt.kind == "parallel" else ""
            extent = index_text(stmt.axis.extent)
            yield f"{indent}for {stmt.axis.key} in 0..{extent}{limit}{kind}:"
            yield from _body(stmt.body, indent + "    ", numbers)
            continue
        for node in walk(*ir.stmt_exprs(stmt)):
            if uses[node] > 1 and node not in names and not isinstance(node, Const | Read):
                text, names[node] = expr_text(node, names), f"v{next(numbers)}"
                yield f"{indent}{names[node]} = {text}"
        yield indent + _stmt(stmt, names)


def _stmt(stmt: ir.Stmt, names: dict[Expr, str]) -> str:
    if isinstance(stmt, ir.Store):
        sign = "=" if stmt.mode == "set" else "+="
        return f"{stmt.buffer}[{index_text(stmt.index)}] {sign} {expr_text(stmt.value, names)}"
    if isinstance(stmt, ir.Reduce):
        targets = ", ".join(element_text(local, stmt.index) for local in stmt.targets)
        values = ", ".join(expr_text(value, names) for value in stmt.values)
        return f"{targets} {stmt.op}= {values}"
    assert isinstance(stmt, ir.Set)
    return f"{element_text(stmt.local, stmt.index)} = {expr_text(stmt.value, names)}"


def signature_text(kernel: ir.Kernel) -> str:
    """A kernel's parameters and locals on one line."""
    params = [f"{p.name}: {dtype_text(p.dtype)}{'*' if p.written else ''}" for p in kernel.params]
    local = [f"{t.name}: {dtype_text(t.dtype)}[{index_text(t.extent)}]" for t in kernel.locals]
    return f"({', '.join([*params, *kernel.sizes])}) locals ({', '.join(local)})"


def kernel_text(kernel: ir.Kernel) -> str:
    """A kernel as a loop nest."""
    return f"kernel {kernel.name}{signature_text(kernel)}\n{body_text(kernel.body)}"


def buffer_text(buffer: ir.Buffer) -> str:
    """A buffer's dtype, shape and strides."""
    shape = ", ".join(map(index_text, buffer.shape))
    strides = ", ".join(map(index_text, buffer.strides))
    return f"{buffer.name}: {dtype_text(buffer.dtype)}[{shape}] strides ({strides})"


def _value_text(value: Any) -> str:
    if isinstance(value, ir.BufferRef):
        return value.name
    if isinstance(value, IndexExpr):
        return index_text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    return repr(value)


def step_text(step: ir.Step) -> str:
    """One step of a program on one line (its origins after a `#`)."""
    if isinstance(step, ir.Alias):
        return f"{step.name} = view of {step.base} + {index_text(step.offset)}"
    origins = f"  # {'; '.join(by_line(step.origins))}" if step.origins else ""
    if isinstance(step, ir.Launch):
        args = [*step.buffers, *map(index_text, step.sizes)]
        return f"{step.kernel}({', '.join(args)}){origins}"
    if isinstance(step, ir.Compute):
        return f"{_compute_text(step)}{origins}"
    args = [_value_text(a) for a in step.args]
    args += [f"{name}={_value_text(value)}" for name, value in step.kwargs]
    results = ", ".join(name or "_" for name in step.results)
    when = f" if {step.when}" if step.when is not None else ""
    reason = f" ({step.reason})" if step.reason else ""
    return f"{results} = {step.op}({', '.join(args)}){when}{origins}{reason if origins else ''}"


def _compute_text(node: ir.Compute) -> str:
    axes = ", ".join(f"{loop.key} in 0..{index_text(loop.extent)}" for loop in node.axes)
    reduced = ", ".join(f"{k.key} in 0..{index_text(k.extent)}" for k in node.reduced)
    over = f"{node.op} over {reduced} of " if node.op else ""
    if node.scan:
        over = f"{node.scan} so far along {', '.join(loop.key for loop in node.along)} of "
    values = ", ".join(map(expr_text, node.values))
    return f"{node.result}[{index_text(node.index)}] = {over}{values}  for {axes or '()'}"


def program_text(program: ir.Program) -> str:
    """The whole program: buffers, kernels once each, then the steps."""
    lines = [f"program({', '.join(item.name for item in program.inputs)})"]
    lines += [f"  {buffer_text(buffer)}" for buffer in program.buffers.values()]
    lines += [kernel_text(kernel) for kernel in program.kernels.values()]
    lines += [f"  {step_text(step)}" for step in program.steps]
    lines.append(f"  return {', '.join(map(_value_text, program.outputs))}")
    return "\n".join(lines)
