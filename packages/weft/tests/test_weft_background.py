"""Graphs that run eagerly until a thread has compiled them (`config.background_compile`)."""

import threading

import pytest
import torch
import weft
from torch import nn
from weft_core.events import counters


@pytest.fixture
def background():
    weft.reset()
    with weft.config.patch(background_compile=True):
        yield
        assert weft.wait_for_compilation(60)


@pytest.fixture
def held(monkeypatch):
    """The thread does not begin before this is set."""
    go, run = threading.Event(), weft.pipeline.codegen

    def compile_later(*args, **options):
        go.wait()
        return run(*args, **options)

    monkeypatch.setattr("weft.pipeline.codegen", compile_later)
    monkeypatch.setattr("weft.backends.lookup_backend", lambda _: compile_later)
    monkeypatch.setattr("weft.pipeline.lookup_backend", lambda _: compile_later)
    yield go
    go.set()


def step(model, x):
    return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))


@pytest.mark.usefixtures("background")
def test_training_is_eager_first_and_compiled_then(held):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    compiled, x = weft.compile(model), torch.randn(3, 8)
    expected = step(model, x)
    for _ in range(2):
        torch.testing.assert_close(step(compiled, x), expected)
    assert counters["background"] == {"graphs": 1, "eager_calls": 2}
    assert not weft.wait_for_compilation(0)
    assert counters["codegen"]["graphs"] == 0
    held.set()
    assert weft.wait_for_compilation(60)
    torch.testing.assert_close(step(compiled, x), expected)
    assert counters["background"]["eager_calls"] == 2
    assert counters["codegen"]["graphs"] == 2  # forward and backward
    assert counters["frames"]["compiled"] == 1


@pytest.mark.usefixtures("background")
def test_the_thread_has_the_modes_of_the_caller(held):
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    compiled = weft.compile(model)
    for _ in range(2):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            result = compiled(x)
        assert (result.dtype, result.requires_grad) == (torch.bfloat16, False)
        held.set()
        assert weft.wait_for_compilation(60)
    assert counters["background"]["eager_calls"] == 1


@pytest.mark.usefixtures("background")
def test_what_depends_on_the_caller_is_compiled_at_once():
    x = torch.randn(3, 8)
    weft.compile(lambda x: x.sin() * x.shape[0], dynamic=True)(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        weft.compile(lambda x: x.cos())(x)
    weft.compile(lambda x: x.tan(), options={"freezing": True})(x)
    torch.func.vmap(weft.compile(lambda x: x.exp()))(x)
    assert counters["background"]["graphs"] == 0
    assert counters["codegen"]["graphs"] >= 3


@pytest.mark.usefixtures("background")
def test_a_failure_is_raised_when_it_is_known(monkeypatch):
    called = threading.Event()

    def fail(*_, **__):
        called.wait(60)
        raise ZeroDivisionError("a planted failure")

    monkeypatch.setattr("weft_codegen.compile.make_program", fail)
    compiled, x = weft.compile(lambda x: x * 3.25 - 1), torch.randn(3)
    torch.testing.assert_close(compiled(x), x * 3.25 - 1)
    called.set()
    assert weft.wait_for_compilation(60)
    with pytest.raises(weft.BackendCompilerError, match="a planted failure"):
        compiled(x)


def test_without_the_setting_nothing_waits():
    weft.reset()
    weft.compile(lambda x: x + 0.125)(torch.randn(3))
    assert counters["background"]["graphs"] == 0
