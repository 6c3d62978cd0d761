"""Small loop programs written by hand, so that kernels/ is tested without the stages before it."""

from __future__ import annotations

import torch
from weft_codegen.loops.expr import Expr, Local, apply, constant, load, read
from weft_codegen.loops.index import IndexExpr, as_axis, axis, const, index
from weft_codegen.loops.program import (
    Buffer,
    BufferRef,
    Extern,
    Input,
    Kernel,
    Launch,
    Loop,
    Param,
    Program,
    Reduce,
    Set,
    Step,
    Stmt,
    Store,
)

F32 = torch.float32
ZERO = const(0)


def buffer(name: str, *shape: int | IndexExpr, dtype: torch.dtype = F32) -> Buffer:
    """A contiguous buffer."""
    extents = tuple(index(extent) for extent in shape)
    strides: list[IndexExpr] = []
    step = const(1)
    for extent in reversed(extents):
        strides.insert(0, step)
        step = step * extent
    return Buffer(name, dtype, extents, tuple(strides))


def loop(over: IndexExpr, *body: Stmt, kind: str = "serial") -> Loop:
    """`for over in range(its extent)`."""
    return Loop(as_axis(over), body, kind)


def pointwise(
    value: Expr, count: int | IndexExpr, inputs: dict[str, torch.dtype], sizes: tuple[str, ...] = ()
) -> Kernel:
    """out[i0] = value, over one parallel axis i0."""
    where = axis("i0", count)
    params = tuple(Param(name, dtype, False) for name, dtype in inputs.items())
    nest = loop(where, Store("out", where, value), kind="parallel")
    return Kernel("pointwise", (*params, Param("out", value.dtype, True)), sizes, (), (nest,))


def program(
    buffers: list[Buffer],
    inputs: list[str],
    steps: list[Step],
    outputs: list[str],
    *kernels: Kernel,
    sizes: tuple[str, ...] = (),
    mutations: tuple[str, ...] = (),
) -> Program:
    """A program whose inputs and outputs are all tensors."""
    return Program(
        sizes,
        tuple(Input(name) for name in inputs),
        {},
        {item.name: item for item in buffers},
        {kernel.name: kernel for kernel in kernels},
        tuple(steps),
        tuple(BufferRef(name) for name in outputs),
        mutations,
    )


def unary(name: str, dtype: torch.dtype, count: int) -> Program:
    """y = name(x) (or of x0 and x1, for an operation of two operands)."""
    from weft_codegen.loops.ops import OPS  # noqa: PLC0415 (only here)

    where = axis("i0", count)
    names = [f"x{k}" for k in range(OPS[name].arity)]
    value = apply(name, *(load(f"a{k}", where, dtype) for k in range(len(names))))
    kernel = pointwise(value, count, {f"a{k}": dtype for k in range(len(names))})
    buffers = [buffer(item, count, dtype=dtype) for item in names]
    buffers.append(buffer("y", count, dtype=value.dtype))
    return program(buffers, names, [Launch("pointwise", (*names, "y"))], ["y"], kernel)


def softmax_kernel(rows: int, columns: int) -> Kernel:
    """a1 = softmax of each row of a0: the nest in program.py's documentation."""
    i0, i1 = axis("i0", rows), axis("i1", columns)
    top = Local("t0", F32, const(1))
    total = Local("t1", F32, const(1))
    row = Local("t2", F32, const(columns))
    element = load("a0", i0 * columns + i1, F32)
    weight = apply("exp", apply("sub", element, read(top, ZERO)))
    ratio = apply("div", read(row, i1), read(total, ZERO))
    body = (
        Set(top, ZERO, constant(float("-inf"), F32)),
        loop(i1, Reduce("max", (top,), ZERO, (element,))),
        Set(total, ZERO, constant(0.0, F32)),
        loop(i1, Set(row, i1, weight), Reduce("sum", (total,), ZERO, (read(row, i1),))),
        loop(i1, Store("a1", i0 * columns + i1, ratio)),
    )
    params = (Param("a0", F32, False), Param("a1", F32, True))
    return Kernel("softmax", params, (), (top, total, row), (loop(i0, *body, kind="parallel"),))


def softmax_program(rows: int, columns: int) -> Program:
    """softmax(softmax(x) @ w), and x itself."""
    buffers = [buffer(name, rows, columns) for name in ("x", "s", "y", "z")]
    buffers.append(buffer("w", columns, columns))
    product = torch.ops.aten.mm.default
    steps: list[Step] = [
        Launch("softmax", ("x", "s"), (), ("softmax at model.py:3",)),
        Extern(
            product, (BufferRef("s"), BufferRef("w")), (), ("y",), origins=("mm at model.py:4",)
        ),
        Launch("softmax", ("y", "z"), (), ("softmax at model.py:5",)),
    ]
    return program(buffers, ["x", "w"], steps, ["z", "x"], softmax_kernel(rows, columns))
