"""`weft.compiled_autograd`: capture what the autograd engine runs in `backward()`.

    with weft.compiled_autograd.enable(weft.compile):
        loss.backward()

`weft.config.compiled_autograd = True` does the same for every backward of every thread, until it is
set to False: one that a compiled function reaches is compiled as that function is, others by the
code generator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import weft_capture
from torch.fx import GraphModule
from weft_compiled_autograd import (
    compile_pieces,
    disable,
    enable_everywhere,
    is_enabled,
    op_only_inputs,
    runs_user_code,
)
from weft_compiled_autograd import enable as enable_compiler
from weft_core.arguments import checked
from weft_core.errors import RecompileLimit, Unsupported
from weft_guards import CacheRules

from weft import pipeline
from weft.api import apply_request, compile
from weft.pipeline import CompileRequest

__all__ = ["disable", "enable"]

_CHANGES = 3
_KEPT = 64


class _CapturedBackward:
    """A captured backward that frame capture takes in, hooks included."""

    def __init__(self, module: GraphModule, request: CompileRequest) -> None:
        self.module = module
        self.taken = op_only_inputs(module)
        self.backend = pipeline.graph_compiler(request)
        self.graphs = 0
        self.inputs: list[Any] = []
        self.run = weft_capture.capture(
            module.forward,
            self._compile_backward,
            fullgraph=request.fullgraph,
            first_backend=pipeline.aot_eager,
            rules=request.rules,
        )

    def __call__(self, inputs: list[Any], *rest: Any) -> Any:
        """Run the backward; one at a time does."""
        self.inputs = inputs
        try:
            return self.run(inputs, *rest)
        finally:
            self.inputs = []

    def _compile_backward(self, graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        compiled = self.backend(graph, examples)
        owning = getattr(compiled, "call_owning", None)
        if owning is None:
            return compiled

        def call_boxed(arguments: list[Any]) -> Any:
            for index in self.taken:
                self.inputs[index] = None  # `arguments` alone keeps it from here on
            return owning(arguments)

        call = partial(compiled)
        call.call_boxed = call_boxed  # type: ignore[attr-defined]
        return call


class _WithUserCode(_CapturedBackward):
    """A captured backward with calls of hooks or autograd.Functions in it.

    It is captured once more as a whole, so that what these do becomes part of the graph. Where one
    of them would break that graph, the reason is counted and logged as any graph break is, and the
    backward runs in pieces, with the user's code called between them. So it does once the hooks
    were found changed (other closures, a list that grows) more than `_CHANGES` times.
    With `fullgraph` a break is an error, as it is in a forward.
    """

    def __init__(self, module: GraphModule, request: CompileRequest) -> None:
        super().__init__(module, replace(request, fullgraph=True))
        self.is_strict = request.fullgraph

    def __call__(self, inputs: list[Any], *rest: Any) -> Any:
        """Run the backward; one at a time does."""
        if self.graphs <= _CHANGES:
            try:
                return super().__call__(inputs, *rest)
            except Unsupported:  # nothing of it has run
                if self.is_strict:
                    raise
                self.graphs = _CHANGES + 1
            except RecompileLimit:
                self.graphs = _CHANGES + 1
        if not isinstance(self.run, GraphModule):
            self.run = compile_pieces(self.module, self.backend)
        return self.run(inputs, *rest)


class _BackwardCompiler:
    """Compiles captured backwards as a request says; graphs are found by this object."""

    def __init__(self, request: CompileRequest) -> None:
        self.request = request
        self.dynamic = request.rules.dynamic

    def __call__(self, module: GraphModule) -> Callable[..., Any]:
        raise NotImplementedError


class _PiecewiseCompiler(_BackwardCompiler):
    """A captured backward is aten ops already: without user code, no second capture is needed."""

    def __call__(self, module: GraphModule) -> Callable[..., Any]:
        if runs_user_code(module):
            return _WithUserCode(module, self.request)
        return compile_pieces(module, pipeline.graph_compiler(self.request))


class _WholeGraphCompiler(_BackwardCompiler):
    """What `weft.compile(...)` makes of a captured backward given to it."""

    def __call__(self, module: GraphModule) -> Callable[..., Any]:
        return _CapturedBackward(module, self.request)


_recent: deque[_BackwardCompiler] = deque(maxlen=_KEPT)


def _compiler(kind: type[_BackwardCompiler], request: CompileRequest) -> _BackwardCompiler:
    """Return one compiler for equal requests: what it has compiled serves all who ask alike."""
    rules = CacheRules(request.rules.dynamic, request.rules.recompile_limit)
    request = replace(request, options=replace(request.options, freezing=False), rules=rules)
    for known in _recent:
        if type(known) is kind and known.request == request:
            return known
    _recent.append(kind(request))
    return _recent[-1]


_chosen: WeakKeyDictionary[Any, _BackwardCompiler] = WeakKeyDictionary()
_default = _compiler(_PiecewiseCompiler, CompileRequest())


def _choose() -> _BackwardCompiler:
    """Return the compiler that has the flags of the function that reached a backward."""
    running = weft_capture.running()
    request = pipeline.requests.get(running) if running is not None else None
    if request is None:
        return _default
    if running not in _chosen:
        _chosen[running] = _compiler(_PiecewiseCompiler, request)
    return _chosen[running]


@checked
def enable(compiler: Callable[..., Any]) -> AbstractContextManager[None]:
    """Capture every backward that this thread runs in the block, and run it compiled.

    Args:
        compiler: `weft.compile`, `weft.compile(...)` with flags, or any `gm -> callable`.

    Raises:
        InvalidArgument: when `compiler` is not callable.
        InvalidBackend, InvalidOption: for flags that `weft.compile` refuses.
    """
    if compiler is compile or getattr(compiler, "func", None) is compile:
        compiler = compiler()
    if isinstance(compiler, partial) and compiler.func is apply_request and compiler.args[0]:
        compiler = _compiler(_WholeGraphCompiler, compiler.args[0])
    return enable_compiler(compiler)


def switch(on: bool) -> None:
    """Follow `config.compiled_autograd`."""
    enable_everywhere(_default if on else None, _choose)


weft_capture.leave_backwards(is_enabled)
