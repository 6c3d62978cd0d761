"""What weft tells about itself: artifact logs, counters and timed spans.

Logs are plain `logging` loggers named `weft.<stage>.<artifact>`. An artifact (a kind of output,
such as `guards`) is silent until it is switched on by `WEFT_LOGS=guards,+recompiles` in the
environment or by `set_logs(guards=True)`; `+` (or the level logging.DEBUG) asks for more detail,
`-` switches off what `all` switched on, and `help` lists the artifacts. They go to stderr, or to
the file `WEFT_LOGS_OUT`, in the format `WEFT_LOGS_FORMAT` of `logging.Formatter`.
Spans nest: each stage is charged only the time that is not spent in a span inside it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft_core.arguments import checked
from weft_core.errors import InvalidOption


@dataclass(frozen=True)
class Artifact:
    """A kind of output.

    Args:
        shows: what it shows.
        skipped_by: the cache on disk that skips the work which this tells of, where it has the
            result: "captures" (of weft-capture) or "graphs" (of weft-codegen). While the artifact
            is on, that cache is not read: a second process shows what the first has shown.
    """

    shows: str
    skipped_by: str = ""


ARTIFACTS: dict[str, Artifact] = {
    "graph": Artifact("each captured graph as a table", "captures"),
    "graph_code": Artifact("each captured graph as Python", "captures"),
    "graph_breaks": Artifact("where capture stopped and why", "captures"),
    "side_effects": Artifact("what compiled code does beside running its graph", "captures"),
    "guards": Artifact("the guards of each compiled entry"),
    "recompiles": Artifact("which guard failed when something is compiled again"),
    "recompiles_verbose": Artifact("the failing guards of every entry, not only the newest"),
    "dynamic": Artifact("which sizes became symbolic, and what was assumed of them", "captures"),
    "bytecode": Artifact("original and rewritten bytecode", "captures"),
    "frame_code": Artifact("rewritten frames as Python text", "captures"),
    "trace_source": Artifact("each line of the program as capture executes it", "captures"),
    "aot_joint_graph": Artifact("forward and backward traced as one"),
    "aot_graphs": Artifact("forward and backward after the partition"),
    "compiled_autograd": Artifact("graphs captured from the autograd engine"),
    "compiled_autograd_verbose": Artifact("why the engine's cache missed"),
    "lowering": Artifact("which operators stay calls of a library, and why", "graphs"),
    "schedule": Artifact("the order of kernels and buffers", "graphs"),
    "fusion": Artifact("what was fused and what was not", "graphs"),
    "output_code": Artifact("the generated C or Triton source, and the host's", "graphs"),
    "kernel_code": Artifact("each generated kernel by itself", "graphs"),
    "autotuning": Artifact("what was timed, and what won"),
    "cudagraphs": Artifact("what was recorded as a CUDA graph, and why the rest was not"),
    "perf_hints": Artifact("what keeps a program from being faster"),
    "timings": Artifact("where compile time goes: a tree at the end (+: each stage as it ends)"),
}
"""Every artifact."""

counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
"""Counts of what happened, by group: `counters["stats"]["unique_graphs"]`."""

notices = logging.getLogger("weft.notices")  # no warnings: programs raise and record those

notified: Counter[str] = Counter()
"""What users were notified of, and how often; `weft.report()` shows it."""

_levels: dict[str, int] = {}
_loggers: dict[str, list[logging.Logger]] = defaultdict(list)
_root = logging.getLogger("weft")
_FORMAT = "[%(name)s] %(message)s"
_handler: logging.Handler | None = None


def logger(stage: str, artifact: str) -> logging.Logger:
    """Return the logger `weft.<stage>.<artifact>`, set to the level asked for.

    Log artifacts with `.info` (shown when on) and `.debug` (shown with `+name`).
    """
    log = logging.getLogger(f"weft.{stage}.{artifact}")
    if log not in _loggers[artifact]:
        _loggers[artifact].append(log)
        log.setLevel(_levels.get(artifact, logging.WARNING))
    return log


def enabled(artifact: str) -> bool:
    """Say whether an artifact is on; cheap, so ask before building a long text."""
    return artifact in _levels


def bypasses(cache: str) -> bool:
    """Say whether an artifact is on that needs work which `cache` skips (see Artifact)."""
    return any(ARTIFACTS[name].skipped_by == cache for name in _levels)


@checked
def set_logs(**artifacts: bool | int) -> None:
    """Switch artifacts on or off: True, False, or a `logging` level.

    Artifacts that are not named keep their state; `all` names every artifact.

    Raises:
        InvalidOption: for an unknown artifact.
    """
    for name in artifacts:
        if name not in ARTIFACTS and name != "all":
            raise InvalidOption(name, [*ARTIFACTS, "all"])
    if "all" in artifacts:
        artifacts = dict.fromkeys(ARTIFACTS, artifacts.pop("all")) | artifacts
    if not artifacts.get("timings", True):
        _log_timings()
    for name, value in artifacts.items():
        if value is False or value == 0:
            _levels.pop(name, None)
        else:
            _levels[name] = logging.INFO if value is True else int(value)
        for log in _loggers[name]:
            log.setLevel(_levels.get(name, logging.WARNING))
    _attach_handler()


def notify(text: str, *, eager: bool = False, quiet: bool = False) -> None:
    """Tell the user what is not as asked for: the first time on stderr, always in `notified`.

    Args:
        text: code in brackets, what happened, why, what to do.
        eager: a graph runs op by op because of it; `uncompiled` collects that.
        quiet: only reports show it.
    """
    with timings_lock:
        notified[text] += 1
        first = notified[text] == 1
    if eager:
        for reasons in _stack.listening:
            reasons.append(text)
    if first and not quiet:
        notices.warning("%s", text)


@contextmanager
def uncompiled(reasons: list[str]) -> Iterator[None]:
    """Append to `reasons` why graphs that this thread compiles in the block run op by op."""
    _stack.listening.append(reasons)
    try:
        yield
    finally:
        _stack.listening.pop()


def _attach_handler() -> None:
    """Write to a file or stderr while any artifact is on; else leave logging as it was set up."""
    global _handler
    if _levels and _handler is None:
        _handler = _new_handler(os.environ.get("WEFT_LOGS_OUT"))
        _root.addHandler(_handler)
    elif not _levels and _handler is not None:
        _root.removeHandler(_handler)
        _handler = None


def _new_handler(path: str | None) -> logging.Handler:
    """A handler as the environment describes it; what it says wrongly is a warning."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path:
        try:
            handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            _root.warning("WEFT_LOGS_OUT: %s; logs go to stderr", error)
    try:
        handler.setFormatter(logging.Formatter(os.environ.get("WEFT_LOGS_FORMAT", _FORMAT)))
    except ValueError as error:
        _root.warning("WEFT_LOGS_FORMAT: %s", error)
        handler.setFormatter(logging.Formatter(_FORMAT))
    return handler


_SIGNS = {"+": logging.DEBUG, "-": 0}


def _read_environment(text: str) -> None:
    """Apply a WEFT_LOGS value; an unknown name is a warning, since it must not stop a program."""
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name = entry[entry[0] in _SIGNS :]
        if name == "help":
            print(logs_help(), file=sys.stderr)
            continue
        try:
            set_logs(**{name: _SIGNS.get(entry[0], logging.INFO)})
        except InvalidOption as error:
            _root.warning("WEFT_LOGS: %s", error)


def logs_help() -> str:
    """Return what WEFT_LOGS takes, one artifact a line."""
    rows = [f"  {name:<26}{artifact.shows}" for name, artifact in ARTIFACTS.items()]
    rows.append(f"  {'all':<26}all of these")
    return "\n".join([
        "WEFT_LOGS takes names with commas between: WEFT_LOGS=graph_breaks,+recompiles",
        *rows,
        "+name shows more detail; all,-name leaves one out.",
        "WEFT_LOGS_OUT=file writes there; WEFT_LOGS_FORMAT is a format of logging.Formatter.",
    ])  # fmt: skip


@dataclass
class StageTime:
    """Self time of one stage in seconds, and the number of its spans."""

    seconds: float = 0.0
    count: int = 0


timings: defaultdict[str, StageTime] = defaultdict(StageTime)
"""Self time per stage since the last reset."""


@dataclass
class _OpenSpan:
    stage: str
    detail: str
    start: float
    inner: float = 0.0


class _Stack(threading.local):
    def __init__(self) -> None:
        self.spans: list[_OpenSpan] = []
        self.listening: list[list[str]] = []


_stack = _Stack()
timings_lock = threading.Lock()
_timings_log = logger("core", "timings")


_watchers: list[Callable[[str, str, float | None], None]] = []


@checked
def watch_stages(watcher: Callable[[str, str, float | None], None]) -> Callable[[], None]:
    """Call `watcher(stage, detail, seconds)` when a stage of compiling begins and when it ends.

    `seconds` is None at the beginning. Returns what ends the watching.
    """
    _watchers.append(watcher)
    return lambda: _watchers.remove(watcher)


@contextmanager
def span(stage: str, detail: str = "") -> Iterator[None]:
    """Time a stage. Spans nest per thread; the time of an inner span is not charged to the outer.

    Args:
        stage: the name under which time is summed in `timings`.
        detail: what is worked on, for the log only.
    """
    spans = _stack.spans
    here = _OpenSpan(stage, detail, time.perf_counter())
    spans.append(here)
    try:
        for watcher in tuple(_watchers):
            watcher(stage, detail, None)
        yield
    finally:
        spans.pop()
        elapsed = time.perf_counter() - here.start
        with timings_lock:
            total = timings[stage]
            total.seconds += elapsed - here.inner
            total.count += 1
        if spans:
            spans[-1].inner += elapsed
        if enabled("timings"):
            _log_span(here, elapsed, spans)
        for watcher in tuple(_watchers):
            watcher(stage, detail, elapsed)


_tree: dict[tuple[str, ...], StageTime] = {}
"""Time of each stage by the stages that it ran inside of, inner stages included."""


def _log_span(done: _OpenSpan, elapsed: float, outer: list[_OpenSpan]) -> None:
    """Log one span, and add it to the tree that is logged at the end."""
    _timings_log.debug(
        "%s%s %s: %.1f ms", "  " * len(outer), done.stage, done.detail, elapsed * 1e3
    )
    path = (*(span.stage for span in outer), done.stage)
    with timings_lock:
        if not _tree:
            atexit.register(_log_timings)
        total = _tree.setdefault(path, StageTime())
        total.seconds += elapsed
        total.count += 1


def _log_timings() -> None:
    """Log the tree, once."""
    with timings_lock:
        tree = dict(_tree)
        _tree.clear()
    if tree:
        _timings_log.info("compile time\n%s", "\n".join(_branch(tree, ())))


def _branch(tree: dict[tuple[str, ...], StageTime], path: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each stage below `path`, the slowest first."""
    below = [key for key in tree if key[:-1] == path]
    for key in sorted(below, key=lambda key: -tree[key].seconds):
        total = tree[key]
        name = "  " * len(key) + key[-1]
        yield f"{name:<34} {total.seconds * 1e3:10.1f} ms {total.count:6d}x"
        yield from _branch(tree, key)


def timings_table() -> str:
    """Return the stages with their self time, the slowest first, as text."""
    with timings_lock:
        rows = sorted(timings.items(), key=lambda item: -item[1].seconds)
    return "\n".join(f"  {name:<28} {t.seconds * 1e3:10.1f} ms {t.count:6d}x" for name, t in rows)


def current_stage() -> str | None:
    """Return the stage of this thread's innermost open span, or None."""
    return _stack.spans[-1].stage if _stack.spans else None


def reset() -> None:
    """Clear counters, timings and notices; logs stay as they are."""
    counters.clear()
    notified.clear()
    with timings_lock:
        timings.clear()
        _tree.clear()


_read_environment(os.environ.get("WEFT_LOGS", ""))
