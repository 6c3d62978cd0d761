"""Inference mode: results are inference tensors where eager's are, and the modes are as before."""

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import nn
from weft_core.errors import Unsupported

X = torch.arange(6.0).reshape(2, 3)
LAYER = nn.Linear(3, 2)


def modes():
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def block(x):
    with torch.inference_mode():
        y = LAYER(x)
        inside = modes()
    return y, y.is_inference(), inside, modes()


@torch.inference_mode()
def decorated(x):
    return LAYER(x), x.view(-1), modes()


@torch.inference_mode
def bare(x):
    return LAYER(x)


def calls_decorated(x):
    return decorated(x), bare(x), modes()


def off_inside(x):
    with torch.inference_mode(), torch.inference_mode(mode=False):
        y = LAYER(x)
        inside = modes()
    return y, inside, modes()


def with_other_modes(x):
    with torch.no_grad(), torch.autocast("cpu"), torch.inference_mode():
        y = LAYER(x)
    return y, modes()


def left_by_an_exception(x):
    try:
        with torch.inference_mode():
            y = LAYER(x)
            raise ValueError
    except ValueError:
        return y, modes()


def decorators_inside(x):
    @torch.no_grad()
    def first(t):
        return LAYER(t), modes()

    second = torch.set_grad_enabled(False)(LAYER.forward)
    return first(x), second(x), LAYER(x), modes()


def inference_decorator_inside(x):
    return torch.inference_mode()(LAYER.forward)(x), modes()


def operations_around(x):
    y = x * 2
    with torch.inference_mode():
        z = LAYER(y)
    return y * 2, z + 1, z, modes()


def break_inside(x):
    with torch.no_grad(), torch.inference_mode():
        y = x + 1
        x.add_(1)
        weft_capture.graph_break()
        y += 1
    return y, x, modes()


def break_in_inner_modes(x):
    with torch.inference_mode():
        y = LAYER(x)
        with torch.no_grad():
            weft_capture.graph_break()
            y = y * 2
    return y, modes()


def break_in_loop(x):
    for _ in range(2):
        with torch.inference_mode():
            x = x + 1
        weft_capture.graph_break()
    return x, modes()


def grad_mode_set_inside(x):
    with torch.inference_mode():
        torch.set_grad_enabled(True)
        weft_capture.graph_break()
        return LAYER(x), modes()


def facts(result):
    if isinstance(result, torch.Tensor):
        version = None if result.is_inference() else result._version
        return result.is_inference(), version, result.requires_grad, result.tolist()
    return [facts(item) for item in result] if isinstance(result, tuple) else result


WHOLE = (
    block, calls_decorated, decorated, off_inside, with_other_modes, left_by_an_exception,
    decorators_inside, inference_decorator_inside,
)  # fmt: skip
BROKEN = (
    operations_around, break_inside, break_in_inner_modes, break_in_loop, grad_mode_set_inside,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("function", WHOLE + BROKEN)
def test_results_and_modes_are_eagers(function):
    captured = weft_capture.capture(function, eager_backend, fullgraph=function in WHOLE)
    expected, before = facts(function(X.clone())), modes()
    for _ in range(2):
        assert facts(captured(X.clone())) == expected
        assert modes() == before
    assert captured._weft_capture.graphs


@pytest.mark.slow
@pytest.mark.parametrize("function", [block, decorated, break_inside, with_other_modes])
def test_calls_in_and_out_of_inference_mode(function):
    captured = weft_capture.capture(function, eager_backend)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert facts(captured(X.clone())) == facts(function(X.clone()))


def test_a_graph_of_both_modes_says_why_it_ends():
    captured = weft_capture.capture(operations_around, eager_backend, fullgraph=True)
    with pytest.raises(Unsupported, match="only a part of the graph"):
        captured(X)


def enters(context, x):
    with context:
        y = x + 1
    return y, modes()


def leaves(context, x):
    context.__enter__()
    return enters(torch.no_grad(), x), leave(context, x)


def leave(context, x):
    weft_capture.graph_break()
    y = x + 1
    context.__exit__(None, None, None)
    return y, x * 2, modes()


@pytest.mark.parametrize("function", [enters, leaves])
def test_a_context_from_outside(function):
    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        context = torch.inference_mode()
        assert facts(captured(context, X)) == facts(function(context, X))


def test_settings_that_are_asked_for_are_guarded():
    def ask(x):
        cached = torch.is_autocast_cache_enabled()
        return torch.get_num_threads(), torch.get_autocast_dtype("cpu"), cached, x + 1

    captured, threads = weft_capture.capture(ask, eager_backend), 2
    before = torch.get_num_threads(), torch.get_autocast_dtype("cpu")
    try:
        for dtype in (torch.float16, torch.bfloat16, torch.float16):
            threads = 3 - threads
            torch.set_num_threads(threads)
            torch.set_autocast_dtype("cpu", dtype)
            assert captured(X)[:3] == ask(X)[:3] == (threads, dtype, True)
    finally:
        torch.set_num_threads(before[0])
        torch.set_autocast_dtype("cpu", before[1])
