"""Programs to compile: each makes its own arguments from a seed, so that eager can be asked too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """A function and its arguments; `make` takes a seed, which also chooses the sizes."""

    function: Callable[..., Any]
    make: Callable[[int], tuple[Any, ...]]


def _normalised(x, weight):
    return F.layer_norm(F.gelu(x @ weight), (weight.shape[1],)).sum(-1)


def _attention(q, k, v):
    return (torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v).tanh()


def _broken(x):
    y = (x * 2).sin()
    if y.sum() > 0:  # a graph break
        return y.cumsum(0)
    return (y * y).flip(0)


def _loop(x, steps):
    for step in range(steps):
        x = torch.where(x > step, x - 1, x * 0.5)
    return x, x.max()


def _random(*shape: int, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def _rows(seed: int) -> int:
    return (3, 4, 5, 7)[seed % 4]


CASES = {
    "normalised": Case(
        _normalised, lambda s: (_random(_rows(s), 8, seed=s), _random(8, 6, seed=s + 1))
    ),
    "attention": Case(
        _attention, lambda s: tuple(_random(2, _rows(s), 4, seed=s + n) for n in range(3))
    ),
    "broken": Case(_broken, lambda s: (_random(_rows(s), 5, seed=s),)),
    "loop": Case(_loop, lambda s: (_random(_rows(s), seed=s), 1 + s % 3)),
}


def many(count: int) -> dict[str, Case]:
    """Return programs with texts of their own, so that each has kernels of its own."""
    made = {}
    for number in range(count):
        space: dict[str, Any] = {"torch": torch}
        terms = [f"(x * {number + n + 0.25}).{name}()" for n, name in enumerate(_names(number))]
        exec(f"def program{number}(x):\n    return ({' + '.join(terms)}).sum(-1)\n", space)
        made[f"program{number}"] = Case(
            space[f"program{number}"], lambda s: (_random(_rows(s), 6, seed=s),)
        )
    return made


def _names(number: int) -> tuple[str, ...]:
    names = ("sin", "cos", "tanh", "sigmoid", "exp", "abs", "relu")
    return tuple(names[(number + n * 3) % len(names)] for n in range(1 + number % 4))


def run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Call a function and differentiate it; return results and gradients."""
    result = function(*arguments)
    results = list(result) if isinstance(result, tuple) else [result]
    leaves = [value for value in arguments if isinstance(value, torch.Tensor)]
    total = sum(r.square().sum() for r in results)
    return [r.detach() for r in results] + list(torch.autograd.grad(total, leaves))


def difference(function: Callable[..., Any], case: Case, seed: int) -> str:
    """Compare a function with a case's own; return what differs, or an empty text."""
    wanted = run(case.function, case.make(seed))
    try:
        torch.testing.assert_close(run(function, case.make(seed)), wanted, rtol=1e-4, atol=1e-5)
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {str(error)[:300]}"
    return ""


class Net(nn.Module):
    """A module that several threads share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).log_softmax(-1)
