"""Convolutions that weft's own function computes (weft_convolution.h), beside float64 and eager."""

import ctypes
import random

import pytest
import torch
import torch.nn.functional as F
from codegen_check import WIDTHS, of_width, trace
from weft_codegen import tune
from weft_codegen.compile import compile_graph, make_program
from weft_codegen.config import Options
from weft_codegen.kernels.toolchain import isa_flags
from weft_codegen.layout import laid_out
from weft_codegen.loops.program import Extern
from weft_codegen.loops.schedule.convolution import CONVOLUTION

LAST = torch.channels_last
# Batch, channels, rows, columns, filters, window, stride, padding, dilation: images of which
# several are one block, rows shorter and longer than a panel, steps that leave phases out, windows
# that reach over the border, terms of several parts, and windows of one pixel.
SIZES = [
    (2, 3, 17, 19, 5, (3, 3), 1, 1, 1),
    (3, 5, 9, 33, 50, (3, 3), (2, 1), 1, 1),
    (1, 4, 30, 31, 64, (5, 3), 3, (2, 0), (2, 3)),
    (9, 7, 7, 7, 13, (1, 1), 1, 0, 1),
    (2, 6, 8, 9, 5, (1, 1), 1, (1, 2), 1),
    (2, 8, 12, 12, 9, (1, 1), (2, 3), 0, 1),
    (2, 3, 40, 40, 20, (7, 7), 2, 3, 1),
    (1, 2, 28, 28, 6, (5, 5), 1, 0, 1),
    (2, 4, 20, 20, 8, (3, 3), 4, 0, 1),
    (1, 90, 4, 5, 13, (3, 3), 1, 1, 1),
    (4, 6, 1, 40, 5, (1, 3), 1, (0, 3), 1),
    (1, 3, 32, 32, 70, (8, 8), 8, 0, 1),
]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr("weft_codegen.compile.convolution_wins", lambda *_: True)


def own(fn, *args, options=Options()):
    """How many convolutions of `fn` weft's function computes."""
    gm = trace(fn, args)
    steps = make_program(gm if options.keeps_operators else laid_out(gm), args, options).steps
    return sum(isinstance(step, Extern) and step.op is CONVOLUTION for step in steps)


def check(fn, *args, count=1):
    """Compare with float64 in the scale of the sums, and see who computed them."""
    assert own(fn, *args) == count
    got = compile_graph(trace(fn, args), args, inference=True)(*args)[0]
    exact = fn(*(x.double() for x in args))
    bound = fn(*(x.double().abs() for x in args)).abs()
    assert got.shape == exact.shape and got.stride() == fn(*args).stride()
    assert ((got - exact).abs() <= 1e-6 * bound + 1e-30).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_convolutions_match_float64(size):
    batch, channels, rows, columns, filters, window, *geometry = size
    torch.manual_seed(0)
    x, bias = torch.randn(batch, channels, rows, columns), torch.randn(filters)
    weight = torch.randn(filters, channels, *window)
    for w in (weight, weight.to(memory_format=LAST)):
        check(lambda x, w, b: F.conv2d(x, w, b, *geometry), x, w, bias)
        check(lambda x, w: F.conv2d(x, w, None, *geometry), x.to(memory_format=LAST), w)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_a_result(threads):
    torch.manual_seed(0)
    x, w = torch.randn(3, 32, 14, 14), torch.randn(160, 32, 3, 3)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            run = compile_graph(trace(lambda x, w: F.conv2d(x, w), (x, w)), (x, w), inference=True)
            results.append(run(x, w)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_what_the_function_does_not_take(monkeypatch):
    monkeypatch.setattr("weft_codegen.widened.lacks_16_bit", lambda: False)
    x, w = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3)
    assert own(F.conv2d, x, w) == 1
    assert own(lambda x, w: F.conv2d(x, w, groups=2), x, torch.randn(8, 2, 3, 3)) == 0
    assert own(F.conv_transpose2d, x, torch.randn(4, 8, 3, 3)) == 0
    assert own(F.conv2d, x, torch.randn(8, 4, 3, 6)[..., ::2]) == 0
    assert own(F.conv2d, x, w.transpose(2, 3).contiguous().transpose(2, 3)) == 0
    assert own(F.conv2d, x.double(), w.double()) == 0
    assert own(F.conv2d, x.bfloat16(), w.bfloat16()) == 0
    assert own(F.conv1d, x[0], torch.randn(5, 6, 3)) == 0
    for strict in ("strict_numerics", "fallback_by_default"):
        options = Options(**{strict: True})
        assert own(F.conv2d, x.to(memory_format=LAST), w, options=options) == 0


def test_weights_may_change_between_calls():
    x, w, b = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8)
    run = compile_graph(trace(F.conv2d, (x, w, b)), (x, w, b), inference=True)
    for change in (lambda: None, lambda: w.data.mul_(2), lambda: b.numpy().fill(3.0)):
        change()
        torch.testing.assert_close(run(x, w, b)[0], F.conv2d(x, w, b), rtol=1e-4, atol=1e-4)


def test_nan_and_infinity_reach_what_they_reach_in_eager():
    x, w = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3)
    x[0, 0, 4, 4], x[0, 1, 0, 0], x[1, 2, 8, 8] = torch.nan, torch.inf, -torch.inf
    got = compile_graph(trace(F.conv2d, (x, w)), (x, w), inference=True)(x, w)[0]
    torch.testing.assert_close(got, F.conv2d(x, w), equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ["avx2", "avx512f"])
def test_where_it_wins(isa, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(tune, "isa_flags", lambda: frozenset([isa]))
    try:
        torch.set_num_threads(1)
        assert tune.convolution_wins(196, 256, 2304) and tune.convolution_wins(1024, 8, 72)
        assert not tune.convolution_wins(784, 128, 1152)
        torch.set_num_threads(16)
        assert not tune.convolution_wins(196, 256, 2304)
        monkeypatch.setattr(tune, "isa_flags", frozenset)
        assert not tune.convolution_wins(16, 16, 16)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.skipif("avx" not in isa_flags(), reason="the flags are those of x86")
def test_every_width_of_lanes(width, tmp_path):
    weft_convolution = of_width(width, "weft_convolution", tmp_path)
    torch.manual_seed(0)
    for stride, padding, window in ((1, 1, 3), (2, 3, 7), (1, 0, 1), (2, 0, 1)):
        x = torch.randn(3, 20, 11, 15).to(memory_format=LAST)
        w, b = torch.randn(50, 20, window, window), torch.randn(50)
        exact = F.conv2d(x.double(), w.double(), b.double(), stride, padding)
        bound = F.conv2d(x.double().abs(), w.double().abs(), b.double().abs(), stride, padding)
        out = torch.empty(exact.shape).to(memory_format=LAST)
        pairs = [[n, n] for n in (window, stride, padding, 1)]
        numbers = [*x.shape[:2], 50, *x.shape[2:], *out.shape[2:], *sum(pairs, []), window**2]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (out, x, w, b)]
        assert weft_convolution(*pointers, (ctypes.c_int64 * len(numbers))(*numbers)) == 0
        assert ((out - exact).abs() <= 1e-6 * bound).all()


@pytest.mark.parametrize("seed", range(4))
def test_random_geometries(seed):
    """Eight convolutions a graph, of small images, where borders and steps meet."""
    draw = random.Random(seed)
    args, geometries = [], []
    while len(geometries) < 8:
        size, window, stride, padding, spread = (
            [draw.randint(low, high) for _ in range(2)]
            for low, high in ((1, 7), (1, 3), (1, 3), (0, 3), (1, 2))
        )
        sizes = zip(size, window, padding, spread, strict=True)
        if all(n + 2 * p > d * (k - 1) for n, k, p, d in sizes):
            channels = draw.randint(1, 5)
            args.append(torch.randn(draw.randint(1, 3), channels, *size))
            args.append(torch.randn(draw.randint(1, 9), channels, *window))
            geometries.append((None, stride, padding, spread))

    def convolved(*given):
        pairs = zip(given[::2], given[1::2], geometries, strict=True)
        return torch.cat([F.conv2d(x, w, *geometry).flatten() for x, w, geometry in pairs])

    count = own(convolved, *args)
    assert count > 4
    check(convolved, *args, count=count)
