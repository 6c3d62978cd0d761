"""One frame from bytecode to compiled code. Read this first; each step has its own file.

1. tracer     state of the capture: graph, guards, undo journal, effects   execution.tracer
2. arguments  become lazily read values with sources                       functions.wrap
3. execute    the bytecode symbolically, up to the end or a break          execution.stepping
4. draft      the code that replaces the frame; where a value cannot be
              rebuilt, the break moves to an earlier step                  output.assemble
5. compile    the graph, by the backend
6. finish     the code, which calls the compiled graph                     output.assemble
7. guards     become one check                                             weft_guards.check
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import GraphModule
from weft_core.errors import Unsupported, WeftError
from weft_core.events import counters, enabled, logger, span
from weft_core.launches import launches_recorded
from weft_guards import CacheRules, DynamicPolicy, Guard
from weft_guards.sources import (
    AttrSource,
    CallSource,
    CellSource,
    ClosureSource,
    LocalSource,
    ModuleSource,
    TorchStateSource,
)

from weft_capture import config
from weft_capture.breaks import REASONS, Break, BreakAtStep, BreakRecord, NeedsSymbols
from weft_capture.bytecode import decode, in_prologue
from weft_capture.execution.stepping import PROLOGUE, OuterFrame, Steps, Stop
from weft_capture.execution.tracer import Tracer
from weft_capture.functions import table
from weft_capture.libraries.distributed import bucket_bytes
from weft_capture.model.attributes import class_guards, class_reads
from weft_capture.model.contexts import no_saved_tensors_hooks
from weft_capture.model.dicts import LazyValue
from weft_capture.model.functions import CellValue, FunctionValue
from weft_capture.model.protocol import Value
from weft_capture.model.scope import library_guards
from weft_capture.output.assemble import Assembly
from weft_capture.output.capture_cache import CaptureCache, rows_of, to_bytes
from weft_capture.output.capture_logs import log_code, log_graph
from weft_capture.policy import break_mode
from weft_capture.policy.selection import has_tensor_work
from weft_capture.tensors.inputs import GraphInput
from weft_capture.tensors.modes import around, level_around

Backend = Callable[[GraphModule, list[Any]], Callable[..., Any]]
_breaks_log = logger("capture", "graph_breaks")


@dataclass
class Converted:
    """The result of a capture.

    Args:
        code: the code that replaces the frame; None when the frame should run eagerly.
        guards: under which the code is right.
        graph: the captured graph; None when there is nothing in it.
        stopped: why capture stopped before the end, if it did.
        kept: the serialized capture, with `config.caching_precompile`, or why there is none.
    """

    code: types.CodeType | None
    guards: list[Guard] = field(default_factory=list)
    graph: GraphModule | None = None
    stopped: BreakRecord | None = None
    kept: bytes | str = ""


DUAL_LEVEL = AttrSource(ModuleSource(forward_ad.__name__), "_current_level")
"""Where torch keeps the level of `torch.autograd.forward_ad`; graphs carry no tangents."""

_TRIES = 100
"""How many steps to go back, one by one, to a state that can be rebuilt."""


@dataclass
class CaptureLimit:
    """How much of a program is captured, to find what is captured wrongly; the rest runs eagerly.

    Args:
        frames: how many frames.
        steps: how many instructions of the last one; -1 for all of them.
        seen: the frames captured so far.
        stopped: file and positions of the instruction that the last capture stopped at.
    """

    frames: int
    steps: int = -1
    seen: int = 0
    stopped: tuple[str, tuple[int | None, ...]] = ("", ())

    def admits(self) -> bool:
        """Count one more frame; returns whether it may be captured."""
        self.seen += self.seen <= self.frames
        return self.seen <= self.frames

    @property
    def break_at(self) -> int:
        """The step at which the present frame is to break; -1 for none."""
        return self.steps if self.seen == self.frames else -1

    def note(self, stopped: Stop) -> None:
        """Note where a capture stopped."""
        frame = stopped.frames[-1]
        self.stopped = frame.decoded.filename, frame.decoded.instrs[frame.ip].positions


@dataclass(frozen=True)
class CaptureRequest:
    """How a function and what it calls are to be captured.

    Args:
        backend: (graph module, example inputs) -> callable.
        fullgraph: raise at a break instead of compiling up to it.
        rules: what the caches are to do.
        first_backend: compiles the first call under the stance `aot_eager_then_compile`.
        marks_modules: mark the calls of modules in graphs (see `region_marks`).
        limit: how much is captured; None for everything.
    """

    backend: Backend
    fullgraph: bool = False
    rules: CacheRules = CacheRules()
    first_backend: Backend | None = None
    marks_modules: bool = False
    limit: CaptureLimit | None = None


@dataclass(frozen=True)
class Task:
    """One call of a function to capture and compile.

    Args:
        function: the function called.
        flat_args: its arguments in the frame hook's order.
        request: how to capture it.
        backend: the request's, around which the caller may have put something.
        policy: decides which sizes become symbolic; None for none.
        symbolic, break_at, reason, answers: results of an earlier attempt.
    """

    function: types.FunctionType
    flat_args: tuple[Any, ...]
    request: CaptureRequest
    backend: Backend
    policy: DynamicPolicy | None
    symbolic: bool = False
    break_at: int = -1
    reason: Break | None = None
    answers: dict[object, Any] = field(default_factory=dict)


def convert(task: Task) -> Converted:
    """Capture a call and compile what was captured.

    Raises:
        Unsupported: at a break, with `fullgraph`.
    """
    table.load()
    while True:
        try:
            return _convert(task)
        except NeedsSymbols:
            task = replace(task, symbolic=True)
        except BreakAtStep as error:
            counters["capture"]["begun_again"] += 1
            task = replace(task, break_at=error.step, reason=error.reason.bare())


def _refused(record: BreakRecord) -> Unsupported:
    """Return the error for a break met with fullgraph=True."""
    text = f"{record.why}: {record.detail}"
    break_mode.clear()
    return Unsupported(record.code, text, record.advice, record.user_stack)


@launches_recorded()
def _convert(do: Task) -> Converted:
    steps = Steps(not has_tensor_work(do.function, do.flat_args), do.break_at, do.reason)
    if do.request.limit is not None and do.break_at < 0:
        steps.break_at = do.request.limit.break_at
    tx = Tracer(do.function, do.symbolic, do.policy, steps)
    tx.answers = do.answers
    tx.fullgraph = break_mode.current(do.request.fullgraph)
    tx.graph.reading = tx.fullgraph  # where a break is an error, numbers come out of tensors
    tx.marks_modules = do.request.marks_modules
    try:
        return _capture(do, tx, steps)
    finally:
        tx.forget()


def _capture(do: Task, tx: Tracer, steps: Steps) -> Converted:
    tx.no_saved_tensors_hooks = no_saved_tensors_hooks()
    with span("capture", do.function.__qualname__), _modes_restored(), _own_saved_tensors():
        tx.guards.add(TorchStateSource(), "GLOBAL_STATE", around.state)
        tx.guards.add(TorchStateSource(), "GRAD_MODE", torch.is_grad_enabled())
        tx.guards.add(DUAL_LEVEL, "CONST", forward_ad._current_level)
        if around.modes:  # the guard state contains their number
            tx.guards.add(CallSource(level_around, ()), "CONST", around.level)
        with tx.graph.mode, _contexts_closed(tx), class_reads.recorded() as reads:
            tx.overrides.enter_outer(around.modes)
            outer = outer_frame(tx, do.flat_args)
            try:
                stopped = outer.step_until_break()
                if stopped is not None and do.request.limit is not None:
                    do.request.limit.note(stopped)
                draft, stopped = _drafted(do, outer, stopped)
                if draft and stopped and steps.stale and stopped.step != do.break_at:
                    raise BreakAtStep(stopped.step, stopped.error)
            finally:
                counters["capture"]["instructions"] += steps.now + 1 + tx.unstepped
    record = report_break(stopped.error) if stopped is not None else None
    if draft is None:
        return Converted(None, stopped=record)

    keeps, artifacts = config.settings.caching_precompile, list[Any]([(), []])

    def call_backend(graph: GraphModule, inputs: list[GraphInput]) -> Any:
        log_graph(graph)
        graph.meta["gradient_bucket_bytes"] = bucket_bytes(tx)
        artifacts[:] = rows_of(graph) if keeps else (), inputs
        counters["stats"]["unique_graphs"] += 1
        counters["stats"]["ops"] += tx.graph.op_count
        with _modes_restored():
            compiled = do.backend(graph, [entry.graph_example() for entry in inputs])
        if not callable(compiled):
            type_name = type(compiled).__name__
            raise WeftError(f"a backend returns a callable; this one returned a {type_name}")
        return compiled

    with _modes_restored(), _own_saved_tensors():
        code, graph = draft.finish(call_backend)
    log_code(tx, code)
    if config.settings.debug_code:
        from weft_capture.output.frame_code import debugged  # noqa: PLC0415  seldom used

        code = debugged(code, config.settings.debug_code)
    guards = [*tx.all_guards(), *class_guards(reads), *library_guards(tx.library)]
    kept = to_bytes(tx, code, guards, artifacts[0], artifacts[1], record) if keeps else ""
    return Converted(code, guards, graph, record, kept)


def restore(
    kept: CaptureCache, function: types.FunctionType, flat_args: tuple[Any, ...], backend: Backend
) -> Converted | None:
    """Return the capture of such a call by another process, compiled here."""
    with span("precompiled", function.__qualname__), _modes_restored(), _own_saved_tensors():
        restored = None if around.modes else kept.take(function, flat_args, backend)
    if restored is None:
        return None
    counters["frames"]["precompiled"] += 1
    return Converted(*restored)


def _drafted(
    do: Task, outer: OuterFrame, stopped: Stop | None
) -> tuple[Assembly | None, Stop | None]:
    """Return the assembly, None when the frame should run eagerly, and the break.

    Where the state at a break cannot be rebuilt, the graph breaks earlier: the step that created
    the value, or the inlined call, runs eagerly.

    Raises:
        Unsupported: at a break, with `fullgraph`.
        BreakAtStep: when capture has to begin again.
    """
    tx, steps, left = outer.tx, outer.tx.steps, _TRIES
    while True:
        if tx.overrides.opened:
            mode = Break("modes", "a graph that ends inside a function mode")
            stopped = outer.break_at(tx.overrides.opened[0], stopped.error if stopped else mode)
        if stopped is not None:
            if tx.fullgraph and not REASONS[stopped.error.code].expected:
                raise _refused(report_break(stopped.error))
            endless = steps.no_tensor_yet and stopped.error.code == "too-long"
            as_it_is = stopped.error.eager_frame is outer
            begins = outer.decoded.instrs[outer.ip].opname in PROLOGUE
            if endless or as_it_is or begins or in_prologue(outer.decoded, outer.ip):
                return None, stopped
        try:
            return Assembly.draft(outer, stopped), stopped
        except Break as error:
            error.user_stack = error.user_stack or tx.user_stack()
            reason = error.bare()
        end = steps.now if stopped is None else stopped.step
        if 0 <= reason.restart_step < end:
            stopped = outer.break_at(reason.restart_step, reason)
        elif end > 0 and left and reason.code != "handler":
            left -= 1
            stopped = outer.break_at(end - 1, reason)
        elif stopped is not None and len(stopped.frames) > 1:
            stopped = outer.break_at(stopped.frames[0].step, stopped.error)
        elif tx.fullgraph and not REASONS[reason.code].expected:
            raise _refused(report_break(reason))
        else:
            return None, Stop(reason, ())


def outer_frame(tx: Tracer, flat_args: tuple[Any, ...]) -> OuterFrame:
    """Return the symbolic frame of the captured function at its start."""
    function = tx.function
    code = function.__code__
    decoded = decode(code)
    local_values: dict[str, Value] = {
        name: LazyValue(obj, LocalSource(name))
        for name, obj in zip(decoded.flat_args, flat_args, strict=True)
    }
    cells = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        cells[name] = variable = CellValue(None, ClosureSource(name))
        try:
            variable.contents = LazyValue(cell.cell_contents, ClosureSource(name))
        except ValueError:
            tx.guards.add(CellSource(name), "CELL_EMPTY")
        tx.values_by_id[id(cell)] = (variable, CellSource(name))
        tx.keep_alive.append(cell)
    value = FunctionValue(
        code,
        function.__globals__,
        name=function.__qualname__,
        defaults=[],
        kwdefaults={},
        cells=tuple(cells.values()),
        obj=function,
    )
    return OuterFrame(tx, value, local_values, cells)


def report_break(stopped: Break) -> BreakRecord:
    """Log and count a break."""
    record = BreakRecord(stopped.code, stopped.detail, stopped.user_stack)
    counters["graph_break"][record.code] += 1
    if enabled("graph_breaks"):
        _breaks_log.info("%s", record)
    return record


def _modes_restored() -> torch.set_grad_enabled:
    """Restore the grad mode, which capture changes."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


@contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Keep the user's saved-tensor hooks from seeing the fake tensors of a capture."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _contexts_closed(tx: Tracer) -> Iterator[None]:
    """Leave the autocast blocks and functorch levels that the captured program left open."""
    try:
        yield
    finally:
        while tx.transforms:
            tx.transforms.pop()()
        while tx.open_contexts:
            tx.open_contexts.pop().__exit__(None, None, None)
