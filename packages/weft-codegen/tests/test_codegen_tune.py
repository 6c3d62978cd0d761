"""Matrix products as loops: blocks of rows and columns, and who wins under `max_autotune`."""

import logging

import pytest
import torch
from codegen_check import externs, launches, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from weft_codegen import compile_graph, tune
from weft_codegen.compile import make_program
from weft_codegen.config import Options
from weft_codegen.config import settings as codegen_settings
from weft_codegen.kernels import compile_program
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.schedule import matmul


def _as_loops(monkeypatch, wins=True):
    """Let every product of known sizes be a loop, without measuring."""
    monkeypatch.setattr("weft_codegen.compile.loop_wins", lambda *_: wins)


def _program(fn, args):
    with codegen_settings.patch(verify_ir=True):
        return make_program(trace(fn, args), args, Options(max_autotune=True))


def _check(fn, *args):
    program = _program(fn, args)
    want = fn(*(arg.double() for arg in args)).float()
    for (result,) in (run_program(program, args), compile_program(program)(*args)):
        assert_close(result, want, atol=1e-4, rtol=1e-4)
    return program


# Rows in blocks of 8, 6, 5 and 1; columns in blocks of 32 and 48, and in none that fits.
@pytest.mark.sampled
@pytest.mark.parametrize("rows", [8, 32, 12, 25, 13, 2])
@pytest.mark.parametrize("columns", [64, 48, 20, 130])
def test_blocks_take_bias_activation_and_residual_along(rows, columns, monkeypatch):
    _as_loops(monkeypatch)
    a, b = torch.randn(rows, 70), torch.randn(70, columns)
    bias, residual = torch.randn(columns), torch.randn(rows, columns)
    program = _check(lambda a, b, c, r: torch.addmm(c, a, b).relu() * 2 + r, a, b, bias, residual)
    assert externs(program) == [] and launches(program) == 1


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_batches_and_transposed_operands(turned, monkeypatch):
    _as_loops(monkeypatch)
    a, b = torch.randn(3, 16, 40), torch.randn(3, 40, 64)
    if turned:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    assert externs(_check(lambda a, b: (a @ b).sigmoid(), a, b)) == []
    assert externs(_check(lambda a, b: (a @ b).sigmoid(), a[0], b[0])) == []


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(*[st.integers(2, 70)] * 3, st.booleans())
def test_products_of_any_size(rows, length, columns, bias):
    args = [torch.randn(rows, length), torch.randn(length, columns), torch.randn(columns)]
    with pytest.MonkeyPatch.context() as patch:
        _as_loops(patch)
        _check(lambda a, b, c: torch.addmm(c, a, b) if bias else (a @ b) + c, *args)


def test_special_values_pass_through(monkeypatch):
    _as_loops(monkeypatch)
    a, b = torch.ones(8, 16), torch.ones(16, 32)
    a[0, 0], a[1, 1], b[3, 3] = float("nan"), float("inf"), float("-inf")
    (result,) = compile_program(_program(torch.mm, (a, b)))(a, b)
    assert_close(result, a @ b, equal_nan=True)


@pytest.mark.slow
def test_the_faster_one_stays_and_is_remembered(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    a, b = torch.randn(16, 128), torch.randn(128, 160)
    graph = trace(lambda a, b: (a @ b).relu(), (a, b))
    caplog.set_level(logging.INFO, "weft.codegen.autotuning")
    for library, loop, kept in ((2.0, 1.0, []), (1.0, 2.0, ["aten.mm.default"])):
        monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / str(loop)))
        monkeypatch.setattr(tune, "_race", lambda *_, times=[library, loop]: times)
        assert externs(make_program(graph, (a, b), Options(max_autotune=True))) == kept
        monkeypatch.setattr(tune, "_race", None)  # not asked again
        assert externs(make_program(graph, (a, b), Options(max_autotune=True))) == kept
    assert externs(make_program(graph, (a, b))) == ["aten.mm.default"]
    said = [r.getMessage() for r in caplog.records if "max_autotune" in r.getMessage()]
    assert len(said) == 2 and "2000000.0 us in the library, 1000000.0 us as a loop" in said[0]


def test_a_measured_graph_is_right(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    a, b = torch.randn(16, 96), torch.randn(96, 64)
    graph = trace(lambda a, b: (a @ b).relu() + 1, (a, b))
    (result,) = compile_graph(graph, (a, b), options=Options(max_autotune=True))(a, b)
    assert_close(result, (a @ b).relu() + 1, atol=1e-4, rtol=1e-4)
    assert any((tmp_path / "tuned").iterdir())


def test_what_is_too_large_is_not_measured(monkeypatch):
    _as_loops(monkeypatch)
    monkeypatch.setattr(matmul, "_MOST_MEASURED", 1000)
    args = torch.randn(32, 64), torch.randn(64, 64)
    assert externs(_program(torch.mm, args)) == ["aten.mm.default"]
