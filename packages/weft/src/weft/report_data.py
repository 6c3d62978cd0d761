"""The data of a report's page: plain values for JSON, in parts that the page reads one by one.

summary    totals, stages, one row a frame, notices, recompiles, spans
f<number>  a frame: breaks, guards, recompiles, source, its graphs as trees of records
other      graphs that belong to no frame
"""

from __future__ import annotations

import ast
import bisect
import linecache
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import weft_capture
from weft_capture import BreakRecord, FrameReport, Report
from weft_core.events import counters
from weft_core.recording import Record, Recording

Data = dict[str, Any]
Stages = Sequence[tuple[str, float, int]]
_CONTEXT = 3  # lines around one that is in no function
_MOST_CODE = 200  # frames whose rewritten code is shown; `weft.show_code` shows any


def page_parts(
    report: Report, stages: Stages, kept: Recording | None
) -> Iterator[tuple[str, Data]]:
    """Yield the parts of the page's data, by name.

    Args:
        report: the frames.
        stages: seconds and count of each stage, the slowest first.
        kept: the recording, if there is one.
    """
    trees = _trees(kept)
    known = set()
    frames = []
    for number, frame in enumerate(report.frames):
        key = (frame.name, frame.filename, frame.line)
        known.add(key)
        code = weft_capture.code_of(frame) if kept and number < _MOST_CODE else ""
        yield f"f{number}", {**_frame(frame, trees.get(key, [])), "code": code}
        frames.append(_row(frame))
    rest = [tree for key, group in trees.items() if key not in known for tree in group]
    yield "other", {"graphs": rest, "sources": _sources(rest, ())}
    yield "summary", {**_summary(report, stages, kept), "frames": frames, "other": len(rest)}


def _bandwidth() -> float:
    """Bytes a second that a copy of large tensors moves here: the limit of most kernels."""
    source, target = torch.ones(1 << 24), torch.empty(1 << 24)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def _summary(report: Report, stages: Stages, kept: Recording | None) -> Data:
    records = kept.records if kept is not None else []
    return {
        "recorded": kept is not None,
        "stages": stages,
        "bandwidth": _bandwidth() if any(r.kind == "timed" for r in records) else None,
        "told": report.told,
        "counters": {group: dict(counts) for group, counts in counters.items()},
        "recompiles": [_recompile(r) for r in kept.records if r.kind == "recompile"]
        if kept
        else [],
        "spans": [[s.stage, s.detail, s.thread, s.start, s.seconds] for s in kept.spans]
        if kept
        else [],
    }


def _row(frame: FrameReport) -> list[Any]:
    """What the list of frames shows: name, file, line, then counts."""
    counts = [frame.graphs, frame.ops, len(frame.breaks), len(frame.recompiles)]
    eager = len(frame.lost) + len(frame.uncompiled)
    return [frame.name, frame.filename, frame.line, *counts, eager, frame.hits, frame.misses]


def _frame(frame: FrameReport, graphs: list[Data]) -> Data:
    breaks = _breaks(frame.breaks)
    lines = [f"{b['file']}:{b['line']}" for b in breaks] + [f"{frame.filename}:{frame.line}"]
    return {
        "guards": _guards(frame),
        "breaks": breaks,
        "lost": _breaks(frame.lost),
        "uncompiled": Counter(frame.uncompiled).most_common(),
        "not_kept": frame.not_kept,
        "recompiles": frame.recompiles,
        "graphs": graphs,
        "sources": _sources(graphs, lines),
    }


def _breaks(records: Iterable[BreakRecord]) -> list[Data]:
    """One row for each break at each line, with how often it was met."""
    rows: dict[tuple[str, str, str], Data] = {}
    for record in records:
        row = rows.get((record.code, record.detail, record.where))
        if row is not None:
            row["count"] += 1
            continue
        stack = [[f.filename, f.lineno, f.name, f.line or ""] for f in record.user_stack]
        file, line = stack[-1][:2] if stack else ("", 0)
        rows[record.code, record.detail, record.where] = {
            "code": record.code,
            "detail": record.detail,
            "why": record.why,
            "remedy": record.remedy,
            "file": file,
            "line": line,
            "stack": stack,
            "count": 1,
        }
    return list(rows.values())


def _guards(frame: FrameReport) -> list[list[list[str]]]:
    """For each compiled entry: kind, text and the user's line of every guard."""
    caches = (cache for ref in frame.caches if (cache := ref()) is not None)
    return [
        [
            [
                guard.kind,
                str(guard),
                "".join(f"{f.filename}:{f.lineno}" for f in guard.user_stack[-1:]),
            ]
            for guard in entry.guards
        ]
        for each in caches
        for entry in each.entries
    ]


def _recompile(record: Record) -> Data:
    return {"seconds": record.seconds, **record.data, "frame": _function_of(record.data["frame"])}


def _function_of(frame: tuple[str, str, int]) -> tuple[str, str, int]:
    """The function of a frame, which may be one of its resume functions."""
    return (frame[0].partition(".<resume at ")[0], *frame[1:])


# ---- graphs: the records as trees


def _trees(kept: Recording | None) -> dict[tuple[str, str, int], list[Data]]:
    """Return the captured graphs by frame, each with the records that belong to it."""
    found: dict[tuple[str, str, int], list[Data]] = {}
    nodes: list[Data | None] = []
    for record in list(kept.records) if kept is not None else ():
        if record.kind == "recompile":
            nodes.append(None)
            continue
        node = {"kind": record.kind, "seconds": record.seconds, **record.data, "children": []}
        parent = None if record.parent is None else nodes[record.parent]
        if parent is not None:
            parent["children"].append(node)
        else:
            found.setdefault(record.data.get("frame", ("", "", 0)), []).append(node)
        nodes.append(node)
    return found


def _lines_of(tree: Data) -> Iterator[str]:
    yield from (line for _, line in tree.get("rows", ()) if line)
    for child in tree["children"]:
        yield from _lines_of(child)


# ---- sources: the functions that lines are in


def _sources(trees: list[Data], more: Iterable[str]) -> list[Data]:
    """The functions of the user that some lines are in: file, first line, text; frames first."""
    wanted: dict[tuple[str, int, int], None] = {}
    for line in dict.fromkeys([*more, *(line for tree in trees for line in _lines_of(tree))]):
        file, _, number = line.rpartition(":")
        wanted.setdefault((file, *_function_around(file, int(number))))
    inner = {
        (f, a, b)
        for f, a, b in wanted
        for g, c, d in wanted
        if f == g and c <= a and b <= d and (a, b) != (c, d)
    }
    return [
        {"file": file, "first": first, "lines": text}
        for file, first, last in wanted
        if (file, first, last) not in inner
        and (text := [line.rstrip() for line in linecache.getlines(file)[first - 1 : last]])
    ]


def _function_around(file: str, line: int) -> tuple[int, int]:
    """First and last line of the outermost function that a line is in."""
    path = Path(file)
    starts, spans = _functions(file, path.stat().st_mtime if path.exists() else 0)
    position = bisect.bisect_right(starts, line) - 1
    if position >= 0 and line <= spans[position][1]:
        return spans[position]
    return max(1, line - _CONTEXT), line + _CONTEXT


@cache
def _functions(file: str, changed: float) -> tuple[list[int], list[tuple[int, int]]]:
    """The lines of each outermost function of a file (decorators included), in order."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return [], []
    spans: list[tuple[int, int]] = []
    queue: list[ast.AST] = [tree]
    while queue:
        for child in ast.iter_child_nodes(queue.pop()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                spans.append((first, child.end_lineno or first))
            elif isinstance(child, ast.stmt):
                queue.append(child)
    spans.sort()
    return [first for first, _ in spans], spans


# ---- compile time


def trace_of(kept: Recording | None) -> Data:
    """The spans of a recording in Chrome's trace format (complete events, in microseconds)."""
    spans = kept.spans if kept is not None else []
    threads = {
        thread: number for number, thread in enumerate(dict.fromkeys(s.thread for s in spans))
    }
    events = [
        {
            "name": span.stage,
            "cat": span.stage.partition(".")[0],
            "ph": "X",
            "ts": span.start * 1e6,
            "dur": span.seconds * 1e6,
            "pid": os.getpid(),
            "tid": threads[span.thread],
            "args": {"detail": span.detail},
        }
        for span in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
