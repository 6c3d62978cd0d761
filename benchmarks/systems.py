"""The three ways to run a model that are compared, each in a process of its own.

Run as a script with a case, a mode and a system, this is a worker: it prints one JSON line when
the first call is done (what compiling cost), then reads `calls <n>` lines and answers each with
the seconds that `n` calls took, so that the parent can measure all systems in turn.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

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


MODES = {"inference": inference, "training": training}


def worker(name: str, mode: str, system: str) -> None:
    """Compile one case, then time calls as the parent asks."""
    prepare = MODES[mode](ZOO[name])
    # Making the model is not timed; importing the compiler, compiling and the first call are.
    start = time.perf_counter()
    step = prepare(system)
    step()
    print(json.dumps({"first": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        calls = int(line.split()[1])
        start = time.perf_counter()
        for _ in range(calls):
            step()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    worker(*sys.argv[1:])
