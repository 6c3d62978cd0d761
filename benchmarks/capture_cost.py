"""What capture costs: time per bytecode instruction and per operation, with breaks and without.

    python benchmarks/capture_cost.py [--repeats 5]

Each program runs once, captured for a backend that compiles nothing. `traced` counts the
instructions that capture executed, `once` those that the program executes in eager: where breaks
cost no second trace the two agree. `capture` is symbolic execution alone; `all` is the whole first
call, with guards, generated code and the run. The least of the repeats is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import weft_capture
from weft_core import events

LAYERS = 12


def block(x: torch.Tensor, weight: torch.Tensor, stop: bool) -> torch.Tensor:
    """A residual block in the style of a transformer's perceptron, with a break inside."""
    y = torch.nn.functional.layer_norm(x, (x.shape[-1],))
    y = torch.nn.functional.gelu(y @ weight)
    if stop:
        weft_capture.graph_break()
    return x + y @ weight.T


def stage(x: torch.Tensor, weight: torch.Tensor, stop: bool) -> torch.Tensor:
    """A call level more."""
    return block(x * 0.5, weight, stop) * 2


def model(breaks: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return `LAYERS` blocks, of which the first `breaks` break the graph."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for index in range(LAYERS):
            x = stage(x, weight, index < breaks)
        return x

    return forward


def unrolled(breaks: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the blocks written one after the other: nothing is shared between the pieces."""
    lines = [f"    x = stage(x, weight, {index < breaks})" for index in range(LAYERS)]
    source = "\n".join(["def forward(x, weight):", *lines, "    return x"])
    namespace = {"stage": stage}
    exec(source, namespace)
    made: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = namespace["forward"]  # type: ignore[assignment]
    return made


def executed(function: Callable[..., object], *args: object) -> int:
    """Return how many bytecode instructions of this file a call executes in eager."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal count
        if frame.f_code.co_filename not in (__file__, "<string>"):  # type: ignore[attr-defined]
            return None
        frame.f_trace_opcodes = True  # type: ignore[attr-defined]
        count += event == "opcode"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        function(*args)
    finally:
        sys.settrace(None)
    return count


def measure(function: Callable[..., object], repeats: int) -> tuple[float, float, int, int, int]:
    """Return seconds of capture and of the whole first call, instructions, ops and graphs."""
    x, weight = torch.randn(4, 8), torch.randn(8, 16)
    rows = []
    for _ in range(repeats):
        weft_capture.reset()
        events.reset()
        optimised = weft_capture.capture(function, lambda graph, inputs: graph.forward)
        start = time.perf_counter()
        optimised(x, weight)
        whole = time.perf_counter() - start
        stats = events.counters["stats"]
        rows.append((
            events.timings["capture"].seconds,
            whole,
            events.counters["capture"]["instructions"],
            stats["ops"],
            stats["unique_graphs"],
        ))  # fmt: skip
    return min(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    x, weight = torch.randn(4, 8), torch.randn(8, 16)
    print(f"{'program':<24}{'graphs':>7}{'ops':>6}{'traced':>8}{'once':>7}"
          f"{'capture ms':>12}{'us/instr':>10}{'us/op':>8}{'all ms':>9}")  # fmt: skip
    for make in (model, unrolled):
        for breaks in (0, 1, 4, LAYERS):
            function = make(breaks)
            capture, whole, instructions, ops, graphs = measure(function, repeats)
            once = executed(function, x, weight)
            print(f"{make.__name__ + f', {breaks} breaks':<24}{graphs:>7}{ops:>6}"
                  f"{instructions:>8}{once:>7}{capture * 1e3:>12.1f}"
                  f"{capture / instructions * 1e6:>10.1f}{capture / ops * 1e6:>8.0f}"
                  f"{whole * 1e3:>9.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
