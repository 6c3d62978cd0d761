"""Records, flags and objects that are made anew."""

import dataclasses
import datetime
import decimal
import enum
import os
import secrets
import types
from typing import Any

import torch
from torch import nn

from recompiles.table import Compile, pattern


@dataclasses.dataclass
class Batch:
    """A record of a loader."""

    x: Any
    index: int
    name: str


class Mode(enum.Enum):
    """Two ways to go."""

    TRAIN = 1
    TEST = 2


@pattern(2)
def dataclass_records(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda batch: batch.x * 2)
    return [step(Batch(torch.ones(n + 2), n, f"{n}")) for n in range(calls)]


@pattern(2)
def dicts_with_new_values(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda d: d["x"] * d["scale"])
    return [step({"x": torch.ones(3), "scale": n + 0.5}) for n in range(calls)]


@pattern(2)
def switching_modes(compile: Compile, calls: int) -> list[Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
    step, seen = compile(model), []
    for n in range(calls):
        model.train(n % 2 == 0)
        seen.append(step(torch.ones(2, 3)).shape)
    return seen


@pattern(2)
def enum_arguments(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, mode: x * 2 if mode is Mode.TRAIN else x)
    return [step(torch.ones(3), Mode(n % 2 + 1)) for n in range(calls)]


@pattern(1)
def objects_made_anew(compile: Compile, calls: int) -> list[Any]:
    class Scale:
        def __init__(self) -> None:
            self.weight = torch.ones(3)

    step = compile(lambda x, scale: x * scale.weight)
    return [step(torch.ones(3), Scale()) for _ in range(calls)]


@pattern(2)
def shapes_in_records(compile: Compile, calls: int) -> list[Any]:
    @dataclasses.dataclass
    class Size:
        rows: int
        columns: int

    def step(x: Any, y: Any) -> Any:
        same = Size(*x.shape) == Size(*y.shape)
        return x + y if same and list(x.shape).index(x.shape[1]) >= 0 else x

    compiled = compile(step)
    return [compiled(torch.ones(n + 2, 1), torch.ones(n + 2, 1)) for n in range(calls)]


@pattern(3)
def tokens_of_a_broken_call(compile: Compile, calls: int) -> list[Any]:
    @compile
    def step(x: Any) -> Any:
        token, salt = secrets.token_hex(4), os.urandom(4)
        y = x * 2
        line = f"{token}: {salt.hex()}"
        return y * len(salt), len(line), token.startswith("no"), isinstance(salt, bytes)

    return [step(torch.ones(3)) for _ in range(calls)]


@pattern(3)
def names_that_are_keys(compile: Compile, calls: int) -> list[Any]:
    seen: dict[Any, Any] = {}

    @compile
    def step(x: Any, name: str) -> Any:
        seen[name] = x.sum()
        seen[name, x.shape[0]] = name + "/loss"
        return x * 2

    return [step(torch.ones(n + 2), f"loss{n}") for n in range(calls)] + [seen]


@pattern(3)
def shapes_that_are_keys(compile: Compile, calls: int) -> list[Any]:
    cache: dict[Any, Any] = {}

    @compile
    def step(x: Any) -> Any:
        cache[x.shape] = cache[tuple(x.shape)] = x.sum()
        return x * 2

    return [step(torch.ones(n + 2, 3)) for n in range(calls)] + [len(cache)]


@pattern(3)
def configurations_that_are_compared(compile: Compile, calls: int) -> list[Any]:
    class Config:
        name = "run"

    config = Config()

    @compile
    def step(x: Any) -> Any:
        if config.name == "last" or config.name.endswith("x"):
            return x
        return x * 2 if config.name else x

    seen = []
    for n in range(calls):
        config.name = f"run{n}"
        seen.append(step(torch.ones(3)))
    return seen


@pattern(4)
def times_since_the_start(compile: Compile, calls: int) -> list[Any]:
    start = datetime.datetime(2020, 1, 1)

    @compile
    def step(x: Any, now: Any) -> Any:
        since = now - start
        return x * since.total_seconds(), since.days, str(now.date())

    times = [start + datetime.timedelta(hours=5 * n) for n in range(calls)]
    return [step(torch.ones(3), now) for now in times]


@pattern(3)
def attributes_with_new_names(compile: Compile, calls: int) -> list[Any]:
    record = types.SimpleNamespace()
    step = compile(lambda x, name: (setattr(record, name, x * 2), x + 1)[1])
    results = [step(torch.ones(2), f"n{n}") for n in range(calls)]
    return [*results, vars(record)]


@pattern(5)
def attributes_named_after_a_counter(compile: Compile, calls: int) -> list[Any]:
    record = types.SimpleNamespace(step=0)

    def run(x: Any) -> Any:
        y = x * 2
        setattr(record, f"loss_{record.step}", y.sum())
        record.step += 1
        return y

    step = compile(run)
    return [*(step(torch.ones(2)) for _ in range(calls)), vars(record)]


@pattern(2)
def ranges_and_decimals(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, r, d: (x * 2, r, f"{d}", r == range(77), d < 5000))
    pairs = ((range(n + 2), decimal.Decimal(n) / 7) for n in range(calls))
    return [step(torch.ones(2), *pair) for pair in pairs]
