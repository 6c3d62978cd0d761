"""What a call of compiled code costs before any work is done: weft and torch.compile in turn.

    python benchmarks/guards.py [--layers 1,8,32,64] [--rounds 2] [--no-torch]

Guards: models of small residual blocks (two linear layers each) whose graph is compiled
to a function that returns a ready tensor, so that a call costs the guards and the way in and out.
`check` is the guard check alone, which torch offers no way to call. `dynamic` is the same program
with a symbolic batch size. The last rows are whole calls of `a + 1` with each default backend. The
two stacks run in processes of their own, one after the other, `rounds` times; the least median is
printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch

CALLS, REPEATS = 1000, 15


class Block(torch.nn.Module):
    """A residual block with 4 parameters and a setting."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and a small perceptron's output."""
        return x + self.scale * self.second(torch.relu(self.first(x)))


class Stack(torch.nn.Module):
    """Blocks in a ModuleList."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks one after the other."""
        for block in self.blocks:
            x = block(x)
        return x


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of one call."""
    timeit.timeit(call, number=CALLS)
    return statistics.median(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS * 1e6


def no_work(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend whose code returns a tensor that is there already."""
    result = (torch.zeros(4, 8),)
    return lambda *args: result


def add_one(a: torch.Tensor) -> torch.Tensor:
    """The smallest program."""
    return a + 1


def add_all(*tensors: torch.Tensor) -> torch.Tensor:
    """A program of several tensors whose sizes must be equal."""
    return sum(tensors[1:], tensors[0])


Program = tuple[Callable[..., Any], Callable[[int], list[Any]]]  # and what to call it with


def programs(layers: list[int]) -> dict[str, Program]:
    """Return what has its guards measured, each with its inputs for a batch of some size."""

    def batch(count: int) -> Callable[[int], list[Any]]:
        return lambda size: [torch.randn(size, 8) for _ in range(count)]

    models: dict[str, Program] = {
        f"{count} layers": (Stack(count).forward, batch(1)) for count in layers
    }
    return {"1 tensor": (add_all, batch(1)), "10 tensors": (add_all, batch(10)), **models}


def guards_of(compile: Callable[..., Any], program: Program, dynamic: bool) -> dict[str, float]:
    """Measure calls of a program, and its check alone where the stack shows it.

    A program whose batch is dynamic was compiled for two sizes, and is called with a third.
    """
    function, inputs = program
    compiled = compile(function, backend=no_work, dynamic=None if dynamic else False)
    for size in (4, 5) if dynamic else ():
        compiled(*inputs(size))
    args = inputs(6)
    found = {"call": microseconds(lambda: compiled(*args))}
    capture = getattr(compiled, "_weft_capture", None)
    if capture is not None:
        plain = getattr(function, "__func__", function)
        owner = [function.__self__] if plain is not function else []
        flat = [*owner, tuple(args)] if plain is add_all else [*owner, *args]
        lookup = capture.caches[plain.__code__].lookup
        found["check"] = microseconds(lambda: lookup(plain, *flat))
    return found


def measure(compile: Callable[..., Any], layers: list[int]) -> dict[str, float]:
    """Measure one stack."""
    found: dict[str, float] = {}
    with torch.no_grad():
        for name, program in programs(layers).items():
            for kind in ("static", "dynamic"):
                for what, value in guards_of(compile, program, kind == "dynamic").items():
                    found[f"{name}, {kind}, {what}"] = value
    compiled, a = compile(add_one), torch.randn(8)
    b = torch.randn(8, requires_grad=True)
    with torch.no_grad():
        found["a + 1, no grad"] = microseconds(lambda: compiled(a))
    found["a + 1"] = microseconds(lambda: compiled(a))
    found["a + 1, with grad"] = microseconds(lambda: compiled(b))
    return found


def child(name: str, layers: list[int]) -> None:
    """Measure one stack in this process, and print JSON."""
    if name == "torch":
        found = measure(torch.compile, layers)
    elif name == "weft":
        import weft  # noqa: PLC0415 - only in its own process

        found = measure(weft.compile, layers)
    else:
        found = measure(lambda function, **how: function, layers)
    print(json.dumps(found))


def main() -> None:
    """Run both stacks in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--only", choices=("eager", "weft", "torch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        child(args.only, [int(part) for part in args.layers.split(",")])
        return
    stacks = ["eager", "weft"] + ([] if args.no_torch else ["torch"])
    best: dict[str, dict[str, float]] = {name: {} for name in stacks}
    for _ in range(args.rounds):
        for name in stacks:
            command = [sys.executable, __file__, "--layers", args.layers, "--only", name]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for row, value in json.loads(output.splitlines()[-1]).items():
                best[name][row] = min(value, best[name].get(row, value))
    print(f"{'microseconds a call':28}" + "".join(f"{name:>10}" for name in stacks))
    for row in best["weft"]:
        cells = (best[name].get(row) for name in stacks)
        print(f"{row:28}" + "".join(f"{'' if c is None else f'{c:.2f}':>10}" for c in cells))


if __name__ == "__main__":
    main()
