"""Loop kernels written by hand, with what eager PyTorch says they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from weft_codegen.loops.expr import (
    Expr,
    Local,
    apply,
    cast,
    constant,
    index_value,
    load,
    read,
    where,
)
from weft_codegen.loops.index import ONE, ZERO, as_axis, axis, computed, index, size
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.program import Kernel, Loop, Param, Reduce, Set, Stmt, Store

F32 = torch.float32


@dataclass(frozen=True)
class Case:
    """A kernel, its arguments (the written ones empty), and the reference."""

    kernel: Kernel
    inputs: Callable[[], list[torch.Tensor]]
    reference: Callable[..., torch.Tensor]
    sizes: tuple[int, ...] = ()


def _kernel(name: str, params: str, body: Stmt, locals_: tuple[Local, ...] = (), **more) -> Kernel:
    """`params` such as ``"a:f32 out:f32"``; those called out... are written."""
    dtypes = {
        "f32": F32,
        "f16": torch.float16,
        "i64": torch.int64,
        "b8": torch.bool,
        "f64": torch.float64,
    }
    dtypes["i32"] = torch.int32
    formal = [text.split(":") for text in params.split()]
    parameters = tuple(Param(n, dtypes[d], n.startswith("out")) for n, d in formal)
    return Kernel(name, parameters, more.get("sizes", ()), locals_, (body,))


def _scalar(name: str, dtype: torch.dtype = F32) -> Local:
    return Local(name, dtype, ONE)


def pointwise() -> Case:
    i, j = axis("i0", 37), axis("i1", 51)
    a = load("a", i * 51 + j, F32)
    b = cast(load("b", j, torch.float16), F32)
    mask = apply("lt", index_value(j), constant(50, torch.int64))
    value = apply("mul", apply("tanh", a), apply("maximum", b, a))
    store = Store("out", i * 51 + j, where(mask, value, constant(0.0, F32)))
    body = Loop(as_axis(i), (Loop(as_axis(j), (store,), "parallel"),), "parallel")

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        keep = torch.arange(51) < 50
        return torch.where(keep, torch.tanh(a) * torch.maximum(b.float(), a), 0.0)

    return Case(
        _kernel("pointwise", "a:f32 b:f16 out:f32", body),
        lambda: [torch.randn(37, 51), torch.randn(51).half(), torch.empty(37, 51)],
        reference,
    )


def softmax(rows: int, columns: int) -> Case:
    i, j = axis("i0", rows), axis("i1", columns)
    top, total = _scalar("t0"), _scalar("t1")
    row = Local("t2", F32, index(columns))
    a = load("a", i * columns + j, F32)
    e = apply("exp", apply("sub", a, read(top, ZERO)))
    inner = as_axis(j)
    body = (
        Set(top, ZERO, constant(float("-inf"), F32)),
        Loop(inner, (Reduce("max", (top,), ZERO, (a,)),)),
        Set(total, ZERO, constant(0.0, F32)),
        Loop(inner, (Set(row, j, e), Reduce("sum", (total,), ZERO, (read(row, j),)))),
        Loop(
            inner,
            (Store("out", i * columns + j, apply("div", read(row, j), read(total, ZERO))),),
        ),
    )
    nest = Loop(as_axis(i), body, "parallel")
    return Case(
        _kernel("softmax", "a:f32 out:f32", nest, (top, total, row)),
        lambda: [torch.randn(rows, columns), torch.empty(rows, columns)],
        lambda a: torch.softmax(a, -1),
    )


def long_sum() -> Case:
    i, j = axis("i0", 3), axis("i1", 40_000)
    total = _scalar("t0")
    body = (
        Set(total, ZERO, constant(0.0, F32)),
        Loop(as_axis(j), (Reduce("sum", (total,), ZERO, (load("a", i * 40_000 + j, F32),)),)),
        Store("out", i, read(total, ZERO)),
    )
    return Case(
        _kernel("long_sum", "a:f32 out:f32", Loop(as_axis(i), body, "parallel"), (total,)),
        lambda: [torch.randn(3, 40_000), torch.empty(3)],
        lambda a: a.double().sum(-1).float(),
    )


def column_sum() -> Case:
    i0, i1, i2 = axis("i0", 4), axis("i1", 100), axis("i2", 64)
    row = Local("t0", F32, index(64))
    body = (
        Loop(as_axis(i2), (Set(row, i2, constant(0.0, F32)),)),
        Loop(
            as_axis(i1),
            (
                Loop(
                    as_axis(i2),
                    (Reduce("sum", (row,), i2, (load("a", i1 * 256 + i0 * 64 + i2, F32),)),),
                ),
            ),
        ),
        Loop(as_axis(i2), (Store("out", i0 * 64 + i2, read(row, i2)),)),
    )
    return Case(
        _kernel("column_sum", "a:f32 out:f32", Loop(as_axis(i0), body, "parallel"), (row,)),
        lambda: [torch.randn(100, 256), torch.empty(256)],
        lambda a: a.sum(0),
    )


def argmax() -> Case:
    i, j = axis("i0", 5), axis("i1", 33)
    best, where_ = _scalar("t0"), _scalar("t1", torch.int64)
    body = (
        Set(best, ZERO, constant(float("-inf"), F32)),
        Set(where_, ZERO, constant(0, torch.int64)),
        Loop(
            as_axis(j),
            (
                Reduce(
                    "argmax",
                    (best, where_),
                    ZERO,
                    (load("a", i * 33 + j, F32), index_value(j)),
                ),
            ),
        ),
        Store("out", i, read(where_, ZERO)),
    )

    def inputs() -> list[torch.Tensor]:
        a = torch.randint(0, 9, (5, 33)).float()
        a[1, 7] = a[1, 20] = float("nan")
        return [a, torch.empty(5, dtype=torch.int64)]

    nest = Loop(as_axis(i), body, "parallel")
    kernel = _kernel("argmax", "a:f32 out:i64", nest, (best, where_))
    return Case(kernel, inputs, lambda a: a.argmax(-1))


def gather_dynamic() -> Case:
    rows = size("s0")
    i, j = axis("i0", rows), axis("i1", 8)
    where_ = load("idx", i, torch.int64)
    value: Expr = load("table", computed(where_, 20) * 8 + j, F32)
    store = Store("out", i * 8 + j, apply("mul", value, constant(2.0, F32)))
    body = Loop(as_axis(i), (Loop(as_axis(j), (store,)),), "parallel")
    return Case(
        _kernel("gather", "idx:i64 table:f32 out:f32", body, sizes=("s0",)),
        lambda: [torch.randint(0, 20, (11,)), torch.randn(20, 8), torch.empty(11, 8)],
        lambda idx, table: table[idx] * 2,
        (11,),
    )


def random_words() -> Case:
    i = axis("i0", 300)
    seed, place = load("seed", ZERO, torch.int64), index_value(i * 2**22)
    stream, word = (
        constant(7 * 2**33, torch.int64),
        apply("remainder", index_value(i), constant(4, torch.int64)),
    )
    store = Store("out", i, apply("philox", seed, place, stream, word))

    def reference(seed: torch.Tensor) -> torch.Tensor:
        counter = torch.arange(300)
        return OPS["philox"].reference(seed, counter * 2**22, torch.tensor(7 * 2**33), counter % 4)

    return Case(
        _kernel("random_words", "seed:i64 out:i32", Loop(as_axis(i), (store,), "parallel")),
        lambda: [torch.randint(2**63 - 1, (1,)), torch.empty(300, dtype=torch.int32)],
        reference,
    )


def large_places() -> Case:
    """Index arithmetic beyond 32 bits, in values and in what an address is computed from."""
    i, j, rows = axis("i0", 64), axis("i1", 128), size("s0")
    wide, double = i * (1 << 27) + j, torch.float64
    value = apply("mul", cast(index_value(wide), double), constant(2.0**-27, double))
    rest = cast(index_value((i * (1 << 26) + j) % (rows * 1_000_003)), double)
    a = load("a", (wide + 3) // (1 << 27), double)
    rest = apply("add", a, apply("mul", rest, constant(2.0**-20, double)))
    store = Store("out", i * 128 + j, apply("add", value, rest))
    body = Loop(as_axis(i), (Loop(as_axis(j), (store,), "parallel"),), "parallel")

    def reference(a: torch.Tensor) -> torch.Tensor:
        i, j = torch.arange(64)[:, None], torch.arange(128)
        rest = (i * 2**26 + j) % 7_000_021
        return i + j * 2.0**-27 + a[:, None] + rest * 2.0**-20

    kernel = _kernel("large_places", "a:f64 out:f64", body, sizes=("s0",))
    inputs = [torch.randn(64).double(), torch.empty(64, 128).double()]
    return Case(kernel, lambda: inputs, reference, (7,))


CASES = {
    "large_places": large_places(),
    "pointwise": pointwise(),
    "softmax": softmax(7, 100),
    "softmax_full_block": softmax(4, 64),
    "long_sum": long_sum(),
    "column_sum": column_sum(),
    "argmax": argmax(),
    "gather_dynamic": gather_dynamic(),
    "random_words": random_words(),
}
