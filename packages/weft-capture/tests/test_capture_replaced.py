"""Functions of libraries that are replaced after the compile: the old graph is not used."""

import builtins
import functools
import math
import random
import subprocess
import sys
import time
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import weft_capture
from capture_check import eager_backend
from torch import nn
from weft_core.errors import WeftError

X = torch.tensor([1.0, -2.0, 3.0])
SEEN = []
T, add, dim, length = torch.Tensor, torch.Tensor.__add__, torch.Tensor.dim, len
is_of, numbers = isinstance, range  # the library has to work meanwhile


def only_7(*args):
    return [7] if args == (2,) else numbers(*args)


def is_int(obj, kind):
    return kind is int or is_of(obj, kind)


def noting(function):
    """Return a function that can be told from one that runs while capturing only."""

    def noted(*args):
        SEEN.append(len(args))
        return function(*args)

    return noted


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return F.relu(self.linear(x))


def twice(x):
    return x * 2


MODEL = Linear()
NINE, FALSE = noting(lambda *args: 9), noting(lambda *args: False)


def times_9(*args):
    return next(arg for arg in args if isinstance(arg, torch.Tensor)) * 9


TIMES_9 = noting(times_9)
ROWS = [
    # program, what is replaced, by what
    (lambda x: x * len([1, 2]), builtins, "len", lambda s: length(s) + 3),
    (lambda x: x * isinstance(x, int), builtins, "isinstance", is_int),
    (lambda x: [x * i for i in range(2)], builtins, "range", only_7),
    (lambda x: (print(), x * 2)[1], builtins, "print", NINE),
    (lambda x: x * math.sqrt(4.0), math, "sqrt", NINE),
    (lambda x: x * (time.time() < 20), time, "time", NINE),
    (lambda x: x * (random.random() < 5), random, "random", NINE),
    (lambda x: torch.sin(x), torch, "sin", TIMES_9),
    (lambda x: torch.sin(x), torch, "sin", functools.wraps(torch.sin)(noting(times_9))),
    (lambda x: torch.sin(x), torch, "sin", mock.Mock(return_value=X)),
    (lambda x: F.relu(x), F, "relu", functools.wraps(F.relu)(noting(times_9))),
    (lambda x: F.relu(x), F, "relu", mock.create_autospec(F.relu, return_value=X)),
    (lambda x: F.relu(x), torch, "relu", TIMES_9),
    (lambda x: nn.ReLU()(x), nn, "ReLU", nn.Sigmoid),
    (MODEL, F, "relu", TIMES_9),
    (MODEL, F, "linear", TIMES_9),
    (MODEL, nn.Linear, "forward", TIMES_9),
    (lambda x: MODEL(x), nn.Module, "__call__", TIMES_9),
    (lambda x: MODEL(x), nn.Module, "_call_impl", TIMES_9),
    (MODEL, nn.modules.linear, "F", types.SimpleNamespace(linear=TIMES_9)),
    (lambda x: x + 1, T, "__add__", TIMES_9),
    (lambda x: x + 1, T, "__add__", noting(lambda a, b: add(a, b))),
    (lambda x: 1 + x, T, "__radd__", TIMES_9),
    (lambda x: -x, T, "__neg__", TIMES_9),
    (lambda x: abs(x), T, "__abs__", TIMES_9),
    (lambda x: x < 2, T, "__lt__", TIMES_9),
    (lambda x: x * len(x), T, "__len__", NINE),
    (lambda x: list(x), T, "__iter__", noting(lambda a: iter([1]))),
    (lambda x: 1 if x.sum() == 2 else 2, T, "__bool__", FALSE),
    (lambda x: x.add(1), T, "add", TIMES_9),
    (lambda x: x.mean(), T, "mean", TIMES_9),
    (lambda x: x * x.dim(), T, "dim", noting(lambda a: dim(a))),
    (lambda x: x * x.size(0), T, "size", NINE),
    (lambda x: x * x.shape[0], T, "shape", (5,)),
    (lambda x: x.fit() if hasattr(x, "fit") else x, T, "fit", TIMES_9),
    (lambda x: x.fit if hasattr(x, "fit") else x, T, "fit", property(TIMES_9)),
]


def run(function):
    """Return the result, and what replacements saw."""
    SEEN.clear()
    result = function(X)
    return str(result), list(SEEN)


@pytest.mark.sampled
@pytest.mark.filterwarnings(r"ignore:\[builtins\]")  # of capture itself, too
@pytest.mark.parametrize(("program", "owner", "name", "value"), ROWS, ids=lambda one: str(one)[:9])
def test_replaced(program, owner, name, value):
    captured = weft_capture.capture(program, eager_backend)
    for _ in range(2):
        for _ in range(2):  # the second run leaves a memo
            assert run(captured) == run(program)
        with mock.patch.object(owner, name, value, create=True):
            first, second = program(X), captured(X)
            SEEN.clear()
            program(X)
            calls = list(SEEN)
            SEEN.clear()
            captured(X)
            seen = list(SEEN)
        assert seen == calls
        assert str(first) == str(second)


@pytest.mark.filterwarnings(r"ignore:\[builtins\]")
def test_notice_of_replaced_builtin():
    code = "def program(x): return x * len([1, 2])"
    space = {}
    exec(compile(code, "<no file>", "exec"), space)  # of which linecache has no line
    captured = weft_capture.capture(space["program"], eager_backend)
    with mock.patch.object(builtins, "len", lambda *_: 3):
        assert torch.equal(captured(X), X * 3)


def test_one_guard_a_module():
    model = nn.Sequential(*[Linear() for _ in range(8)])
    captured = weft_capture.capture(model, eager_backend, fullgraph=True)
    captured(X)
    (entry,) = next(iter(captured._weft_capture.caches.values())).entries
    found = [str(guard) for guard in entry.guards if guard.kind == "NAMESPACE"]
    assert "module torch.nn.functional has the same relu, linear" in found
    assert len(found) < 8


def test_a_change_of_something_else_is_no_miss():
    captured = weft_capture.capture(MODEL, eager_backend)
    for number in range(6):
        captured(X)
        with mock.patch.object(F, "_unrelated", number, create=True):
            captured(X)
    assert len(captured._weft_capture.graphs) == 1


def test_a_backend_that_returns_nothing():
    captured = weft_capture.capture(lambda x: x * 2, lambda graph, inputs: None)
    with pytest.raises(WeftError, match="a backend returns a callable"):
        captured(X)


ITEMS = """
import torch, weft_capture
read, x = torch.Tensor.__getitem__, torch.ones(3)
compiled = weft_capture.capture(lambda x: x[0], lambda gm, _: gm.forward)
assert compiled(x).item() == 1
torch.Tensor.__getitem__ = lambda *args: read(*args) * 9
assert compiled(x).item() == 9
"""


@pytest.mark.slow
def test_replaced_subscripts():
    """In a process of its own: CPython keeps sq_item, and tensors are sequences from then on."""
    subprocess.run([sys.executable, "-c", ITEMS], check=True)
