"""Function modes that a captured program enters: their handlers are traced through."""

import pytest
import torch
import weft_capture
from test_capture_language import eager_backend
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def plain(value):
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


def check_same(found, expected):
    """Compare trees of results: classes, values, attributes of tensors."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(plain(found), plain(expected))
        assert found.requires_grad == expected.requires_grad
        assert found.__dict__.keys() == expected.__dict__.keys()
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            check_same(*pair)
    else:
        assert found == expected


def whole(function):
    return weft_capture.capture(function, eager_backend, fullgraph=True)


class Counts(TorchFunctionMode):
    """Counts torch's functions and turns sin into cos."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


class Shifts(TorchFunctionMode):
    """Adds to what sin gives."""

    by = 10.0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out + self.by if func is torch.sin else out


def arithmetic(x, y):
    a = x + 1
    b = 2 - a * y
    return a, b, y + x, -x, abs(b) ** 2, x / 3, x // 2, x % 2, y @ x, x == y, x > 1, a[1:], a[0]


def functions(x, y):
    z = torch.sin(x) + F.softmax(x, 0) + F.relu(y - x)
    return z, torch.cat([x, y]), torch.stack([y, x]).sum(0), torch.where(x > 1, x, y), x.max(0)


def questions(x, y):
    return (
        x.shape,
        x.dtype,
        x.ndim,
        len(x),
        x.size(0),
        x.dim(),
        x.is_floating_point(),
        type(x).__name__,
    )


def methods(x, y):
    rows = [row * 2 for row in x.reshape(2, 2)]
    first, second = x.view(2, 2).unbind(0)
    return (
        rows,
        first,
        second,
        x.t(),
        x.view(2, 2).T,
        x.norm(),
        x.split(2),
        x.to(torch.float64),
        x.mean(),
    )


def in_place(x, y):
    z = x * 1
    same = z.add_(y)
    z[0] = 7.0
    z.mul_(2)
    z += 1
    return z, same is z, torch.add(x, y, out=torch.zeros(4))


def both_ways(x, y):
    _ = torch.promote_types(x.dtype, torch.float64), torch.finfo(x.dtype), torch.arange(3)
    return (
        x.detach() + 1,
        isinstance(x, torch.Tensor),
        torch.ones_like(x),
        x.to(torch.device("cpu")),
    )


PROGRAMS = [arithmetic, functions, questions, methods, in_place, both_ways]


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
