"""Events of a profiler for a compiled graph and each of its steps, named after the user's lines.

The extension `_entry` tells a listener of each step while a profiler of torch is on. Its cost at
other times is a branch a step. While weft records for a report, the listener takes times too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from weft_core import recording
from weft_core.errors import user_frame

from weft_codegen.loops.lower.origins import origin_text
from weft_codegen.loops.program import CPU, Alias, Launch, Program

Origins = tuple[tuple[str, tuple[int, ...]], ...]
"""For each step of a program its name, and the numbers of the graph's nodes that it comes from."""
_Event = torch._C._profiler._RecordFunctionFast
_BEGINS, _ENDS = -2, -1
_LONGEST = 60


def step_origins(program: Program, gm: fx.GraphModule) -> Origins:
    """Return where the steps of a program come from, which was made of the aten graph `gm`."""
    numbers: dict[str, list[int]] = {}
    for number, node in enumerate(gm.graph.nodes):
        numbers.setdefault(origin_text(node), []).append(number)
    rows = []
    for step in program.steps:
        name = step.kernel if isinstance(step, Launch) else str(getattr(step, "op", "view"))
        origins = () if isinstance(step, Alias) else step.origins
        rows.append((name, tuple(n for text in origins for n in numbers.get(text, ()))))
    return tuple(rows)


def _labels(origins: Origins, traces: Sequence[str | None]) -> list[str]:
    """Return a name for each step, such as `kernel0 model.py:31 y = F.gelu(x)`; then the graph's.

    Args:
        origins: where the steps come from.
        traces: the stack of each node of the graph.
    """
    places = [_places([traces[number] for number in numbers]) for _, numbers in origins]
    steps = [f"{name} {place}".rstrip() for (name, _), place in zip(origins, places, strict=True)]
    return [*steps, f"weft graph {next(filter(None, places), '')}".rstrip()]


def _places(traces: Sequence[str | None]) -> str:
    """The user's lines of some nodes; the code of the last one."""
    frames = [user_frame(trace) for trace in traces]
    places = [f"{frame[0].rpartition('/')[2]}:{frame[1]}" for frame in frames if frame]
    code = next((frame[2].strip() for frame in reversed(frames) if frame), "")
    return f"{', '.join(dict.fromkeys(places))} {code}"[:_LONGEST]


class StepEvents:
    """The listener of one program, which several threads may call."""

    def __init__(self, origins: Origins, gm: fx.GraphModule, timed: bool) -> None:
        # The labels are made when a profiler asks for them, and the graph is not kept.
        traces = [node.meta.get("stack_trace") for node in gm.graph.nodes]
        self._labels = functools.cache(functools.partial(_labels, origins, traces))
        self._times: list[float | None] | None = [None] * len(origins) if timed else None
        if self._times is not None:
            times = self._times
            recording.keep("timed", lambda: {"seconds": times})

    def __call__(self, step: int, state: Any) -> Any:
        """Begin a step, or the program (-2), and end what came before; the state is of one call."""
        now = time.perf_counter()
        if step == _BEGINS:
            state = _Call()
        else:
            state.end(self._times, now)
        if step == _ENDS:
            state.events.pop().__exit__(None, None, None)
            return None
        event = _Event(self._labels()[max(step, -1)])
        event.__enter__()
        state.events.append(event)
        state.step, state.since = step, time.perf_counter()
        return state


class _Call:
    """The open events of one call: the program's, and the present step's."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.step, self.since = _BEGINS, 0.0

    def end(self, times: list[float | None] | None, now: float) -> None:
        """End the present step."""
        if self.step >= 0:
            self.events.pop().__exit__(None, None, None)
            if times is not None:
                before = times[self.step]
                elapsed = now - self.since
                times[self.step] = elapsed if before is None else min(before, elapsed)


def timed(program: Program) -> bool:
    """Say whether times are taken: while weft records, of programs of the CPU."""
    return recording.current() is not None and program.device == CPU
