"""`WEFT_TRACE=trace.json`: a profile of a program, from its first compilation to its exit.

It has what torch.profiler shows of weft (each compiled graph, kernel and operator call, named after
the user's lines), and each stage of compiling. `pipeline.py` imports this if the variable is set.
"""

from __future__ import annotations

import atexit
import threading
from typing import Any

import torch
from weft_core import events


class _Open(threading.local):
    def __init__(self) -> None:
        self.stages: list[Any] = []


def start(path: str) -> None:
    """Begin to profile; the trace is written at exit, in Chrome's format.

    Where a profiler runs already, that one goes on, and a notice says that no trace is written.
    """
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
    profile = torch.profiler.profile(activities=activities)
    try:
        profile.start()
    except (RuntimeError, AssertionError) as error:
        events.notify(f"[trace] {path} is not written: {error}")
        return
    opened = _Open()

    def watch(stage: str, detail: str, seconds: float | None) -> None:
        if seconds is None:
            opened.stages.append(torch.profiler.record_function(f"weft {stage} {detail}".rstrip()))
            opened.stages[-1].__enter__()
        elif opened.stages:
            opened.stages.pop().__exit__(None, None, None)

    unwatch = events.watch_stages(watch)

    def finish() -> None:
        unwatch()
        try:
            profile.stop()
            profile.export_chrome_trace(path)
        except (RuntimeError, AssertionError, OSError) as error:
            events.notify(f"[trace] {path} is not written: {error}")

    atexit.register(finish)
