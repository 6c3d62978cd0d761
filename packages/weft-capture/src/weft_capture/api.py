"""The public functions of weft_capture: optimise a function, explain it, steer capture."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary
from weft_core import recording
from weft_core.arguments import checked
from weft_core.collector import collector_paused
from weft_core.errors import CompilerUnavailable, WeftError
from weft_core.events import counters, notified, span, uncompiled
from weft_guards import CacheRules, CodeCache, arg_names_of, compile_check
from weft_guards.filters import apply_filter
from weft_guards.sources import LocalSource

from weft_capture import config, frame
from weft_capture.breaks import BreakRecord
from weft_capture.bytecode import is_resume
from weft_capture.convert import Backend, CaptureRequest, Converted, Task, convert, restore
from weft_capture.decorators import is_compiling
from weft_capture.output.capture_cache import CaptureCache
from weft_capture.output.entry import entry_replacement, is_entry
from weft_capture.policy import selection, stance
from weft_capture.policy.rank_agreement import agreed, set_lookup
from weft_capture.policy.reports import (
    CodeLog,
    Report,
    add_codes,
    collected,
    count_ops,
    gather,
    graph_record,
    lost_record,
)
from weft_capture.policy.selection import (
    has_tensor_work,
    is_launcher,
    is_skipped_code,
    replaced_builtins,
    skip_disabled,
    with_own_builtins,
)
from weft_capture.tensors.modes import lookup_under_modes, modes_put_away
from weft_capture.torch_compat import BATCHED_GRADIENTS

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_lock = threading.RLock()
# Set while a thread captures; the functions that capture calls run eagerly.
_busy = threading.local()
_all: weakref.WeakSet[Capture] = weakref.WeakSet()
_SHARED = 8  # requests of one code object whose graphs are kept


def _after_fork() -> None:
    """Another thread of the parent may have been compiling; it does not exist in the child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_ByCode: TypeAlias = MutableMapping[types.CodeType, T]
"""By the identity of code objects, which it does not keep alive."""


class Capture:
    """The compiled code of one request: caches by code object, and records of their captures.

    Equal requests for one code object share it. It then lives as long as that code, to which it may
    have no strong reference.
    """

    def __init__(self, request: CaptureRequest) -> None:
        self.request = request
        self.caches: _ByCode[CodeCache] = WeakIdKeyDictionary()
        self._codes: _ByCode[None] = WeakIdKeyDictionary()  # codes that the hook knows
        self.users = 1  # number of requests
        self.asked: weakref.ref[types.CodeType] | None = None  # captured for all arguments
        self.breaks: list[BreakRecord] = []
        self.logs: _ByCode[CodeLog] = WeakIdKeyDictionary()
        self._graphs: list[weakref.ref[GraphModule]] = []
        self._others: dict[Backend, Capture] = {}  # of the same function for other backends
        self._kept: _ByCode[CaptureCache] = WeakIdKeyDictionary()
        weakref.finalize(self, _forget, self._codes).atexit = False
        _all.add(self)

    def __call__(
        self, function: types.FunctionType, code: types.CodeType, flat_args: tuple[Any, ...]
    ) -> types.CodeType | None:
        """Answer the frame hook: the code to run instead of this frame, or None."""
        if getattr(_busy, "on", False) or _is_transforming() or _runs_again():
            return None
        if is_entry(code):
            return entry_replacement(code)
        resumed = is_resume(code)
        if skip_disabled(function):
            return None
        if not resumed and is_skipped_code(code, function.__module__):
            frame.skip(code, is_launcher(function.__module__))
            return None
        if self._loses(function, flat_args, resumed):
            return None
        existing = self.caches.get(code)
        if existing is not None and existing.skip_reason is not None:
            with lookup_under_modes():
                return existing.lookup(function, *flat_args)
        with _lock, lookup_under_modes():
            cache = self._cache(code)
            compiled = agreed(cache, cache.lookup(function, *flat_args))
            if compiled is not None:
                set_lookup(code, cache, self)
                return compiled
            known_code = resumed or cache.entries or (self.asked and self.asked() is code)
            if not known_code and not has_tensor_work(function, flat_args):
                return None
            if not stance.may_compile(code.co_qualname, lambda: cache.reasons(function, flat_args)):
                return None
            if not cache.may_compile(function, flat_args, strict=self.request.fullgraph):
                # The cache has warned about it, with the failing guards.
                self.log(code).lost = lost_record(code, "recompile-limit", cache.skip_reason or "")
                return None
            if self.request.limit is not None and not self.request.limit.admits():
                return None
            _busy.on = True
            try:
                with collector_paused(), modes_put_away(), uncompiled(self.log(code).uncompiled):
                    return self._compile(cache, function, flat_args)
            finally:
                _busy.on = False

    def _loses(
        self, function: types.FunctionType, flat_args: tuple[Any, ...], resumed: bool
    ) -> bool:
        """Say, and report, whether a frame runs eagerly because of the state of the process."""
        code, lost = function.__code__, None
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return True  # the tracer compiles the frame
        if torch._C._len_torch_dispatch_stack():
            lost = ("modes", "a TorchDispatchMode")
        elif replaced := replaced_builtins():
            lost = ("builtins", ", ".join(replaced))

        def tell(*why: str) -> None:
            if resumed or has_tensor_work(function, flat_args):
                self.log(code).lose(code, lost_record(code, *why))

        if lost is not None:
            with_own_builtins(tell, *lost)
        return lost is not None

    def under_stance(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function under the current stance (see `stance`)."""
        now = stance.active
        if now is None or now.name == "force_eager" or torch._C._is_tracing():
            return function(*args, **kwargs)
        chosen = self if now.backend is None else self._for_backend(now.backend)
        if now.name in ("eager_then_compile", "aot_eager_then_compile") and not self.caches:
            self._observe(function, args, kwargs)
            first = self.request.first_backend
            if now.name == "eager_then_compile" or first is None:
                return function(*args, **kwargs)
            chosen = self._for_backend(first)
        return frame.run(chosen, function, *args, **kwargs)

    def _for_backend(self, backend: Backend) -> Capture:
        with _lock:
            if backend not in self._others:
                request = CaptureRequest(backend, self.request.fullgraph, self.request.rules)
                self._others[backend] = Capture(request)
            return self._others[backend]

    def _observe(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Pass the arguments of a call that is not compiled to the policy."""
        plain = getattr(function, "__func__", function)
        if not isinstance(plain, types.FunctionType):
            return
        policy = self._cache(plain.__code__).policy
        for name, value in inspect.signature(function).bind(*args, **kwargs).arguments.items():
            policy.observe(LocalSource(name), value)

    def log(self, code: types.CodeType) -> CodeLog:
        """Return the record of a code object."""
        if code not in self.logs:
            self.logs[code] = CodeLog.of(code, self.caches.get(code))
        return self.logs[code]

    def _cache(self, code: types.CodeType) -> CodeCache:
        cache = self.caches.get(code)
        if cache is None:
            # A loop with a break enters its resume function once per iteration.
            patience = 4 if is_resume(code) else 1
            cache = self.caches[code] = CodeCache(code, self.request.rules, patience)
            self._codes[code] = None
            cache.users = self.users
            if code in self.logs:
                self.logs[code].cache = cache
        return cache

    def _compile(
        self, cache: CodeCache, function: types.FunctionType, flat_args: tuple[Any, ...]
    ) -> types.CodeType | None:
        code = function.__code__
        try:
            kept = self._kept_for(function)
            backend = functools.partial(self._record_graph, code)
            restored = kept and restore(kept, function, flat_args, backend)
            task = Task(function, flat_args, self.request, backend, cache.policy)
            converted = restored or convert(task)
            return self._install(cache, function, flat_args, converted)
        except WeftError:
            raise
        except RecursionError:
            return None  # the stack is exhausted; another call may succeed
        except Exception as error:
            if self.request.fullgraph or config.settings.raise_internal_errors:
                raise
            cache.skip_reason = f"internal error: {error}"
            frame.skip(code)
            counters["graph_break"]["internal"] += 1
            text = f"{type(error).__name__}: {error}"
            self.log(code).lose(code, lost_record(code, "internal", text))
            return None

    def _kept_for(self, function: types.FunctionType) -> CaptureCache | None:
        """Return the capture cache of a function's code, or None."""
        code, rules = function.__code__, self.request.rules
        if rules.guard_filter or not config.settings.caching_precompile:
            return None
        if code not in self._kept:
            with suppress(ValueError, CompilerUnavailable):  # code without a digest; no folder
                self._kept[code] = CaptureCache(function, self.request.fullgraph, rules.dynamic)
        return self._kept.get(code)

    def _record_graph(
        self, code: types.CodeType, graph: GraphModule, inputs: list[Any]
    ) -> Callable[..., Any]:
        self._graphs = [ref for ref in self._graphs if ref() is not None] + [weakref.ref(graph)]
        counters["capture"]["graphs"] += 1
        with recording.inside("graph", lambda: graph_record(self.log(code), code, graph)):
            return self.request.backend(graph, inputs)

    @property
    def graphs(self) -> list[GraphModule]:
        """The captured graphs that are still in use, in order of capture."""
        return [graph for ref in self._graphs if (graph := ref()) is not None]

    def add_user(self) -> None:
        """Count one more request, which raises the limit of entries."""
        self.users += 1
        for cache in list(self.caches.values()):
            cache.add_user()

    def _install(
        self,
        cache: CodeCache,
        function: types.FunctionType,
        flat_args: tuple[Any, ...],
        converted: Converted,
    ) -> types.CodeType | None:
        code = function.__code__
        log = self.log(code)
        if converted.stopped is not None:
            self.breaks.append(converted.stopped)
            log.breaks.append(converted.stopped)
        if converted.code is None:
            assert converted.stopped is not None
            if converted.stopped.code == "uncaught-exception":
                return None  # another call may go another way
            endless = converted.stopped.code == "too-long"
            cache.skip_reason = "capture cannot rebuild the state at the break"
            frame.skip(code)
            if endless or has_tensor_work(function, flat_args):
                log.lose(code, converted.stopped)
            return None
        if converted.graph is not None:
            log.ops.append(count_ops(converted.graph))
        frame.skip(converted.code)
        with span("guards", code.co_qualname):
            guards = converted.guards
            if cache.rules.guard_filter is not None:
                guards = apply_filter(cache.rules.guard_filter, guards, function, flat_args)
            check = compile_check(guards, arg_names_of(code), code.co_freevars)
            cache.add(check, converted.code, guards)
        kept = self._kept_for(function)
        if kept is not None and isinstance(converted.kept, bytes):
            kept.add(converted.kept)
        elif isinstance(converted.kept, str) and converted.kept:
            log.not_kept.append(converted.kept)
        set_lookup(code, cache, self)
        counters["frames"]["compiled"] += 1
        return converted.code

    def forget(self) -> None:
        """Drop all compiled code and its records."""
        for log in list(self.logs.values()):
            log.dropped = True
        for cache in list(self.caches.values()):
            cache.clear()
        _forget(self._codes)
        for container in (
            self.caches,
            self.logs,
            self.breaks,
            self._graphs,
            self._others,
            self._kept,
        ):
            container.clear()


def _forget(codes: _ByCode[None]) -> None:
    """Free what the hook has for code objects: they can lie in circles, which it does not show."""
    for code in list(codes):
        frame.forget(code)
    codes.clear()


def capture(
    function: Callable[..., Any],
    backend: Backend,
    *,
    fullgraph: bool = False,
    rules: CacheRules = CacheRules(),
    first_backend: Backend | None = None,
    marks_modules: bool = False,
    share: object = None,
) -> Callable[..., Any]:
    """Return `function` with its graphs compiled by `backend`.

    Args:
        function: a function, method or callable object.
        backend: (graph module, example inputs) -> callable.
        fullgraph: raise `Unsupported` at a break instead of compiling up to it.
        rules: limits of the code caches and which sizes become symbolic.
        first_backend: compiles the first call under the stance `aot_eager_then_compile`.
        marks_modules: mark the calls of modules in graphs, for `compile_regions`.
        share: calls for one code object and an equal value share their entries; None: no sharing.
    """
    request = CaptureRequest(backend, fullgraph, rules, first_backend, marks_modules)
    function = selection.framed(function)
    state = Capture(request) if share is None else _shared(function.__code__, share, request)
    state.asked = weakref.ref(function.__code__)

    def optimised(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() and not is_compiling():  # torch.compile inlines the function
            return function(*args, **kwargs)
        if stance.active is not None or torch._C._is_tracing():
            return state.under_stance(function, args, kwargs)
        return frame.run(state, function, *args, **kwargs)

    frame.skip(optimised.__code__)
    functools.update_wrapper(optimised, function)
    optimised._weft_capture = state  # type: ignore[attr-defined]
    return optimised


_known: _ByCode[list[tuple[object, Capture]]] = WeakIdKeyDictionary()


def _shared(code: types.CodeType, share: object, request: CaptureRequest) -> Capture:
    """Return what is compiled for a code object and an equal `share`, or make it."""
    with _lock:
        states = _known.setdefault(code, [])
        shared = next((state for before, state in states if before == share), None)
        if shared is not None:
            shared.add_user()
        state = shared or Capture(request)
        states[:] = [pair for pair in states if pair[1] is not state][1 - _SHARED :]
        states.append((share, state))
        return state


def _is_transforming() -> bool:
    # Functions that vmap, grad and forward-mode AD call on their tensors run eagerly, and so does
    # the inside of an operator (`__torch_dispatch__`, kernels in Python), below autograd.
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._dispatch_tls_is_dispatch_key_included(BATCHED_GRADIENTS)
        or forward_ad._current_level >= 0
        or torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)
    )


def _runs_again() -> bool:
    """Whether a checkpoint that broke the graph calls this; it recomputes with the hook off.

    The two runs have to save the same tensors.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__ != torch.utils.checkpoint.__name__:
        return False
    caller: types.FrameType | None = sys._getframe()
    files = (torch.utils.checkpoint.__file__, __file__)
    while caller := caller.f_back if caller else None:
        if caller.f_code.co_filename in files and caller.f_code.co_name != "__call__":
            return caller.f_code.co_filename != __file__
    return False


@dataclass
class Explanation:
    """The result of capturing one call.

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
        return sum(map(count_ops, self.graphs))

    def __str__(self) -> str:
        head = f"{self.graph_count} graphs, {len(self.breaks)} breaks, {self.op_count} ops, "
        return "\n".join([head + f"{self.guards} guards", *map(str, self.breaks)])


@checked
def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """Return a function that runs `function` once, captured but not compiled, and explains it."""

    def run(*args: Any, **kwargs: Any) -> Explanation:
        graphs: list[GraphModule] = []

        def keep(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        optimised = capture(function, keep)
        state: Capture = optimised._weft_capture  # type: ignore[attr-defined]
        optimised(*args, **kwargs)
        guards = sum(len(e.guards) for cache in state.caches.values() for e in cache.entries)
        result = Explanation(graphs, list(state.breaks), guards)
        state.forget()
        return result

    return run


def report() -> Report:
    """Report the outcome of every frame that was captured since the last reset."""
    with _lock:
        frames = copy.deepcopy(dict(collected))
        for state in list(_all):
            gather(list(state.logs.values()), frames)
            add_codes(list(state.caches.items()), frames)
    reported = {text for frame in frames.values() for text in frame.told}
    return Report(tuple(frames.values()), tuple(text for text in notified if text not in reported))


def reset() -> None:
    """Drop all compiled code of this process."""
    with _lock:
        for state in list(_all):
            state.forget()
        collected.clear()
