"""Function modes, and programs to run under them, with a comparison of their results."""

import torch
import weft_capture
from capture_check import eager_backend
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
