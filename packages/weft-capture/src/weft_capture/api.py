"""The public functions of weft_capture: optimise a function, explain it, steer capture."""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from weft_core.errors import Unsupported, WeftError
from weft_core.events import counters, span
from weft_guards import CodeCache, arg_names_of, compile_check

from weft_capture import config, frame, stance
from weft_capture.breaks import BreakRecord
from weft_capture.bytecode import is_resume
from weft_capture.convert import Backend, BreakUnderFullgraph, Converted, convert
from weft_capture.selection import has_tensor_work, is_skipped_code

F = TypeVar("F", bound=Callable[..., Any])
_lock = threading.RLock()
_all: weakref.WeakSet[Capture] = weakref.WeakSet()


class Capture:
    """One optimised function: its caches by code object, and what was learned on the way.

    Args:
        backend: (graph module, example inputs) -> callable.
        fullgraph: a graph break is an error.
        dynamic: see `weft_guards.DynamicPolicy`.
    """

    def __init__(
        self, backend: Backend, fullgraph: bool = False, dynamic: bool | None = None
    ) -> None:
        self.backend = backend
        self.fullgraph = fullgraph
        self.dynamic = dynamic
        self.caches: dict[types.CodeType, CodeCache] = {}
        self.breaks: list[BreakRecord] = []
        self.graphs: list[GraphModule] = []
        self._warned: set[types.CodeType] = set()
        self._busy = threading.local()
        # One object for good: the hook tells the runs of different captures apart by it.
        self.miss = self.on_miss
        _all.add(self)

    def on_miss(
        self, function: types.FunctionType, code: types.CodeType, flat_args: tuple[Any, ...]
    ) -> types.CodeType | None:
        """Answer the frame hook: code to run in the place of this call, or None."""
        if getattr(self._busy, "on", False):
            return None
        resumed = is_resume(code)
        if not resumed and is_skipped_code(code, function.__module__):
            frame.skip(code)
            return None
        with _lock:
            cache = self._cache(code)
            found = cache.lookup(function, *flat_args)
            if found is not None:
                frame.set_lookup(code, cache.lookup, self.miss)
                return found
            if not (resumed or cache.entries or has_tensor_work(function, flat_args)):
                return None
            if cache.entries and not stance.may_recompile(code.co_qualname):
                return None
            strict = self.fullgraph
            if not cache.may_compile(function, flat_args, strict=strict):
                frame.skip(code)
                return None
            self._busy.on = True
            try:
                return self._compile(cache, function, flat_args)
            finally:
                self._busy.on = False

    def _cache(self, code: types.CodeType) -> CodeCache:
        cache = self.caches.get(code)
        if cache is None:
            cache = self.caches[code] = CodeCache(code, self.dynamic)
        return cache

    def _compile(
        self, cache: CodeCache, function: types.FunctionType, flat_args: tuple[Any, ...]
    ) -> types.CodeType | None:
        code = function.__code__
        try:
            converted = convert(
                function,
                flat_args,
                self._record_graph,
                cache.policy,
                fullgraph=self.fullgraph,
                tail_call=frame.tail_call,
            )
            return self._install(cache, function, converted)
        except BreakUnderFullgraph as error:
            record = error.record
            raise Unsupported(
                record.code, f"{record.why}: {record.detail}", record.remedy, record.user_stack
            ) from None
        except WeftError:
            raise
        except Exception as error:
            if self.fullgraph or config.settings.raise_internal_errors:
                raise
            self._give_up(cache, code, error)
            return None

    def _record_graph(self, graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return self.backend(graph, inputs)

    def _install(
        self, cache: CodeCache, function: types.FunctionType, converted: Converted
    ) -> types.CodeType | None:
        code = function.__code__
        if converted.stopped is not None:
            self.breaks.append(converted.stopped)
        if converted.code is None:
            cache.mark_skip("capture cannot rebuild the state at the break")
            frame.skip(code)
            return None
        frame.skip(converted.code)
        with span("guards", code.co_qualname):
            check = compile_check(converted.guards, arg_names_of(code), code.co_freevars)
            cache.add(check, converted.code, converted.guards)
        frame.set_lookup(code, cache.lookup, self.miss)
        counters["frames"]["compiled"] += 1
        return converted.code

    def _give_up(self, cache: CodeCache, code: types.CodeType, error: Exception) -> None:
        cache.mark_skip(f"internal error: {error}")
        frame.skip(code)
        counters["graph_break"]["internal"] += 1
        if code not in self._warned:
            self._warned.add(code)
            warnings.warn(
                f"[internal] weft could not capture {code.co_qualname} "
                f"({code.co_filename}:{code.co_firstlineno}), which runs eagerly: "
                f"{type(error).__name__}: {error}",
                stacklevel=3,
            )

    def __del__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop everything that was compiled."""
        for code, cache in list(self.caches.items()):
            cache.clear()
            frame.forget(code)
        self.caches.clear()
        self.breaks.clear()
        self.graphs.clear()


def capture(
    function: Callable[..., Any],
    backend: Backend,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Return `function` with its graphs compiled by `backend`.

    Args:
        function: a function, method or callable object.
        backend: (fx.GraphModule, list of example inputs) -> callable on the inputs.
        fullgraph: raise Unsupported at a graph break instead of splitting the graph.
        dynamic: None: symbolic sizes once a size changed; True: from the start; False: never.
    """
    state = Capture(backend, fullgraph, dynamic)
    miss = state.miss

    def optimised(*args: Any, **kwargs: Any) -> Any:
        if stance.forces_eager() or torch._C._is_tracing():
            return function(*args, **kwargs)
        return frame.run(miss, function, *args, **kwargs)

    if isinstance(function, types.FunctionType | types.MethodType):
        functools.update_wrapper(optimised, function)
    frame.skip(optimised.__code__)
    optimised._weft_capture = state  # type: ignore[attr-defined]
    return optimised


@dataclass
class Explanation:
    """What capture makes of one call.

    Args:
        graphs: the captured graphs in order of capture.
        breaks: where and why graphs end early.
        guards: number of guards of all entries.
    """

    graphs: list[GraphModule] = field(default_factory=list)
    breaks: list[BreakRecord] = field(default_factory=list)
    guards: int = 0

    @property
    def graph_count(self) -> int:
        """Number of graphs."""
        return len(self.graphs)

    @property
    def graph_break_count(self) -> int:
        """Number of graph breaks."""
        return len(self.breaks)

    @property
    def op_count(self) -> int:
        """Number of operations in all graphs."""
        kinds = ("call_function", "call_method", "call_module")
        return sum(node.op in kinds for graph in self.graphs for node in graph.graph.nodes)

    def __str__(self) -> str:
        head = f"{self.graph_count} graphs, {len(self.breaks)} breaks, {self.op_count} ops, "
        return "\n".join([head + f"{self.guards} guards", *map(str, self.breaks)])


def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """Return a function that runs `function` once, captured but not compiled, and explains it."""

    def run(*args: Any, **kwargs: Any) -> Explanation:
        optimised = capture(function, lambda graph, inputs: graph.forward)
        state: Capture = optimised._weft_capture  # type: ignore[attr-defined]
        optimised(*args, **kwargs)
        guards = sum(len(e.guards) for cache in state.caches.values() for e in cache.entries)
        result = Explanation(list(state.graphs), list(state.breaks), guards)
        state.forget()
        return result

    return run


def reset() -> None:
    """Drop all compiled code of this process."""
    with _lock:
        for state in list(_all):
            state.forget()
