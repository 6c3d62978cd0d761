"""Numbers that vary: rates, counters, scalars of NumPy."""

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from recompiles.table import Compile, pattern


@pattern(2)
def learning_rates(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda p, g, lr: p - lr * g)
    return [step(torch.ones(3), torch.ones(3), 0.1 * 0.9**n) for n in range(calls)]


@pattern(2)
def cosine_schedule_on_an_object(compile: Compile, calls: int) -> list[Any]:
    class Config:
        lr = 0.1

    config = Config()
    step, seen = compile(lambda p: p * config.lr), []
    for n in range(calls):
        config.lr = 0.1 * (1 + math.cos(math.pi * n / calls)) + 0.01
        seen.append(step(torch.ones(3)))
    return seen


@pattern(2)
def optimizer_with_a_schedule(compile: Compile, calls: int) -> list[Any]:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    @compile
    def step() -> None:
        optimizer.step()

    for _ in range(calls):
        p.grad = torch.ones(3)
        step()
        schedule.step()
    return [p.detach()]


@pattern(3)
def step_counter_on_a_module(compile: Compile, calls: int) -> list[Any]:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def forward(self, x: Any) -> Any:
            self.steps += 1
            return x * 2

    model = Counting()
    step = compile(model)
    return [step(torch.ones(3)) for _ in range(calls)] + [model.steps]


@pattern(3)
def step_counter_that_is_used(compile: Compile, calls: int) -> list[Any]:
    class Warming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def forward(self, x: Any) -> Any:
            self.steps += 1
            return x * min(1.0, self.steps / 100)

    step = compile(Warming())
    return [step(torch.ones(3)) for _ in range(calls)]


STEPS = 0


@pattern(3)
def global_counter(compile: Compile, calls: int) -> list[Any]:
    global STEPS
    STEPS = 0

    @compile
    def step(x: Any) -> Any:
        global STEPS
        STEPS += 1
        return x + 1

    return [step(torch.ones(3)) for _ in range(calls)] + [STEPS]


@pattern(3)
def counter_in_a_closure(compile: Compile, calls: int) -> list[Any]:
    steps = 0

    @compile
    def step(x: Any) -> Any:
        nonlocal steps
        steps += 1
        return x + 1

    return [step(torch.ones(3)) for _ in range(calls)] + [steps]


@pattern(2)
def exponential_moving_average(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda a, x, n: a + (x - a) / (n + 1))
    return [step(torch.zeros(3), torch.ones(3), n) for n in range(2, calls + 2)]


@pattern(2)
def numpy_floats(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, s: x * s)
    return [step(torch.ones(3), np.float64(n + 0.5)) for n in range(calls)]


@pattern(2)
def numpy_integers(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, s: x + s)
    return [step(torch.ones(3), np.int64(n + 2)) for n in range(calls)]


@pattern(2)
def numpy_means_of_losses(compile: Compile, calls: int) -> list[Any]:
    losses: list[float] = [1.0]
    step, seen = compile(lambda x, m: x / m), []
    for n in range(calls):
        losses.append(n + 1.5)
        seen.append(step(torch.ones(3), np.mean(losses)))
    return seen


@pattern(2)
def fractions_of_a_temperature(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, t: (x / t).softmax(-1) if t > 0 else x)
    return [step(torch.ones(3), 1.0 / (n + 1)) for n in range(calls)]


@pattern(3)
def printed_every_so_often(compile: Compile, calls: int) -> list[Any]:
    def train(x: Any, n: int) -> Any:
        y = x * 2
        return y + 1 if n % 5 == 0 else y

    step = compile(train)
    return [step(torch.ones(3), n + 2) for n in range(calls)]


@pattern(2)
def small_scalars_of_numpy(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, rate, count: x * rate + count)
    return [step(torch.ones(3), np.float32(n + 0.5), np.int32(n + 2)) for n in range(calls)]


@pattern(3)
def scalars_of_numpy_from_a_broken_call(compile: Compile, calls: int) -> list[Any]:
    counts = iter(range(2, calls + 2))

    @torch.compiler.disable
    def measured() -> Any:
        return np.float32(next(counts)) / 4

    @compile
    def step(x: Any) -> Any:
        share = measured()
        return x * share, share * 2, float(share)

    return [step(torch.ones(3)) for _ in range(calls)]


@pattern(2)
def rates_looked_up_by_step(compile: Compile, calls: int) -> list[Any]:
    rates = tuple(0.5**n for n in range(calls + 2))
    step = compile(lambda x, n: x * rates[n])
    return [step(torch.ones(3), n + 2) for n in range(calls)]
