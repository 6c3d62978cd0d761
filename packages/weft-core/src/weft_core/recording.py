"""What `weft.report()` keeps of compilations: graphs, programs, generated code, and when each was.

Nothing is kept unless recording is on. Stages pass functions to `keep` and `inside`, which are
called only then, so that a stage without a reader costs one comparison.

    Recording
    ├── Record kind="graph"               one captured graph            (weft_capture)
    │   ├── Record kind="aten"            a joint, forward or backward  (weft_aot)
    │   │   ├── Record kind="program"     loops, schedule, memory plan  (weft_codegen)
    │   │   ├── Record kind="source"      C or Triton                   (weft_codegen)
    │   │   ├── Record kind="timed"       the shortest time of each step
    │   │   └── Record kind="measured"    the whole graph against eager
    ├── Record kind="recompile"           why a frame is compiled again (weft_guards)
    └── Span                              a timed stage of compiling
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from weft_core import events
from weft_core.errors import user_frame


@dataclass(frozen=True)
class Record:
    """One thing that a stage made.

    Args:
        number: its position among all records.
        kind: what it is, as the module's page shows.
        parent: the number of the record that it belongs to.
        seconds: when it was made, from the start of the recording.
        data: values that JSON knows.
    """

    number: int
    kind: str
    parent: int | None
    seconds: float
    data: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A stage of compiling: its name and object, thread, start and duration in seconds."""

    stage: str
    detail: str
    thread: int
    start: float
    seconds: float


@dataclass
class Recording:
    """Everything kept since recording was switched on."""

    began: float = field(default_factory=time.perf_counter)
    records: list[Record] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, parent: int | None, data: dict[str, Any]) -> int:
        """Add a record; returns its number."""
        with self.lock:
            number, now = len(self.records), time.perf_counter() - self.began
            self.records.append(Record(number, kind, parent, now, data))
        return number

    def watch(self, stage: str, detail: str, seconds: float | None) -> None:
        """Take the end of a stage (see `events.watch_stages`)."""
        if seconds is not None:
            start = time.perf_counter() - self.began - seconds
            self.spans.append(Span(stage, detail, threading.get_ident(), start, seconds))


class _Parents(threading.local):
    def __init__(self) -> None:
        self.numbers: list[int] = []


_parents = _Parents()
_active: Recording | None = None
_unwatch: Callable[[], None] | None = None


def switch(on: bool) -> None:
    """Begin a recording, or drop the present one."""
    global _active, _unwatch
    if on == (_active is not None):
        return
    if _unwatch is not None:
        _unwatch()
    _active = Recording() if on else None
    _unwatch = None if _active is None else events.watch_stages(_active.watch)


def current() -> Recording | None:
    """Return the recording that is on, or None."""
    return _active


def keep(kind: str, make: Callable[[], dict[str, Any]], parent: int | None = None) -> None:
    """Record what `make` returns, if recording is on.

    Args:
        kind: see the module's page.
        make: returns values that JSON knows.
        parent: a number that `here` returned; default: the innermost `inside` of this thread.
    """
    if _active is not None:
        with events.span("recording"):
            _active.add(kind, here() if parent is None else parent, make())


@contextmanager
def inside(
    kind: str, make: Callable[[], dict[str, Any]], parent: int | None = None
) -> Iterator[None]:
    """Record as `keep` does; what this thread records in the block belongs to that record."""
    if _active is None:
        yield
        return
    parent = here() if parent is None else parent
    with events.span("recording"):
        _parents.numbers.append(_active.add(kind, parent, make()))
    try:
        yield
    finally:
        _parents.numbers.pop()


def here() -> int | None:
    """Return the number of the innermost record that this thread is inside of, or None."""
    return _parents.numbers[-1] if _parents.numbers and _active is not None else None


# ---- graphs as rows


def graph_rows(graph: fx.Graph) -> list[tuple[str, str]]:
    """Return a row a node: its text, and the user's `file:line` that it comes from, or ""."""
    return [(_node_text(node), location(node)) for node in graph.nodes]


def location(node: fx.Node) -> str:
    """Return `file:line` of the user's code that a node stands for, or an empty text."""
    return ":".join(user_frame(node.meta.get("stack_trace"))[:2])


def _node_text(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    value = node.meta.get("val", node.meta.get("example_value"))
    name = f"{node.name}: {_value(value)}" if value is not None else node.name
    if node.op == "placeholder":
        return name
    if node.op == "get_attr":
        return f"{name} = self.{node.target}"
    arguments = [_argument(value) for value in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return f"{name} = {_target(node)}({', '.join(arguments)})"


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return f"{'.' if node.op == 'call_method' else 'self.'}{target}"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def _argument(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return value.name if isinstance(value, fx.Node) else str(value).removeprefix("torch.")


def _value(value: Any) -> str:
    """Dtype, sizes and device of a tensor (`float32[2, 3]`); the type's name of anything else."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        device = f" {value.device}" if value.device.type != "cpu" else ""
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]{device}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"
    return str(value) if isinstance(value, torch.SymInt) else type(value).__name__
