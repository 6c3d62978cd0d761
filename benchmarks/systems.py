"""The three ways to run a model that are compared, each in a process of its own.

Run as a script with a case, a mode and a system, this is a worker: it prints one JSON line when
the first call is done (what compiling cost), then reads `calls <n>` lines and answers each with
the seconds that `n` calls took, so that the parent can measure all systems in turn. A line `peak`
is answered with the most bytes that one call has in use above what lived before it.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from models import ZOO
from models.case import Case, loss_of


def _weft(model: nn.Module) -> Callable[..., Any]:
    import weft  # noqa: PLC0415  its import is part of what is measured

    return weft.compile(model)


SYSTEMS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "eager": lambda model: model,
    "weft": _weft,
    "torch": lambda model: torch.compile(model),
}


def inference(case: Case) -> Callable[[str], Callable[[], None]]:
    """Return what makes one inference call under a system."""
    model = case.model()
    args, kwargs = case.inputs()

    def prepare(system: str) -> Callable[[], None]:
        call = SYSTEMS[system](model)

        def step() -> None:
            with torch.no_grad():
                call(*args, **kwargs)

        return step

    return prepare


def training(case: Case) -> Callable[[str], Callable[[], None]]:
    """Return what makes one forward and backward under a system."""
    model = case.model(training=True)
    args, kwargs = case.inputs()
    parameters = list(model.parameters())

    def prepare(system: str) -> Callable[[], None]:
        call = SYSTEMS[system](model)

        def step() -> None:
            loss_of(call(*args, **kwargs)).backward()
            for parameter in parameters:
                parameter.grad = None

        return step

    return prepare


class Tensors(nn.Module):
    """As many parameters as a model of some size has."""

    def __init__(self, count: int = 200, size: int = 64) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size, size) for _ in range(count))


def optimizer(case: Case) -> Callable[[str], Callable[[], None]]:
    """Return what makes one AdamW step over a case's parameters, with eager's multi-tensor form."""
    model = case.model(training=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def prepare(system: str) -> Callable[[], None]:
        adamw = torch.optim.AdamW(model.parameters(), foreach=True)
        # The states of an optimizer are made by its first step, once.
        adamw.step()
        return SYSTEMS[system](adamw.step)

    return prepare


CASES = {name: case for name, case in ZOO.items() if case.benchmark}
CASES["adamw_200"] = Case("adamw_200", Tensors, lambda: ((), {}))
Prepare = Callable[[Case], Callable[[str], Callable[[], None]]]
MODES: dict[str, Prepare] = {"inference": inference, "training": training}


def modes_of(name: str) -> dict[str, Prepare]:
    """Return how a case is measured in each mode that it has."""
    return {"training": optimizer} if name == "adamw_200" else MODES


def peak(step: Callable[[], None]) -> int:
    """Most bytes that one call has in use at a time, above what lived before it.

    What torch's allocator gives and takes back, by the profiler's events. Neither system's arrays
    on the stack are seen (in weft's programs up to 4 kB of temporaries beside those of kernels).
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        top = max(top, in_use)
    return top


def worker(name: str, mode: str, system: str) -> None:
    """Compile one case, then time calls as the parent asks."""
    prepare = modes_of(name)[mode](CASES[name])
    # Making the model is not timed; importing the compiler, compiling and the first call are.
    start = time.perf_counter()
    step = prepare(system)
    step()
    serve(step, time.perf_counter() - start, lambda: {"bytes": peak(step)})


def serve(step: Callable[[], Any], first: float, peak: Callable[[], dict[str, float]]) -> None:
    """Say what the first call took, then answer the parent's lines until there are no more.

    Args:
        peak: answers the line `peak`.
    """
    print(json.dumps({"first": first}), flush=True)
    for line in sys.stdin:
        if line.startswith("peak"):
            print(json.dumps(peak()), flush=True)
            continue
        calls = int(line.split()[1])
        start = time.perf_counter()
        for _ in range(calls):
            step()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    worker(*sys.argv[1:])
