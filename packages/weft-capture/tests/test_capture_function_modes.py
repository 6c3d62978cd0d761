"""Function modes that a captured program enters: their handlers are traced through."""

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from mode_programs import PROGRAMS, Counts, Shifts, check_same, whole
from torch import nn
from torch.overrides import TorchFunctionMode


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(Counts, Counts), (Counts, Shifts), (Shifts, Counts)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_under_modes(program, kinds):
    def function(x, y):
        outer, inner = kinds[0](), kinds[1]()
        with outer, inner:
            result = program(x, y)
        return result, getattr(outer, "seen", 0), getattr(inner, "seen", 0), torch.sin(x)

    args = torch.arange(4.0), torch.ones(4) * 3
    check_same(whole(function)(*args), function(*args))


def test_a_mode_inside():
    def function(x):
        x = x + 1
        mode = Counts()
        with mode, Shifts():
            y = torch.sin(x) * x.shape[0] + torch.ones(3)
        return y, mode.seen, torch.sin(x)

    check_same(whole(function)(torch.ones(3)), function(torch.ones(3)))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("called", [False, True])
def test_a_break_under_a_mode(called):
    def step(x):
        y = torch.sin(x)
        weft_capture.graph_break()
        return y + torch.sin(x)

    def function(x):
        x = x * 2
        mode = Counts()
        with mode:
            if called:
                y = step(x)
            else:
                y = torch.sin(x)
                weft_capture.graph_break()
                y = y + torch.sin(x)
        return y, mode.seen, torch.sin(x)

    optimised = weft_capture.capture(function, eager_backend)
    for _ in range(3):
        check_same(optimised(torch.ones(3)), function(torch.ones(3)))


def test_what_a_mode_says_is_guarded():
    class Local(Shifts):
        pass

    mode = Local()

    def function(x):
        with mode:
            return torch.sin(x)

    optimised, x = whole(function), torch.ones(3)
    check_same(optimised(x), function(x))
    Local.by = 3.0
    check_same(optimised(x), function(x))
    mode.by = 4.0
    check_same(optimised(x), function(x))
    Local.__torch_function__ = lambda self, func, types, args=(), kwargs=None: args[0] * 0
    check_same(optimised(x), function(x))


def test_layers_under_a_mode():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4))

    def function(x):
        with Counts() as mode:
            y = net(x)
        return y, mode.seen

    x = torch.randn(2, 3)
    check_same(whole(function)(x), function(x))


def test_a_mode_that_enters_itself_again():
    class Again(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.sin:
                with self:
                    return torch.cos(*args) + 1
            return func(*args, **(kwargs or {})) * 2

    def function(x):
        with Again():
            return torch.sin(x)

    check_same(whole(function)(torch.ones(3)), function(torch.ones(3)))


def without_gradients(x):
    with torch.no_grad():
        return torch.sin(x)


def wave(x):
    return torch.sin(x) * 2


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize(
    "use",
    [nn.Parameter, torch.Tensor.numpy, print, without_gradients, weft_capture.allow_in_graph(wave)],
)
def test_what_is_not_traced_under_a_mode_is_right(use):
    def function(x):
        with Counts() as mode:
            use(x.detach())
        return x + 1, mode.seen

    optimised = weft_capture.capture(function, eager_backend)
    check_same(optimised(torch.ones(3)), function(torch.ones(3)))
