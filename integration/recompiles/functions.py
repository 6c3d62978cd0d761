"""Functions and modules that are made and compiled anew."""

import functools
from typing import Any

import torch
from torch import nn

from recompiles.table import Compile, pattern


@pattern(1)
def compiled_in_a_loop(compile: Compile, calls: int) -> list[Any]:
    def step(x: Any) -> Any:
        return x.sin() + 1

    return [compile(step)(torch.ones(3)) for _ in range(calls)]


@pattern(1)
def lambda_compiled_in_a_loop(compile: Compile, calls: int) -> list[Any]:
    return [compile(lambda x: x.sin() + 1)(torch.ones(3)) for _ in range(calls)]


@pattern(2)
def closure_compiled_in_a_loop(compile: Compile, calls: int) -> list[Any]:
    def made(scale: float) -> Any:
        return lambda x: x * scale

    return [compile(made(n + 0.5))(torch.ones(3)) for n in range(calls)]


@pattern(1)
def closure_over_tensors_compiled_in_a_loop(compile: Compile, calls: int) -> list[Any]:
    def made(weight: Any) -> Any:
        return lambda x: x * weight

    return [compile(made(torch.full((3,), n)))(torch.ones(3)) for n in range(calls)]


@pattern(1)
def module_compiled_in_a_loop(compile: Compile, calls: int) -> list[Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    return [compile(model)(torch.ones(3)).shape for _ in range(calls)]


@pattern(1)
def modules_made_in_a_loop(compile: Compile, calls: int) -> list[Any]:
    return [compile(nn.Linear(3, 3))(torch.ones(2, 3)).shape for _ in range(calls)]


@pattern(1)
def method_compiled_in_a_loop(compile: Compile, calls: int) -> list[Any]:
    class Scale:
        def __init__(self) -> None:
            self.weight = torch.ones(3)

        def step(self, x: Any) -> Any:
            return x * self.weight

    return [compile(Scale().step)(torch.ones(3)) for _ in range(calls)]


@pattern(1)
def function_compiled_inside_a_function(compile: Compile, calls: int) -> list[Any]:
    def outer(x: Any) -> Any:
        @compile
        def inner(y: Any) -> Any:
            return y * 2 + 1

        return inner(x)

    return [outer(torch.ones(3)) for _ in range(calls)]


@pattern(1)
def partial_compiled_in_a_loop(compile: Compile, calls: int) -> list[Any]:
    def step(x: Any, weight: Any) -> Any:
        return x * weight

    return [
        compile(functools.partial(step, weight=torch.ones(3)))(torch.ones(3)) for _ in range(calls)
    ]


@pattern(1)
def callbacks_made_anew(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, callback: callback(x) + 1)
    return [step(torch.ones(3), lambda x: x * 2) for _ in range(calls)]
