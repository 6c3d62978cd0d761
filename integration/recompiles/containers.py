"""Lists, deques and iterators that grow or move on."""

import collections
import itertools
import os
from typing import Any

import torch
from torch import nn

from recompiles.table import Compile, pattern


@pattern(3)
def losses_in_a_growing_list(compile: Compile, calls: int) -> list[Any]:
    losses: list[Any] = []

    @compile
    def step(x: Any) -> Any:
        y = x * 2
        losses.append(y.sum())
        return y

    return [step(torch.ones(3)) for _ in range(calls)] + [len(losses)]


@pattern(3)
def history_in_a_deque(compile: Compile, calls: int) -> list[Any]:
    window: collections.deque[Any] = collections.deque(maxlen=4)

    @compile
    def step(x: Any) -> Any:
        y = x * 2
        window.append(y.sum().detach())
        return y

    return [step(torch.ones(3)) for _ in range(calls)] + [len(window)]


@pattern(3)
def iterators_over_a_break(compile: Compile, calls: int) -> list[Any]:
    def train(batches: Any) -> Any:
        source = iter(batches)
        total = torch.zeros(3)
        for _ in range(calls):
            total = total + next(source)
            os.getpid()
            total = total * 2
        return total

    step = compile(train)
    return [step([torch.ones(3) for _ in range(calls)])]


@pattern(3)
def next_of_a_loader(compile: Compile, calls: int) -> list[Any]:
    batches = iter(torch.utils.data.DataLoader(torch.ones(2 * calls, 3), batch_size=2))

    @compile
    def step(weight: Any) -> Any:
        x = next(batches)
        return (x * weight).sum()

    return [step(torch.ones(3)) for _ in range(calls)]


@pattern(3)
def cycle_of_batches(compile: Compile, calls: int) -> list[Any]:
    batches = itertools.cycle([torch.ones(3), torch.zeros(3)])

    @compile
    def step(weight: Any) -> Any:
        return (next(batches) * weight).sum()

    return [step(torch.ones(3)) for _ in range(calls)]


@pattern(3)
def count_of_steps(compile: Compile, calls: int) -> list[Any]:
    steps = itertools.count(2)

    @compile
    def step(x: Any) -> Any:
        return x * next(steps)

    return [step(torch.ones(3)) for _ in range(calls)]


@pattern(4)
def epoch_over_a_loader(compile: Compile, calls: int) -> list[Any]:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)

    @compile
    def epoch(loader: Any) -> Any:
        total = 0.0
        for x in loader:
            total += model(x).sum().item()
        return total

    data = torch.ones(2 * calls, 3)
    return [epoch(torch.utils.data.DataLoader(data, batch_size=2)) for _ in range(2)]


@pattern(4)
def length_and_last_of_a_growing_list(compile: Compile, calls: int) -> list[Any]:
    losses = [0.5, 0.25]

    @compile
    def step(x: Any) -> Any:
        mean = x * len(losses) if losses else x
        return mean + losses[-1]

    seen = []
    for n in range(calls):
        seen.append(step(torch.ones(3)))
        losses.append(n + 0.5)
    return seen


@pattern(3)
def length_of_a_growing_dict(compile: Compile, calls: int) -> list[Any]:
    cache: dict[str, Any] = {"a": 1, "b": 2}
    step, seen = compile(lambda x: x + len(cache) if cache else x), []
    for n in range(calls):
        seen.append(step(torch.ones(3)))
        cache[f"{n}"] = n
    return seen


class Dataset:
    """Samples by index, and one after the other."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.at = samples, 0

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def __next__(self) -> Any:
        self.at += 1
        return self.samples[self.at - 1]


@pattern(3)
def samples_by_index(compile: Compile, calls: int) -> list[Any]:
    dataset = Dataset([torch.full((3,), float(n)) for n in range(calls + 3)])
    step = compile(lambda x, n: dataset[n] * x + dataset[n - 1] + dataset[-1])
    return [step(torch.ones(3), n + 2) for n in range(calls)]


@pattern(4)
def iterator_of_the_program_over_breaks(compile: Compile, calls: int) -> list[Any]:
    @compile
    def train(batches: Any) -> Any:
        total = torch.zeros(3)
        for _ in range(calls):
            total = total + next(batches)
            os.getpid()
            total = total * 2
        return total

    return [train(Dataset([torch.full((3,), float(n)) for n in range(calls)]))]
