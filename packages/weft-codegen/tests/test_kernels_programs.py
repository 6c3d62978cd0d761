"""Compiled programs as a caller sees them: values, aliases, errors, sizes, threads, memory."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch
from kernel_programs import F32, ZERO, buffer, loop, pointwise, program, softmax_program
from weft_codegen.kernels import CompiledGraph, compile_program
from weft_codegen.kernels.simd import adds_rows
from weft_codegen.loops.expr import Local, apply, cast, constant, load, read
from weft_codegen.loops.index import ONE, axis, const, size
from weft_codegen.loops.program import (
    Alias,
    BufferRef,
    Extern,
    Input,
    Kernel,
    Launch,
    Param,
    Program,
    Reduce,
    Set,
    Store,
)

aten = torch.ops.aten


@pytest.fixture(scope="module")
def softmax() -> CompiledGraph:
    return compile_program(softmax_program(8, 40))


def test_kernels_and_extern_calls_match_eager(softmax: CompiledGraph) -> None:
    x, w = torch.randn(8, 40), torch.randn(40, 40)
    result, same = softmax(x, w)
    torch.testing.assert_close(result, (x.softmax(-1) @ w).softmax(-1))
    assert same is x


def test_nan_stays_in_its_row(softmax: CompiledGraph) -> None:
    x = torch.randn(8, 40)
    x[3, 17] = float("nan")
    result, _ = softmax(x, torch.randn(40, 40))
    assert result.isnan().all(1).tolist() == [row == 3 for row in range(8)]


def test_other_strides_are_accepted(softmax: CompiledGraph) -> None:
    x, w = torch.randn(40, 8).t(), torch.randn(40, 40)
    torch.testing.assert_close(softmax(x, w)[0], (x.softmax(-1) @ w).softmax(-1))


def test_wrong_arguments_are_named(softmax: CompiledGraph) -> None:
    x, w = torch.randn(8, 40), torch.randn(40, 40)
    with pytest.raises(RuntimeError, match="argument 1 does not have the sizes"):
        softmax(x, w[:, :3])
    with pytest.raises(RuntimeError, match="argument 0 is not a tensor of the dtype and device"):
        softmax(x.double(), w)
    with pytest.raises(TypeError, match="argument 1 is not a plain tensor"):
        softmax(x, 3)
    with pytest.raises(TypeError, match="takes 2 arguments"):
        softmax(x)


def test_gradients_are_not_recorded(softmax: CompiledGraph) -> None:
    x, w = torch.randn(8, 40, requires_grad=True), torch.randn(40, 40, requires_grad=True)
    assert not softmax(x, w)[0].requires_grad
    assert torch.is_grad_enabled()


def test_any_thread_may_call(softmax: CompiledGraph) -> None:
    x, w = torch.randn(8, 40), torch.randn(40, 40)
    expected = softmax(x, w)[0]
    results: list[bool] = []

    def work() -> None:
        results.extend(torch.equal(softmax(x, w)[0], expected) for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 800


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_call() -> None:
    # Kernels only: libtorch's own matrix products may hang in a child, eager or not.
    where = axis("i0", 64)
    kernel = pointwise(apply("exp", load("a0", where, F32)), 64, {"a0": F32})
    steps = [Launch("pointwise", ("x", "y"))]
    graph = compile_program(
        program([buffer("x", 64), buffer("y", 64)], ["x"], steps, ["y"], kernel)
    )
    x = torch.randn(64)
    expected = graph(x)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(graph(x)[0], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_dropped_program_frees_its_constants() -> None:
    where = axis("i0", 8)
    value = apply("add", load("a0", where, F32), load("a1", where, F32))
    kernel = pointwise(value, 8, {"a0": F32, "a1": F32})
    held = torch.arange(8.0)
    base = program([buffer("x", 8), buffer("c", 8), buffer("y", 8)], ["x"], [], ["y"], kernel)
    graph = compile_program(
        Program(
            base.sizes,
            base.inputs,
            {"c": held},
            base.buffers,
            base.kernels,
            (Launch("pointwise", ("x", "c", "y")),),
            base.outputs,
        )  # fmt: skip
    )
    x = torch.randn(8)
    assert torch.equal(graph(x)[0], x + torch.arange(8.0))
    alive = weakref.ref(held)
    del held, base, graph
    gc.collect()
    assert alive() is None


def test_outputs_may_be_views_and_inputs() -> None:
    """y = x * 2; outputs: y, the middle of y as a view, a view of x."""
    where = axis("i0", 12)
    kernel = pointwise(apply("mul", load("a0", where, F32), constant(2.0, F32)), 12, {"a0": F32})
    buffers = [buffer("x", 12), buffer("y", 12), buffer("middle", 2, 3), buffer("tail", 5)]
    steps = [
        Launch("pointwise", ("x", "y")),
        Alias("middle", "y", const(3)),
        Alias("tail", "x", const(7)),
    ]
    graph = compile_program(program(buffers, ["x"], steps, ["y", "middle", "tail"], kernel))
    x = torch.randn(20)[4:16]
    y, middle, tail = graph(x)
    assert torch.equal(y, x * 2)
    assert torch.equal(middle, (x * 2)[3:9].view(2, 3))
    assert middle.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert torch.equal(tail, x[7:])
    assert tail.data_ptr() == x[7:].data_ptr()


def test_an_input_updated_in_place() -> None:
    where = axis("i0", 16)
    kernel = Kernel(
        "increment",
        (Param("a0", F32, True),),
        (),
        (),
        (
            loop(
                where,
                Store("a0", where, apply("add", load("a0", where, F32), constant(1.0, F32))),
                kind="parallel",
            ),
        ),
    )
    made = program(
        [buffer("x", 16)], ["x"], [Launch("increment", ("x",))], ["x"], kernel, mutations=("x",)
    )
    graph = compile_program(made)
    x = torch.zeros(16)
    version = x._version
    (same,) = graph(x)
    assert same is x
    assert torch.equal(x, torch.ones(16))
    assert x._version == version + 1
    with pytest.raises(RuntimeError, match="updated in place"):
        graph(torch.zeros(32)[::2])


@pytest.mark.parametrize("stride", [1, 1024])
def test_rows_are_summed_together_where_their_elements_follow_each_other(stride: int) -> None:
    """Of other rows, gcc 12 makes vectors for minutes."""
    row, column, sums = axis("i0", 256), axis("i1", 4), Local("t0", F32, const(4))
    element = load("a0", row * 4 + column * stride, F32)
    nest = loop(row, loop(column, Reduce("sum", (sums,), column, (element,))))
    assert adds_rows(nest) == (stride == 1)


def test_sizes_may_be_symbols() -> None:
    """One binary for all sizes: column sums of x[s0, s1], and s0 as an output."""
    rows, columns = size("s0"), size("s1")
    i0, i1 = axis("i0", columns), axis("i1", rows)
    total = Local("t0", F32, ONE)
    body = (
        Set(total, ZERO, constant(0.0, F32)),
        loop(i1, Reduce("sum", (total,), ZERO, (load("a0", i1 * columns + i0, F32),))),
        Store("a1", i0, read(total, ZERO)),
    )
    params = (Param("a0", F32, False), Param("a1", F32, True))
    kernel = Kernel("sums", params, ("n", "m"), (total,), (loop(i0, *body, kind="parallel"),))
    kernel = _rename_sizes(kernel)
    buffers = {item.name: item for item in [buffer("x", rows, columns), buffer("y", columns)]}
    made = Program(
        ("s0", "s1"),
        (Input("s0", "size"), Input("x")),
        {},
        buffers,
        {"sums": kernel},
        (Launch("sums", ("x", "y"), (rows, columns)),),
        (BufferRef("y"), rows, None),
    )
    graph = compile_program(made)
    for shape in ((3, 5), (300, 17), (9000, 1)):
        x = torch.randn(shape)
        sums, count, nothing = graph(shape[0], x)
        torch.testing.assert_close(sums, x.sum(0), rtol=1e-5, atol=1e-4)
        assert count == shape[0]
        assert nothing is None


def _rename_sizes(kernel: Kernel) -> Kernel:
    """The test's index expressions name the sizes s0 and s1, so the formals do too."""
    return Kernel(kernel.name, kernel.params, ("s0", "s1"), kernel.locals, kernel.body)


def _extern(op: object, *args: object, results: tuple[str | None, ...], **kwargs: object) -> Extern:
    return Extern(op, args, tuple(kwargs.items()), results)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "args", "reference"),
    [
        (aten.topk.default, (2,), lambda x: x.topk(2)[0]),  # a C function of libtorch
        (aten.roll.default, ([1], [0]), lambda x: x.roll(1, 0)),  # no C function: in Python
        (aten.cumsum.default, (0,), lambda x: x.cumsum(0)),
        (aten.add.Scalar, (1,), lambda x: x + 1),
    ],
)
def test_operators_without_a_lowering(op: object, args: tuple[object, ...], reference) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(6, 4)
    shape = reference(x).shape
    buffers = [buffer("x", 6, 4), buffer("y", *shape)]
    results = ("y", None) if op is aten.topk.default else ("y",)
    made = program(buffers, ["x"], [_extern(op, BufferRef("x"), *args, results=results)], ["y"])
    assert torch.equal(compile_program(made)(x)[0], reference(x))


def test_integer_scalars_do_not_become_floats() -> None:
    long = torch.int64
    buffers = [buffer("x", 3, dtype=long), buffer("y", 3, dtype=long)]
    made = program(
        buffers, ["x"], [_extern(aten.mul.Scalar, BufferRef("x"), 3, results=("y",))], ["y"]
    )
    assert torch.equal(compile_program(made)(torch.arange(3))[0], torch.arange(3) * 3)


@pytest.mark.filterwarnings("ignore")
def test_an_operator_raises_what_eager_raises() -> None:
    long = torch.int64
    buffers = [buffer("w", 5, 4), buffer("i", 3, dtype=long), buffer("y", 3, 4)]
    step = _extern(aten.embedding.default, BufferRef("w"), BufferRef("i"), results=("y",))
    graph = compile_program(program(buffers, ["w", "i"], [step], ["y"]))
    weight = torch.randn(5, 4)
    good = torch.tensor([0, 4, 2])
    assert torch.equal(graph(weight, good)[0], weight[good])
    with pytest.raises(IndexError, match="index out of range"):
        graph(weight, torch.tensor([0, 9, 2]))
    assert torch.equal(graph(weight, good)[0], weight[good])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_like_eager(dtype: torch.dtype) -> None:
    where = axis("i0", 1000)
    value = cast(apply("mul", cast(load("a0", where, dtype), F32), constant(1.1, F32)), dtype)
    made = program(
        [buffer("x", 1000, dtype=dtype), buffer("y", 1000, dtype=dtype)],
        ["x"],
        [Launch("pointwise", ("x", "y"))],
        ["y"],
        pointwise(value, 1000, {"a0": dtype}),
    )
    x = torch.randn(1000).to(dtype)
    x[:4] = torch.tensor([float("inf"), float("nan"), -0.0, 1e-7]).to(dtype)
    (actual,) = compile_program(made)(x)
    expected = (x.float() * torch.tensor(1.1)).to(dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_autocast_does_not_cast_again() -> None:
    buffers = [buffer("x", 1, 2, 8, 8), buffer("w", 3, 2, 3, 3), buffer("y", 1, 3, 6, 6)]
    args = (BufferRef("x"), BufferRef("w"), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    step = _extern(aten.convolution.default, *args, results=("y",))
    graph = compile_program(program(buffers, ["x", "w"], [step], ["y"]))
    x, w = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (actual,) = graph(x, w)
        assert torch.conv2d(x, w).dtype is torch.bfloat16  # it is on again
        with pytest.raises(RuntimeError):
            graph(x, w[:, :1])
        assert torch.conv2d(x, w).dtype is torch.bfloat16
    torch.testing.assert_close(actual, torch.conv2d(x, w))


def test_what_a_graph_calls_outlives_it() -> None:
    graph = compile_program(softmax_program(8, 40))
    x, w = torch.randn(8, 40), torch.eye(40)
    call, expected = graph.__call__, graph(x, w)
    del graph
    gc.collect()
    assert torch.equal(call(x, w)[0], expected[0])


def test_threads_change_no_bit() -> None:
    """Rows are shared between threads, but each row is computed the same way."""
    graph = compile_program(softmax_program(600, 512))
    x, w = torch.randn(600, 512), torch.eye(512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = graph(x, w)[0]
        torch.set_num_threads(2)
        shared = graph(x, w)[0]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, shared)
