"""Run programs that come as lines of JSON, and answer in lines of JSON.

An empty line says that eager is done with a program: a crash before that is eager's.
Started by pool.py with a cache folder of its own. What programs print goes to stderr.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch


def verdict_of(task: dict[str, Any]) -> dict[str, Any]:
    """Run the program of a task: its own, or the generator's for a seed."""
    from . import Program, Verdict, generator
    from .runner import run

    parts = 1
    eager_done: Callable[[], None] = task.pop("eager_done")
    os.environ["CC"] = task["compiler"]
    try:
        if "generator" in task:
            program = generator(task["generator"])(task["seed"])
        else:
            program = Program(**{**task["program"], "calls": tuple(task["program"]["calls"])})
        parts = program.parts
    except Exception:
        return {**asdict(Verdict("generator", traceback.format_exc())), "parts": parts}
    try:
        with torch.device(task["device"]) if task["device"] != "cpu" else nullcontext():
            verdict = run(program, task["backend"], eager_done)
    except Exception:
        verdict = Verdict("harness", traceback.format_exc())
    return {**asdict(verdict), "parts": parts, "last": not _usable(task["device"])}


def _usable(device: str) -> bool:
    """Whether a device still works: a failed assertion in a kernel ends it for the process."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    """Answer until there is nothing to read."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    for number, line in enumerate(sys.stdin):
        found = verdict_of(
            {**json.loads(line), "eager_done": lambda: print(file=answers, flush=True)}
        )
        if number % 8 == 0:
            gc.collect()
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
