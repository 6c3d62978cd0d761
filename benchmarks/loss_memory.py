"""A language model's head and loss, forward and backward: time, and peak memory above what lived.

    python benchmarks/loss_memory.py [--device cuda] [--only gpt2] [--rows 8192] [--torch]

Compares eager, weft with all logits in memory (`chunk_cross_entropy=False`), weft in chunks, and
with `--torch` torch.compile, under bfloat16 autocast on a GPU and in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import weft
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

HEADS = {"gpt2": (768, 50257), "llama3": (4096, 128256)}
"""Width of the hidden states, and number of tokens."""


class Head(nn.Module):
    """The norm, the head and the loss of a language model."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """hidden: (1, rows, width); labels: (1, rows) int64."""
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def peak(step: Callable[[], None], device: str) -> float:
    """Most MiB in use during a step above what lived before."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        top = max(top, in_use)
    return top / 2**20


def seconds(step: Callable[[], None], device: str, runs: int) -> float:
    """The median time of a step."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, compile_: Callable[[Any], Any], chunked: bool, args: Any) -> str:
    """A row of the table: milliseconds and MiB of a step, gradients included in the memory."""
    torch.manual_seed(0)
    width, tokens = HEADS[name]
    head = Head(width, tokens).to(args.device)
    hidden = torch.randn(1, args.rows, width, device=args.device, requires_grad=True)
    labels = torch.randint(0, tokens, (1, args.rows), device=args.device)
    function = compile_(head)

    def step() -> None:
        head.zero_grad()
        hidden.grad = None
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss = function(hidden, labels)
        loss.backward()

    with weft.config.patch(chunk_cross_entropy="auto" if chunked else False):
        start = time.perf_counter()
        step()
        first = time.perf_counter() - start
        for _ in range(8 if args.device == "cuda" else 1):
            step()  # until weft has compared itself with eager
        head.zero_grad()
        hidden.grad = None
        most = peak(step, args.device)
        return f"{seconds(step, args.device, args.runs) * 1e3:9.1f} {most:9.0f} {first:9.1f}"


def main() -> None:
    """Print a table for each head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", choices=HEADS, default=[*HEADS])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    compilers: dict[str, tuple[Callable[[Any], Any], bool]] = {
        "eager": (lambda module: module, False),
        "weft, all logits": (weft.compile, False),
        "weft, chunks": (weft.compile, True),
    }
    if args.torch:
        compilers["torch.compile"] = (torch.compile, False)
    for name in args.only:
        print(f"{name}, {args.rows} rows on {args.device}:     ms   MiB peak   first s")
        for label, (compile_, chunked) in compilers.items():
            weft.reset()
            print(f"  {label:24}", measure(name, compile_, chunked, args), flush=True)


if __name__ == "__main__":
    main()
