"""Peak memory of a backward above what lived before the forward: eager, and weft.

    python benchmarks/backward_memory.py

Counted are the bytes of torch's CPU allocator, from the profiler's events. Parameters and inputs
lived before.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
import weft
from partition_memory import CASES
from torch.profiler import ProfilerActivity, profile, record_function
from weft_compiled_autograd import graph_compiler


def peak(forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], None]) -> int:
    """Most bytes in use at any time of the backward."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = forward()
        with record_function("backward"):
            backward(loss)
    events = list(recorded.profiler.kineto_results.events())
    start = next(event.start_ns() for event in events if event.name() == "backward")
    in_use = top = 0
    for event in sorted(
        (event for event in events if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    ):
        if event.start_ns() >= start:
            top = max(top, in_use)
        in_use += event.nbytes()
    return max(top, in_use)


def main() -> None:
    """Print one row for each model."""
    compiler = graph_compiler(weft.lookup_backend("codegen"))
    scopes: dict[str, tuple[bool, Callable[[], Any]]] = {
        "eager": (False, contextlib.nullcontext),
        "eager, backward captured": (False, lambda: weft.compiled_autograd.enable(compiler)),
        "weft.compile": (True, contextlib.nullcontext),
        "both": (True, lambda: weft.compiled_autograd.enable(compiler)),
    }
    for name, (make, shape) in CASES.items():
        torch.manual_seed(0)
        model, x = make(), torch.randn(shape)
        functions = {False: model, True: weft.compile(model)}
        for label, (compiled, scope) in scopes.items():

            def forward(function: Any = functions[compiled], x: Any = x) -> torch.Tensor:
                return function(x).square().sum()

            def backward(loss: torch.Tensor, scope: Any = scope) -> None:
                with scope():
                    loss.backward()

            for _ in range(30):  # until each graph has been measured against eager, and settled
                model.zero_grad()
                backward(forward())
            model.zero_grad()
            bytes_ = peak(forward, backward)
            print(f"{name:14} {label:26} {bytes_:12,}", flush=True)
        weft.reset()


if __name__ == "__main__":
    main()
