"""Indirect reads and writes as loops: values, and eager's exceptions for bad indices."""

import math

import pytest
import torch
import torch.nn.functional as F
from codegen_check import check, launches, program_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from weft_codegen.compile import decompositions, make_program
from weft_codegen.kernels import compile_program
from weft_codegen.loops.index import ComputedIndex, atoms, const
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.lower.lowering import NoLowering
from weft_codegen.loops.program import Extern, Loop, Store, statements

torch.manual_seed(0)
W = torch.randn(10, 16)
I = torch.randint(0, 10, (4, 5))  # noqa: E741
V = torch.randn(4, 5, 16)


def _calls(program):
    """The operators that run whenever the program does (checks only speak up when they must)."""
    return [str(s.op) for s in program.steps if isinstance(s, Extern) and s.when is None]


READS = [
    lambda w, i: F.embedding(i, w) * 2,
    lambda w, i: (w[i], w[i, i + 3], w[:, i], w[-1 - i], w[i, :, None], w[i][:, 1:].sum(0)),
    lambda w, i: (w.gather(0, i), w.gather(1, i), w.index_select(1, i[0])),
    lambda w, i: torch.cat([w[i[0]], w * 2, w[i[1]]], 0),
    lambda w, i: (w.exp() * w.sum(0))[i],
    lambda w, i: w.to(torch.bfloat16)[i.int()] + 1,
]


@pytest.mark.parametrize("fn", READS)
def test_reads(fn):
    assert _calls(check(fn, W, I, native=True)) == []


WRITES = [
    lambda w, i, v: w.index_put((i,), v, accumulate=True),
    lambda w, i, v: w.index_put((i, i), v[..., 0], accumulate=True) + 1,
    lambda w, i, v: (w.scatter_add(0, i, v[:, :, 0]), w.scatter(1, i, v[:, :, 1])),
    lambda w, i, v: (w.scatter(0, i, 2.0), w.index_add(0, i[0], v[0], alpha=2)),
    lambda w, i, v: w.index_copy(0, torch.arange(5), v[0]),
    lambda w, i, v: (w.index_fill(1, -1 - i[0].clamp(max=2), 2.0), w.index_fill(0, i[0], v.sum())),
    lambda w, i, v: torch.ops.aten.embedding_dense_backward(v, i, 10, 3, False),
    lambda w, i, v: w.to(torch.bfloat16).index_put((i,), v.to(torch.bfloat16), accumulate=True),
    lambda w, i, v: w.clone().index_put_((i[0],), v[0].relu(), accumulate=True).sum(0),
]


@pytest.mark.parametrize("fn", WRITES)
def test_writes(fn):
    assert _calls(check(fn, W, I, V, native=True, atol=1e-2, rtol=1e-2)) == []


def test_repeated_places_take_the_last_value():
    index = torch.tensor([1, 3, 1, 1, 3])
    check(lambda w, i, v: w.index_put((i,), v), W, index, V[0], native=True)


def test_cross_entropy_is_two_kernels_without_a_library_call():
    x, t = torch.randn(8, 16), torch.randint(0, 16, (8,))
    t[2] = -100
    program = check(F.cross_entropy, x, t, native=True)
    assert _calls(program) == [] and launches(program) == 2


ONE_HOTS = [
    lambda w, i, v: w.scatter(1, i, 2.0) * v.sum(),
    lambda w, i, v: (w.scatter(1, i, v), w.scatter_add(1, i, v) + 1),
    lambda w, i, v: (torch.zeros_like(w).scatter(1, i, v) * w[:, :1].exp()).sum(1),
    lambda w, i, v: torch.zeros_like(w).bfloat16().scatter(1, i, 1.0).sum(1, keepdim=True) - w,
    lambda w, i, v: torch.zeros_like(w).scatter(1, i, v).sum(0),
    lambda w, i, v: (torch.zeros_like(w).scatter(1, i, v) * w).sum(1),
    lambda w, i, v: w.t().scatter(0, i.t(), 3.0),
]


@pytest.mark.parametrize("fn", ONE_HOTS)
def test_one_place_a_row_is_a_comparison(fn):
    program = check(fn, W, I.flatten()[:10, None], V[..., 0].reshape(-1)[:10, None], native=True)
    stores = [s for kernel in program.kernels.values() for s in statements(kernel.body)]
    assert _calls(program) == []
    assert not any(_indirect(s) for s in stores if isinstance(s, Store))


def _indirect(store):
    return any(isinstance(atom, ComputedIndex) for atom in atoms(store.index))


@pytest.mark.parametrize("scale", [1.0, math.nan])
def test_cross_entropy_backward_is_one_sweep(scale):
    x, t = torch.randn(8, 16), torch.randint(0, 16, (8,))
    t[2] = -100

    def backward(g, x, t):
        made = x.log_softmax(-1)
        total = torch.tensor(7.0)
        aten = torch.ops.aten
        grad = aten.nll_loss_backward(g, made, t, None, 1, -100, total)
        return aten._log_softmax_backward_data(grad, made, -1, torch.float32)

    program = check(backward, torch.tensor(scale), x, t, native=True)
    assert _calls(program) == []


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 2, 3), (4,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_reaches_no_gradient_beside_its_target(reduction, shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    target = torch.randint(0, 4, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    if target.dim():
        target.view(-1)[-1] = -100
    weight = torch.tensor([1.0, 0.5, torch.nan, 2.0]).to(dtype)
    kind = {"none": 0, "mean": 1, "sum": 2}[reduction]
    name = "nll_loss2d_backward" if len(shape) == 4 else "nll_loss_backward"
    rule = getattr(torch.ops.aten, name)
    grad = torch.randn(target.shape if kind == 0 else ()).to(dtype)
    total = torch.tensor(7.0).to(dtype)
    for factors in (None, weight):
        for scale in (1.0, torch.nan):
            args = [grad * scale, x, target, factors, kind, -100, total]
            found = make_fx(rule, decomposition_table=decompositions())(*args)(*args)
            torch.testing.assert_close(found, rule(*args), equal_nan=True)


def test_known_positions_need_no_check():
    program = check(lambda w: F.embedding(torch.arange(4), w) + 1, W, native=True)
    assert not any(isinstance(step, Extern) for step in program.steps)


BAD = [
    (lambda w, i: w[i], I[:1] + 40, IndexError),
    (lambda w, i: F.embedding(i, w), I - 20, IndexError),
    (lambda w, i: w.gather(0, i), I[:1, :1] - 17, RuntimeError),
    (lambda w, i: w.index_select(0, i[0]), I + 10, IndexError),
    (lambda w, i: w.scatter_add(0, i, w), I[:1, :1] + 18, RuntimeError),
    (lambda w, i: w.index_put((i,), w[0], accumulate=True), I[:1, :1] + 18, IndexError),
    (lambda w, i: (w[i], w * 2)[1], I[:1] + 40, IndexError),  # the result is not used
    (lambda w, i: (i // (i - i), w * 2)[1], I, RuntimeError),
    (lambda w, i: i % (i - i), I, RuntimeError),
    (lambda w, i: torch.fmod(i, i - i), I, RuntimeError),
    (lambda w, i: F.binary_cross_entropy(w * 9, w), I, RuntimeError),
]


@pytest.mark.parametrize(("fn", "index", "kind"), BAD)
def test_bad_indices_raise_eagers_exception(fn, index, kind):
    program = program_of(fn, W, index)
    with pytest.raises(kind) as eager:
        fn(W, index)
    first = str(eager.value).splitlines()[0]
    compiled = compile_program(program)
    for run in (lambda: run_program(program, [W, index]), lambda: compiled(W, index)):
        with pytest.raises(kind) as ours:
            run()
        # Of several bad indices eager may name another one.
        assert index.numel() > 1 or str(ours.value) == first


# gcc 12 reads the elements -1 and 0 for truth values that are places.
TRUTH_AS_PLACES = {
    "cast": lambda t, m, x: t[m.long()],
    "cast to int32": lambda t, m, x: t[m.int()],
    "through int8": lambda t, m, x: t[m.to(torch.int8).long()],
    "through floats": lambda t, m, x: t[m.float().long()],
    "compared": lambda t, m, x: t[(x > 0).long()],
    "joined": lambda t, m, x: t[(~m & (x > 0)).long()],
    "one more": lambda t, m, x: t[m.long() + 1],
    "chosen": lambda t, m, x: t[torch.where(m, 2, 1)],
    "gather": lambda t, m, x: t.gather(0, m.long()),
    "rows": lambda t, m, x: t[m.view(10, 10).long()].sum(1),
    "one column": lambda t, m, x: t[m.view(100, 1).long()],
    "scatter": lambda t, m, x: t.index_add(0, m.long(), x),
}


@pytest.mark.cc
@pytest.mark.parametrize("name", TRUTH_AS_PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_truth_values_as_places(name, dtype):
    torch.manual_seed(0)
    table, x = torch.arange(1, 8).to(dtype), torch.randn(100)
    check(TRUTH_AS_PLACES[name], table, torch.randn(100) > 0, x.to(dtype))


@pytest.mark.parametrize("read_before", [False, True])
def test_an_input_that_the_result_replaces_is_written_where_it_is(read_before):
    """A key-value cache; what reads the old values needs a copy."""

    def step(cache, keys, index):
        old = cache.amax(0) if read_before else keys.sum(0)
        new = torch.ops.aten.index_copy(cache, 1, index, keys * 2)
        total = new.sum(0)
        cache.copy_(new)
        return [old, total]

    inputs = torch.randn(3, 90, 4), torch.randn(3, 2, 4), torch.tensor([7, 5])
    expected, made = inputs[0].clone(), inputs[0].clone()
    graph = make_fx(step, decomposition_table=decompositions())(*inputs)
    program = make_program(graph, inputs)
    large = [name for name, buffer in program.buffers.items() if buffer.shape[1:2] == (const(90),)]
    assert (large == ["in0"]) is not read_before
    assert_close(compile_program(program)(made, *inputs[1:]), step(expected, *inputs[1:]))
    assert_close(made, expected)
    with pytest.raises(IndexError, match="out of bounds for dimension 1 with size 90"):
        compile_program(program)(made, inputs[1], torch.tensor([0, 90]))
    assert_close(made, expected)


def test_sums_of_what_is_zero_but_at_one_place_have_no_loop():
    """The place may be none of the sum's."""

    def sums(g, i):
        hot = torch.where(torch.arange(50)[None] == i[:, None], -1.0, 0.0)
        return (hot * g[:, None]).sum(1), (hot.bfloat16().float() * g[:, None]).bfloat16().sum(1)

    program = check(sums, torch.randn(7), torch.tensor([0, 1, 49, 50, -1, -100, 3]), native=True)
    (kernel,) = program.kernels.values()
    assert sum(isinstance(statement, Loop) for statement in statements(kernel.body)) == 1


@pytest.mark.every(3)
@pytest.mark.cc
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("count", [1, 8, 69])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_bucketize_counts_the_boundaries_below(dtype, count, right):
    boundaries = torch.arange(count).to(dtype)
    x = torch.arange(-2, 2 * count + 2).to(dtype)
    if dtype.is_floating_point:
        x = torch.cat([x, x / 2, torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)])
    for out_int32 in (False, True):
        find = torch.bucketize
        program = check(
            lambda x, b: find(x + 0, b, right=right, out_int32=out_int32),  # noqa: B023
            x,
            boundaries,
            native=True,
        )
        assert _calls(program) == []


@pytest.mark.parametrize("x", [torch.rand(3, 4).t(), torch.rand(4, 6)[:, ::2], torch.rand(())])
@pytest.mark.filterwarnings("ignore:.*non-contiguous")
def test_the_result_of_bucketize_is_contiguous(x):
    boundaries = torch.tensor([0.2, 0.5, 0.7])
    assert _calls(check(lambda x, b: torch.bucketize(x, b), x, boundaries)) == []


def test_bucketize_of_many_boundaries_is_a_call():
    program = check(torch.bucketize, torch.randn(4), torch.arange(2000.0), native=True)
    assert _calls(program) == ["aten.bucketize.Tensor"]


def _framed(w):
    return F.pad(w[None], (3, 3), "reflect").squeeze(0).as_strided((10, 6, 4), (22, 2, 1))


def _whole(w):
    sums = w.cumsum(0)
    return sums.unsqueeze(0).as_strided((3, 3), (40, 2)) + 1, sums


FRAMES = {
    "padded": _framed,
    "computed": lambda w: (w * 2).view(2, 5, 16).as_strided((4, 8), (5, 2), 7),
    "transposed": lambda w: (w * 2).t().contiguous().as_strided((4, 8), (5, 2)) + 1,
    "of the whole of a buffer": _whole,
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_memory(name):
    assert "as_strided" not in str(_calls(check(FRAMES[name], W, native=True)))


def test_frames_of_a_part_of_memory_are_left_to_torch():
    with pytest.raises(NoLowering, match="outside its argument"):
        program_of(lambda w: (w * 2)[2:5].as_strided((4,), (1,)), W)


def test_short_time_fourier_transform():
    def spectrum(w):
        return torch.stft(w, 8, 2, window=torch.hann_window(8), return_complex=True).abs()

    assert "as_strided" not in str(_calls(check(spectrum, W, native=True, atol=1e-5, rtol=1e-5)))
