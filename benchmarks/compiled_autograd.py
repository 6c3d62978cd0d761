"""A backward on a cache hit: eager, weft's compiled autograd, and torch's, as ratios.

    python benchmarks/compiled_autograd.py [--layers 16] [--width 16] [--torch]

The forward is eager, so what is measured is the engine's lookup and the compiled backward. Eager
and weft take turns. The engine hands each of its functions to one owner in a process, so torch's
own compiled autograd is measured in a process of its own, against eager in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = 200


def mlp(layers: int, width: int) -> torch.nn.Module:
    """A stack of linear layers and ReLUs."""
    torch.manual_seed(0)
    parts = [p for _ in range(layers) for p in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts)


def backward_seconds(model: torch.nn.Module, x: torch.Tensor, scope: Callable[[], Any]) -> float:
    """Seconds of one backward under a scope."""
    model.zero_grad(set_to_none=True)
    loss = model(x).sum()
    start = time.perf_counter()
    with scope():
        loss.backward()
    return time.perf_counter() - start


def step_seconds(model: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of an eager forward and backward."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - start


def in_turn(cases: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Run the cases in turn; return the median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(ROUNDS + 20):
        for name, case in cases.items():
            seconds = case()
            if round_ >= 20:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


# Imported late: in one process only one of the two can own the engine's functions.
def weft_scopes() -> dict[str, Callable[[], Any]]:
    """weft with a compiler that does nothing, and with the code generator."""
    import weft  # noqa: PLC0415
    from weft_compiled_autograd import enable, graph_compiler  # noqa: PLC0415

    as_it_is, codegen = lambda gm: gm, graph_compiler(weft.lookup_backend("codegen"))
    return {"weft, graph as it is": lambda: enable(as_it_is), "weft": lambda: enable(codegen)}


def torch_scopes(backend: str) -> dict[str, Callable[[], Any]]:
    """torch's compiled autograd; its cache does not tell compilers apart, so one at a time."""
    from torch._dynamo.compiled_autograd import _enable  # noqa: PLC0415

    def compiler(gm: Any) -> Any:
        return torch.compile(gm, backend=backend)

    return {f"torch, {backend}": lambda: _enable(compiler)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--torch", action="store_true", help="measure torch's too (slow to start)")
    parser.add_argument("--only", choices=("eager", "inductor"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    model, x = mlp(args.layers, args.width), torch.randn(10, args.width)
    scopes = torch_scopes(args.only) if args.only else weft_scopes()
    scopes = {"eager": contextlib.nullcontext, **scopes}
    cases: dict[str, Callable[[], float]] = {
        name: (lambda scope=scope: backward_seconds(model, x, scope))
        for name, scope in scopes.items()
    }
    found = in_turn({"eager, forward and backward": lambda: step_seconds(model, x), **cases})
    whole = found["eager, forward and backward"]
    for name, seconds in found.items():
        print(f"{name:32} {seconds * 1e6:9.0f} us {seconds / whole:7.2f}x", flush=True)
    if args.torch and args.only is None:
        for backend in ("eager", "inductor"):
            subprocess.run([sys.executable, *sys.argv, "--only", backend], check=True)


if __name__ == "__main__":
    main()
