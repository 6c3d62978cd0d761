"""Backwards on a cache hit and whole training steps: eager, weft, and torch, as ratios.

    python benchmarks/compiled_autograd.py [--layers 16] [--width 16] [--steps] [--torch]

An MLP with an eager forward shows the engine's lookup and the compiled backward; `--steps` trains a
GPT, with hooks that scale every gradient and without. Eager and weft take turns. The engine hands
each of its functions to one owner in a process, so torch's own compiled autograd is measured in a
process of its own, against eager in the same process.
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
import torch.nn.functional as F

ROUNDS = 100


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


class Block(torch.nn.Module):
    """A GPT block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time_, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(batch, time_, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Training:
    """A small GPT, its optimizer and one batch."""

    def __init__(self, hooks: bool, width: int = 64, vocab: int = 256) -> None:
        torch.manual_seed(0)
        blocks = [Block(width, 4) for _ in range(4)]
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(vocab, width), *blocks, torch.nn.Linear(width, vocab)
        )
        self.function: Callable[..., Any] = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.ids = torch.randint(vocab, (8, 32))
        for parameter in self.model.parameters() if hooks else ():
            parameter.register_hook(lambda grad: grad * 0.5)

    def step(self, scope: Callable[[], Any] = contextlib.nullcontext) -> torch.Tensor:
        """zero_grad, forward, backward, step."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.function(self.ids).flatten(0, 1), self.ids.flatten())
        with scope():
            loss.backward()
        self.optimizer.step()
        return loss


def step_cases(hooks: bool) -> dict[str, Callable[[], float]]:
    """Training steps: eager, model compiled, backward captured as well, whole step compiled."""
    import weft  # noqa: PLC0415

    cases: dict[str, Callable[[], Any]] = {"eager": Training(hooks).step}
    alone, captured, whole = Training(hooks), Training(hooks), Training(hooks)
    alone.function = weft.compile(alone.model)
    cases["weft, the model"] = alone.step
    captured.function, compiler = weft.compile(captured.model), weft.compile()
    cases["weft, model and backward"] = lambda: captured.step(
        lambda: weft.compiled_autograd.enable(compiler)
    )
    compiled = weft.compile(whole.step)

    def all_of_it() -> None:
        with weft.config.patch(compiled_autograd=True):
            compiled()

    cases["weft, the whole step"] = all_of_it
    return {name: (lambda case=case: seconds(case)) for name, case in cases.items()}


def torch_step_cases(hooks: bool, backend: str) -> dict[str, Callable[[], float]]:
    """Training steps: eager, model compiled by torch, and its compiled autograd as well."""
    cases: dict[str, Callable[[], Any]] = {"eager": Training(hooks).step}
    alone, captured = Training(hooks), Training(hooks)
    alone.function = torch.compile(alone.model, backend=backend)
    cases[f"torch, {backend}, the model"] = alone.step
    captured.function = torch.compile(captured.model, backend=backend)
    ((name, scope),) = torch_scopes(backend).items()
    cases[f"{name}, model and backward"] = lambda: captured.step(scope)
    return {name: (lambda case=case: seconds(case)) for name, case in cases.items()}


def seconds(case: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    case()
    return time.perf_counter() - start


def nodes_of(loss: torch.Tensor) -> int:
    """The size of an autograd graph."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [child for child, _ in node.next_functions]
    return len(seen)


def lookup_seconds(backward: Callable[[], float]) -> float:
    """Seconds from the start of a backward to the start of its graph: the engine's key, guards."""
    from weft_compiled_autograd.cache import CompiledBackward  # noqa: PLC0415

    started: list[float] = []
    run = CompiledBackward.run

    def noted(self: Any, *args: Any) -> Any:
        started.append(time.perf_counter())
        return run(self, *args)

    CompiledBackward.run = noted  # type: ignore[method-assign]
    try:
        found = []
        for _ in range(ROUNDS):
            took = backward()
            found.append(took - (time.perf_counter() - started[-1]))
        return statistics.median(found)
    finally:
        CompiledBackward.run = run  # type: ignore[method-assign]


def show(times: dict[str, float], base: str) -> None:
    """Print each time and its ratio to one of them."""
    for name, took in times.items():
        print(f"{name:32} {took * 1e6:9.0f} us {took / times[base]:7.2f}x", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", action="store_true", help="train a GPT too")
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
    whole = "eager, forward and backward"
    show(in_turn({whole: lambda: step_seconds(model, x), **cases}), whole)
    if args.only is None:
        nodes = nodes_of(model(x).sum())
        lookup = lookup_seconds(cases["weft"])
        each = lookup / nodes * 1e9
        print(f"lookup: {lookup * 1e6:.0f} us, {each:.0f} ns for each of {nodes} autograd nodes")
    for hooks in (True, False) if args.steps else ():
        print("a GPT training step", "with a hook on every gradient" if hooks else "without hooks")
        cases = torch_step_cases(hooks, args.only) if args.only else step_cases(hooks)
        show(in_turn(cases), "eager")
    if args.torch and args.only is None:
        for backend in ("eager", "inductor"):
            subprocess.run([sys.executable, *sys.argv, "--only", backend], check=True)


if __name__ == "__main__":
    main()
