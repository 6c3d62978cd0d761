"""Modes of the program that see every operation: what they would miss is not compiled."""

import functools

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

X = torch.arange(4.0)


class Operators(TorchDispatchMode):
    """Counts aten operators, and turns sin into cos."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        func = torch.ops.aten.cos.default if func is torch.ops.aten.sin.default else func
        return func(*args, **(kwargs or {}))


def wave(x):
    return torch.sin(x) * (x[None] @ x[:, None])


def seen_and_result(function, kind):
    mode = kind()
    with mode:
        result = function(X)
    return mode.get_total_flops() if kind is Flops else mode.seen, result


Flops = functools.partial(FlopCounterMode, display=False)


@pytest.mark.parametrize("kind", [Operators, Flops])
@pytest.mark.parametrize("compiled_before", [False, True])
def test_mode_outside_sees_what_it_sees_in_eager(kind, compiled_before):
    optimised = weft_capture.capture(wave, eager_backend)
    if compiled_before:
        optimised(X)
    expected_seen, expected = seen_and_result(wave, kind)
    with pytest.warns(UserWarning, match=r"\[modes\] wave runs eagerly"):
        seen, result = seen_and_result(optimised, kind)
    assert seen == expected_seen
    assert torch.equal(result, expected)
    assert torch.equal(optimised(X), wave(X))
    assert len(optimised._weft_capture.caches[wave.__code__].entries) == 1


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_fake_tensors_around_a_compiled_call():
    optimised = weft_capture.capture(wave, eager_backend)
    optimised(X)
    with FakeTensorMode() as fakes:
        result = optimised(torch.ones(4))
    assert isinstance(result, FakeTensor) and result.shape == (1, 4)
    with pytest.warns(UserWarning, match="eagerly"):
        assert optimised(fakes.from_tensor(X)).shape == (1, 4)
    assert torch.equal(optimised(X), wave(X))


def test_mode_inside_sees_what_it_sees_in_eager():
    def function(x):
        x = x + 1
        mode = Operators()
        with mode:
            y = torch.sin(x) * 2
        return mode.seen, y, torch.sin(x)

    optimised = weft_capture.capture(function, eager_backend)
    with pytest.warns(UserWarning, match=r"\[modes\]"):
        seen, *results = optimised(X)
    expected_seen, *expected = function(X)
    assert seen == expected_seen
    assert all(map(torch.equal, results, expected))


def test_default_devices_are_told_apart():
    def function(x):
        return torch.ones(3, dtype=x.dtype)

    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    for device in ("meta", "cpu", "meta"):
        with torch.device(device):
            assert optimised(X).device.type == device
    assert len(optimised._weft_capture.graphs) == 2


# ---- modes of torch that are part of the graph


@torch.autocast("cpu", dtype=torch.bfloat16)
def narrow(x, w):
    return x @ w, torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("as_method", [False, True])
def test_autocast_as_a_decorator(as_method):
    function = narrow if as_method else lambda x, w: (narrow(x, w), x @ w)
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    found = weft_capture.capture(function, eager_backend, fullgraph=True)(x, w)
    torch.testing.assert_close(found, function(x, w))
    assert not torch.is_autocast_enabled("cpu")


def test_an_autocast_object_that_changes_is_not_taken_for_the_old_one():
    block = torch.autocast("cpu", dtype=torch.bfloat16)

    def function(x):
        with block:
            return x @ x

    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    x = torch.ones(3, 3)
    assert optimised(x).dtype is torch.bfloat16
    block._enabled = False
    assert optimised(x).dtype is torch.float32


def attention_state():
    return torch._C._get_math_sdp_enabled(), torch._C._get_flash_sdp_enabled()


def test_attention_backends_are_chosen_in_the_graph():
    q = torch.randn(1, 2, 4, 8)
    chosen = SDPBackend.MATH
    seen = []

    def backend(graph, inputs):
        def run(*args):
            seen.extend(n.target.__name__ for n in graph.graph.nodes if n.op == "call_function")
            return graph(*args)

        return run

    def function(q):
        with sdpa_kernel(chosen):
            y = F.scaled_dot_product_attention(q, q, q)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            return y + F.scaled_dot_product_attention(q, q, q, is_causal=True)

    before = attention_state()
    optimised = weft_capture.capture(function, backend, fullgraph=True)
    torch.testing.assert_close(optimised(q), function(q))
    assert seen.count("enter_attention") == seen.count("leave_attention") == 2
    assert attention_state() == before


def test_a_break_among_attention_backends_runs_in_them():
    q = torch.randn(1, 2, 4, 8)

    def function(q):
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, q, q)
            weft_capture.graph_break()
            inside = attention_state()
            y = y + F.scaled_dot_product_attention(q, q, q)
        return y, inside, attention_state()

    found = weft_capture.capture(function, eager_backend)(q)
    torch.testing.assert_close(found, function(q))


def made_inside(x):
    with torch.device("meta"):
        y = torch.ones(1)
    return y.device, torch.ones(1).device, x + 1, y


def split_inside(x):
    with torch.device("meta"):
        y = torch.ones(1)
        weft_capture.graph_break()
        z = torch.ones(2)
    return y.device, z.device, torch.ones(1).device, x + 1


def raised_inside(x):
    try:
        with torch.device("meta"):
            raise ValueError
    except ValueError:
        return torch.ones(1).device, x + 1


def made_in_a_call(x):
    return made_inside(x + 1)[0], split_inside(x * 2)[1], torch.ones(1).device


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("function", [made_inside, split_inside, raised_inside, made_in_a_call])
def test_a_device_block_inside_is_entered_each_time(function):
    optimised, x = weft_capture.capture(function, eager_backend), torch.ones(2)
    for _ in range(3):
        assert repr(optimised(x)) == repr(function(x))
        assert torch._C._len_torch_function_stack() == 0
