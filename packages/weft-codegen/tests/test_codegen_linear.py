"""Products that weft's own function computes (weft_linear.h), beside float64 and eager."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from codegen_check import WIDTHS, dynamic_trace, of_width, trace
from weft_codegen import tune
from weft_codegen.compile import compile_graph, make_program
from weft_codegen.config import Options, settings
from weft_codegen.kernels.plan import MemoryPlan
from weft_codegen.kernels.toolchain import isa_flags
from weft_codegen.loops.program import Extern
from weft_codegen.loops.schedule.linear import LINEAR

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EVERYWHERE = "weft_codegen.compile.linear_wins"
# Rows: fewer than a panel, panels with a rest, two blocks. Terms: fewer than one part, several.
# Columns: no whole strip, and a rest of one. 1024 terms: rows that share their cache lines.
# The last panel is filled to a quarter, a half, three quarters, wholly.
SIZES = [(5, 390, 64), (8, 400, 97), (17, 33, 200), (40, 1024, 100), (257, 130, 49), (600, 384, 96)]
SIZES += [(14, 70, 48), (55, 33, 50), (64, 100, 60)]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(EVERYWHERE, lambda *_: True)


def own(fn, *args, options=Options()):
    """How many products of `fn` weft's function computes."""
    steps = make_program(trace(fn, args), args, options).steps
    return sum(isinstance(step, Extern) and step.op in LINEAR for step in steps)


def check(fn, *args, count=1):
    """Compare with float64 in the scale of the sums, and see who computed them."""
    assert own(fn, *args) == count
    run = compile_graph(trace(fn, args), args, inference=True)
    exact = fn(*(x.double() for x in args))
    bound = fn(*(x.double().abs() for x in args)).abs()
    got = run(*args)[0]
    assert got.shape == exact.shape and got.stride() == exact.stride()
    assert ((got - exact).abs() <= 1e-6 * bound + 1e-30).all()


@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_layers_match_float64(rows, depth, columns):
    torch.manual_seed(0)
    x, w, b = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    check(F.linear, x, w, b)
    check(F.linear, x, w)
    check(lambda x, w, r: r + x @ w.t(), x, w, torch.randn(rows, columns))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_layers_round_once(dtype):
    torch.manual_seed(0)
    unit = torch.finfo(dtype).eps
    for rows, depth, columns in SIZES:
        x, w, b = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
        x, w, b, r = (t.to(dtype) for t in (x, w, b, torch.randn(rows, columns)))
        layers = [(F.linear, x, w, b), (F.linear, x, w)]
        layers.append((lambda r, x, w: torch.addmm(r, x, w.t()), r, x, w))
        layers.append((F.linear, x.t().contiguous().t(), w[:, :depth]))
        for count, (fn, *args) in zip((1, 1, 1, 0), layers, strict=True):
            assert own(fn, *args) == count
            got = compile_graph(trace(fn, args), args, inference=True)(*args)[0]
            exact = fn(*(t.double() for t in args))
            bound = fn(*(t.double().abs() for t in args))
            assert got.dtype is dtype
            assert (
                (got - exact).abs() <= 0.5 * unit * exact.abs() + 1e-6 * bound
            ).all() or not count


def test_16_bit_nan_infinity_and_overflow():
    x, w = torch.randn(20, 130).half(), torch.randn(100, 130).half()
    x[3, 5], x[18, 0], w[99, 129], x[7] = torch.nan, torch.inf, -torch.inf, 60000
    for dtype in (torch.float16, torch.bfloat16):
        args = (x.to(dtype), w.to(dtype))
        got = compile_graph(trace(F.linear, args), args)(*args)[0]
        want = F.linear(*(t.float() for t in args)).to(dtype)
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_result(threads):
    torch.manual_seed(0)
    x, w, b = torch.randn(70, 500), torch.randn(700, 500), torch.randn(700)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            results.append(compile_graph(trace(F.linear, (x, w, b)), (x, w, b))(x, w, b)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_views_of_larger_matrices():
    torch.manual_seed(0)
    wide, weights = torch.randn(30, 300), torch.randn(150, 600)
    rest, bias = torch.randn(30, 500), torch.randn(300)
    check(F.linear, wide[:, 7:207], weights[20:120, 3:203], bias[50:150])
    check(lambda x, w, r: r + x @ w.t(), wide[::2, :200], weights[::2, 50:250], rest[:15, 9:84])
    check(F.linear, wide[:1].expand(6, 300), weights[:, :300])


def test_a_sum_that_dies_is_written_over():
    torch.manual_seed(0)
    x, w, r = torch.randn(64, 256), torch.randn(300, 256), torch.randn(64, 300)

    def layer(x, w, r):
        return torch.addmm(r.sin(), x, w.t()).cos()

    assert own(layer, x, w, r) == 1
    assert MemoryPlan(make_program(trace(layer, (x, w, r)), (x, w, r))).over
    run = compile_graph(trace(layer, (x, w, r)), (x, w, r))
    torch.testing.assert_close(run(x, w, r)[0], layer(x, w, r), **CLOSE)


def test_what_the_function_does_not_take():
    torch.manual_seed(0)
    x, w = torch.randn(32, 200), torch.randn(100, 200)
    turned, rows = torch.randn(200, 100), torch.randn(200, 32)
    assert own(torch.mm, x, turned) == 0
    assert own(lambda x, w: x.t() @ w.t(), rows, w) == 0
    assert own(F.linear, x.double(), w.double()) == 0
    assert own(torch.mm, x.bfloat16(), turned.bfloat16()) == 0
    assert own(lambda x, w, b: torch.addmm(b, x, w.t()), x, w, torch.randn(1, 100)) == 0
    assert own(lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), x, w, torch.randn(100)) == 0
    for strict in ("strict_numerics", "fallback_by_default"):
        assert own(F.linear, x, w, options=Options(**{strict: True})) == 0


def test_nan_and_infinity_reach_what_they_reach_in_eager():
    torch.manual_seed(0)
    x, w = torch.randn(20, 130), torch.randn(100, 130)
    x[3, 5], x[18, 0], w[99, 129], w[50, 1] = torch.nan, torch.inf, -torch.inf, 0.0
    got = compile_graph(trace(F.linear, (x, w)), (x, w))(x, w)[0]
    torch.testing.assert_close(got, F.linear(x, w), equal_nan=True, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("interpret", [False, True])
def test_rows_that_are_only_known_while_running(interpret):
    torch.manual_seed(0)
    w, b = torch.randn(120, 200), torch.randn(120)
    gm, fakes = dynamic_trace(lambda x: F.linear(x, w, b), (torch.randn(9, 200),))
    gm, fakes = dynamic_trace(F.linear, (torch.randn(9, 200), w, b)) if interpret else (gm, fakes)
    with settings.patch(interpret=interpret):
        run = compile_graph(gm, fakes, inference=True)
    for rows in (9, 0, 1, 300):
        x = torch.randn(rows, 200)
        args = (x, w, b) if interpret else (x,)
        torch.testing.assert_close(run(*args)[0], F.linear(x, w, b), **CLOSE)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("isa", [["avx2"], ["avx2", "avx512f"]])
def test_where_it_wins(isa, monkeypatch, one_thread):
    monkeypatch.setattr(tune, "isa_flags", lambda: frozenset(isa))
    assert tune.linear_wins(128, 768, 768) and tune.linear_wins(None, 768, 768)
    assert tune.linear_wins(128, 768, 768, packed=True)
    assert not tune.linear_wins(1, 768, 768) and not tune.linear_wins(4096, 768, 32)
    assert tune.linear_wins(4096, 768, 768) == ("avx512f" in isa)
    assert tune.linear_wins(8, 768, 768, packed=True) == ("avx512f" not in isa)
    assert tune.linear_wins(4096, 768, 768, torch.bfloat16) == ("avx512f" not in isa)
    torch.set_num_threads(16)
    assert not tune.linear_wins(128, 768, 768)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    assert not tune.linear_wins(128, 768, 768)


def test_it_wins_nowhere_without_wide_lanes(monkeypatch, one_thread):
    monkeypatch.setattr(tune, "isa_flags", frozenset)
    assert not tune.linear_wins(128, 768, 768) and not tune.linear_wins(None, 768, 768)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.skipif("avx" not in isa_flags(), reason="the flags are those of x86")
def test_every_width_of_lanes(width, tmp_path):
    weft_linear = of_width(width, "weft_linear", tmp_path)
    torch.manual_seed(0)
    for rows, depth, columns in SIZES:
        x, w, b = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
        out = torch.empty(rows, columns)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (out, b, x, w)]
        numbers = [ctypes.c_int64(n) for n in (rows, columns, depth, 0, depth, depth)]
        assert weft_linear(*pointers, *numbers) == 0
        exact = F.linear(x.double(), w.double(), b.double())
        bound = F.linear(x.double().abs(), w.double().abs(), b.double().abs())
        assert ((out - exact).abs() <= 1e-6 * bound).all()
