"""Attention that weft's own function computes (weft_attention.h), beside float64 and eager."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from codegen_check import WIDTHS, dynamic_trace, of_width, trace
from weft_codegen import tune
from weft_codegen.compile import compile_graph, make_program
from weft_codegen.config import Options, settings
from weft_codegen.kernels.toolchain import isa_flags
from weft_codegen.loops.program import Extern
from weft_codegen.loops.schedule.attention import ATTENTION

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Queries: less than a panel, panels with a rest of a quarter, a half, more. Keys: less than a block
# of them, several. Width: no whole block of registers, the largest.
SIZES = [(5, 7, 8), (40, 193, 64), (49, 400, 33), (64, 64, 256), (90, 12, 80), (2, 300, 64)]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr("weft_codegen.compile.attention_wins", lambda *_: True)
    with torch.no_grad():
        yield


def heads(batch, count, rows, width):
    """Heads as models have them: next to each other in each row."""
    return torch.randn(batch, rows, count * width).view(batch, rows, count, width).transpose(1, 2)


def operands(queries=40, keys=50, width=16, batch=2, count=3):
    torch.manual_seed(0)
    sizes = (queries, keys, keys)
    return [heads(batch, count, rows, width) for rows in sizes]


def own(fn, *args, options=Options()):
    """How many attentions of `fn` weft's function computes."""
    steps = make_program(trace(fn, args), args, options).steps
    return sum(isinstance(step, Extern) and step.op is ATTENTION for step in steps)


def check(fn, *args):
    """Compare with float64, and the layout with eager; the result."""
    assert own(fn, *args) == 1
    got = compile_graph(trace(fn, args), args, inference=True)(*args)[0]
    exact = fn(*(x.double() if x.is_floating_point() else x for x in args))
    torch.testing.assert_close(got.double(), exact, equal_nan=True, **CLOSE)
    assert got.stride() == fn(*args).stride()
    return got


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), SIZES)
def test_sizes_match_float64(queries, keys, width, causal):
    args = operands(queries, keys, width)
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), *args)


@pytest.mark.parametrize("shape", [(40, 50), (1, 50), (2, 1, 1, 50), (1, 3, 40, 50)])
def test_masks_that_broadcast(shape):
    args = operands()
    check(F.scaled_dot_product_attention, *args, torch.randn(shape))
    check(F.scaled_dot_product_attention, *args, torch.randn(shape) > 0)


def test_a_row_that_is_masked_wholly_is_zero():
    mask = torch.zeros(40, 50)
    mask[3], mask[:, 20:] = -torch.inf, -torch.inf
    args = (*operands(), mask)
    run = compile_graph(trace(F.scaled_dot_product_attention, args), args, inference=True)
    got, eager = run(*args)[0], F.scaled_dot_product_attention(*args)
    torch.testing.assert_close(got, eager, **CLOSE)
    assert (got[:, :, 3] == 0).all()


def test_nan_and_infinity_reach_the_rows_that_they_reach_in_eager():
    q, k, v = operands()
    q[0, 0, 3, 1], q[1, 2, 39, 0], v[1, 0, 7, 2] = torch.nan, torch.inf, torch.inf
    run = compile_graph(trace(F.scaled_dot_product_attention, (q, k, v)), (q, k, v), inference=True)
    got, eager = run(q, k, v)[0], F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got, eager, equal_nan=True, **CLOSE)


def test_large_scores_and_a_scale():
    q, k, v = operands(keys=500)
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5), q * 4, k, v)


def test_views_of_larger_tensors():
    torch.manual_seed(0)
    qkv = torch.randn(2, 37, 3, 4, 24)

    def attend(qkv):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    check(attend, qkv)
    check(F.scaled_dot_product_attention, *operands(), torch.randn(40, 90)[:, 20:70])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_result(threads):
    args, before, results = operands(200, 300, 64), torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            gm = trace(F.scaled_dot_product_attention, args)
            results.append(compile_graph(gm, args, inference=True)(*args)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("interpret", [False, True])
def test_rows_that_are_only_known_while_running(interpret):
    gm, fakes = dynamic_trace(F.scaled_dot_product_attention, operands(9, 9))
    with settings.patch(interpret=interpret):
        run = compile_graph(gm, fakes, inference=True)
    for rows in (9, 2, 70):
        args = operands(rows, rows)
        got, eager = run(*args)[0], F.scaled_dot_product_attention(*args)
        torch.testing.assert_close(got, eager, **CLOSE)


def test_what_the_function_does_not_take():
    q, k, v = operands()
    attend = F.scaled_dot_product_attention
    assert own(attend, q.double(), k.double(), v.double()) == 0
    assert own(attend, q.bfloat16(), k.bfloat16(), v.bfloat16()) == 0
    assert own(attend, *operands(width=264)) == 0
    assert own(attend, q, k, v, torch.randn(50, 40).t()) == 0
    for strict in ("strict_numerics", "fallback_by_default"):
        assert own(attend, q, k, v, options=Options(**{strict: True})) == 0
    with torch.enable_grad():
        graph = torch.autograd.functional.vjp(attend, (q, k, v), q)[1]
    assert [x.shape for x in graph] == [q.shape, k.shape, v.shape]


def test_where_it_wins(monkeypatch):
    monkeypatch.setattr(tune, "isa_flags", lambda: frozenset(["avx2"]))
    assert tune.attention_wins(128) and tune.attention_wins(None)
    assert not tune.attention_wins(1)
    monkeypatch.setattr(tune, "isa_flags", frozenset)
    assert not tune.attention_wins(128)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.skipif("avx" not in isa_flags(), reason="the flags are those of x86")
def test_every_width_of_lanes(width, tmp_path):
    weft_attention = of_width(width, "weft_attention", tmp_path)
    for queries, keys, wide in SIZES:
        q, k, v = operands(queries, keys, wide)
        mask, out = torch.randn(queries, keys), torch.empty_like(q)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (out, q, k, v, mask)]
        numbers = [2, 3, queries, keys, wide, 0]
        numbers += [n for t in (out, q, k, v) for n in t.stride()[:3]] + [0, 0, keys]
        sizes = (ctypes.c_int64 * len(numbers))(*numbers)
        assert weft_attention(*pointers, sizes, ctypes.c_double(0.25)) == 0
        exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v, mask)), scale=0.25)
        torch.testing.assert_close(out.double(), exact, **CLOSE)
