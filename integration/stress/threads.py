"""Threads that compile and call at once."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable

import torch
import weft

from .programs import CASES, Case, Net, difference, many


def run(threads: int = 8, minutes: float = 10.0) -> tuple[list[str], int]:
    """Call shared and private functions from several threads; return failures and calls.

    Shared: every thread calls the same compiled functions and module, with sizes that change, so
    that one compiles while others call. Private: each compiles functions of its own in turn.
    """
    end = time.monotonic() + minutes * 60
    shared = {name: weft.compile(case.function) for name, case in CASES.items()}
    torch.manual_seed(0)
    net = Net()
    module = (weft.compile(net), Case(net.forward, CASES["normalised"].make))
    failures: list[str] = []
    calls = [0] * threads

    def work(number: int) -> None:
        private = many(4)
        step = number
        while time.monotonic() < end and len(failures) < 20:
            name = list(CASES)[step % len(CASES)]
            report(name, difference(shared[name], CASES[name], step))
            report("module", _module(*module, step))
            own = f"program{step % 4}"
            compiled = weft.compile(private[own].function, dynamic=(None, True)[step % 2])
            report(own, difference(compiled, private[own], step))
            calls[number] += 3
            step += 1

    def report(name: str, text: str) -> None:
        if text:
            failures.append(f"{name} {text}")

    faulthandler.enable()
    workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(end - time.monotonic(), 0) + 120)
        if worker.is_alive():
            failures.append("a thread hangs")
            faulthandler.dump_traceback()
            break
    return failures, sum(calls)


def _module(compiled: Callable[..., torch.Tensor], case: Case, step: int) -> str:
    """Compare one forward and backward of a module; gradients of its inputs only."""

    def only_input(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, weight: function(x) + weight.sum()

    return difference(only_input(compiled), Case(only_input(case.function), case.make), step)
