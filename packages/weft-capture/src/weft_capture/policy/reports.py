"""Records of the outcome of each frame for `weft.report()`, and notices of frames that run eagerly.

A frame is one function of the program, with the resume functions after its graph breaks. A record
lives as long as its code object and its `Capture`; `collected` keeps its contents until `reset()`.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from traceback import FrameSummary
from typing import Any

from torch.fx import GraphModule
from weft_core import recording
from weft_core.events import counters, notify
from weft_guards import CodeCache

from weft_capture.breaks import BreakRecord

_CALLS = ("call_function", "call_method", "call_module")


def count_ops(graph: GraphModule) -> int:
    """Return the number of operations in a graph."""
    return sum(node.op in _CALLS for node in graph.graph.nodes)


Key = tuple[str, str, int]
"""Name, file and first line of a function."""
_MOST = 100  # records of dead code objects, by function


def key_of(code: types.CodeType) -> Key:
    """Return the function of a code object, which may be a resume function."""
    name = code.co_qualname.partition(".<resume at ")[0]
    return name, code.co_filename, code.co_firstlineno


@dataclass(eq=False)
class CodeLog:
    """The record of one code object: a function or a resume function.

    Args:
        key: the function.
        cache: the compiled entries.
        ops: operations of each graph.
        breaks: why its captures ended early.
        lost: why it runs eagerly; None while it does not.
        not_kept: why other processes capture it again, with `config.caching_precompile`.
        uncompiled: why graphs of it run op by op.
        told: the notices that users got about it.
        dropped: reports leave it out.
    """

    key: Key
    cache: CodeCache | None = None
    ops: list[int] = field(default_factory=list)
    breaks: list[BreakRecord] = field(default_factory=list)
    lost: BreakRecord | None = None
    not_kept: list[str] = field(default_factory=list)
    uncompiled: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    dropped: bool = False

    @classmethod
    def of(cls, code: types.CodeType, cache: CodeCache | None) -> CodeLog:
        """Return an empty record of a code object."""
        return cls(key_of(code), cache)

    def __del__(self) -> None:
        if not self.dropped and not sys.is_finalizing():
            gather([self], collected, _MOST)

    def lose(self, code: types.CodeType, record: BreakRecord) -> None:
        """Note that a frame runs eagerly, and say so the first time."""
        if self.lost is None:
            self.lost = record
            name, _, line = code.co_qualname.partition(".<resume at ")
            name += f" from line {line[:-1]} on" if line else ""
            head, _, rest = str(record).partition("]")
            self.told.append(f"{head}] {name} runs eagerly{rest}")
            notify(self.told[-1])


def graph_record(log: CodeLog, code: types.CodeType, graph: GraphModule) -> dict[str, Any]:
    """Return what a recording keeps of a captured graph."""
    rows = recording.graph_rows(graph.graph)
    known = {
        "frame": log.key,
        "piece": code.co_qualname,
        "number": counters["capture"]["graphs"] - 1,
    }
    return {**known, "ops": count_ops(graph), "rows": rows}


def lost_record(code: types.CodeType, reason: str, detail: str) -> BreakRecord:
    """Return the record of a frame that runs eagerly as a whole; `reason` is a break code."""
    where = FrameSummary(code.co_filename, code.co_firstlineno, code.co_name, lookup_line=False)
    return BreakRecord(reason, detail, (where,))


@dataclass
class FrameReport:
    """The outcome of one function.

    Args:
        name, filename, line: the function.
        pieces: code objects captured for it: the function, and its resume functions.
        graphs, ops: graphs that begin in it, and operations in them.
        breaks: its graph breaks.
        guards: guards of its compiled pieces.
        recompiles: why pieces were compiled again.
        hits, misses: calls of its pieces that found compiled code, and that did not.
        lost: why some of it runs eagerly.
        not_kept: why other processes capture some of it again.
        uncompiled: why graphs of it run op by op.
        told: the notices that users got about it.
        caches: its compiled entries, while they live.
        codes: the code objects of its pieces and their entries, while they live.
    """

    name: str
    filename: str
    line: int
    pieces: int = 0
    graphs: int = 0
    ops: int = 0
    breaks: list[BreakRecord] = field(default_factory=list)
    guards: int = 0
    recompiles: list[str] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    lost: list[BreakRecord] = field(default_factory=list)
    not_kept: list[str] = field(default_factory=list)
    uncompiled: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    caches: list[weakref.ref[CodeCache]] = field(default_factory=list, repr=False)
    codes: list[tuple[weakref.ref[types.CodeType], weakref.ref[CodeCache]]] = field(
        default_factory=list, repr=False
    )

    def add(self, log: CodeLog) -> None:
        """Count one code object in."""
        cache = log.cache
        self.pieces += 1
        self.graphs += len(log.ops)
        self.ops += sum(log.ops)
        self.breaks += log.breaks
        self.lost += [] if log.lost is None else [log.lost]
        self.not_kept += log.not_kept
        self.uncompiled += log.uncompiled
        self.told += log.told + log.uncompiled
        if cache is not None:
            self.caches.append(weakref.ref(cache))
            self.guards += sum(len(entry.guards) for entry in cache.entries)
            self.recompiles += cache.recompiles
            self.hits += cache.lookup.hits
            self.misses += cache.lookup.misses

    def __str__(self) -> str:
        counts = (
            f"{self.graphs} graphs, {self.ops} ops, {len(self.breaks)} breaks, "
            f"{self.guards} guards, {len(self.recompiles)} recompiles, "
            f"{self.hits} hits, {self.misses} misses"
        )
        lines = [f"{self.name} ({self.filename}:{self.line})", f"  {counts}"]
        lines += [f"  eager: {_short(record)}" for record in self.lost]
        for text, times in Counter(self.uncompiled).items():
            graphs = f"{times} graphs run" if times > 1 else "a graph runs"
            lines.append(f"  eager: {graphs} op by op: {text}")
        if not self.graphs and not self.lost:
            lines.append("  nothing of it is in a graph")
        for text, times in Counter(_short(record) for record in self.breaks).items():
            lines.append(f"  break: {text}" + (f" ({times} times)" if times > 1 else ""))
        lines += [f"  recompiled: {reason}" for reason in self.recompiles]
        lines += [f"  not kept: {reason}" for reason in self.not_kept]
        return "\n".join(lines)


def _short(record: BreakRecord) -> str:
    detail = f" ({record.detail})" if record.detail else ""
    return f"[{record.code}]{detail} at {record.where}: {record.advice}"


@dataclass(frozen=True)
class Report:
    """All frames that capture has seen since the last reset, in order.

    Args:
        frames: the outcome of each.
        told: other notices since then.
    """

    frames: tuple[FrameReport, ...]
    told: tuple[str, ...] = ()

    @property
    def graph_count(self) -> int:
        """Number of graphs."""
        return sum(frame.graphs for frame in self.frames)

    @property
    def break_count(self) -> int:
        """Number of graph breaks."""
        return sum(len(frame.breaks) for frame in self.frames)

    @property
    def lost(self) -> tuple[FrameReport, ...]:
        """The frames of which some part runs eagerly."""
        return tuple(frame for frame in self.frames if frame.lost or frame.uncompiled)

    def __str__(self) -> str:
        head = (
            f"{len(self.frames)} frames, {self.graph_count} graphs, {self.break_count} breaks, "
            f"{len(self.lost)} frames partly or wholly eager"
        )
        return "\n".join([head, *map(str, self.frames), *(f"told: {text}" for text in self.told)])


Frames = dict[Key, FrameReport]
collected: Frames = {}
"""The outcome of frames of compiled functions that no longer exist."""


def gather(logs: Iterable[CodeLog], frames: Frames, most: int = sys.maxsize) -> None:
    """Merge the records of code objects by function into `frames`, at most `most` of each."""
    for log in logs:
        frame = frames.setdefault(log.key, FrameReport(*log.key))
        if frame.pieces < most:
            frame.add(log)


def add_codes(caches: Iterable[tuple[types.CodeType, CodeCache]], frames: Frames) -> None:
    """Add living code objects and their entries to the reports of their functions."""
    for code, cache in caches:
        frame = frames.get(key_of(code))
        if frame is not None:
            frame.codes.append((weakref.ref(code), weakref.ref(cache)))
