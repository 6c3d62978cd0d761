"""`weft.compiled_autograd`: capture what the autograd engine runs in `backward()`.

    with weft.compiled_autograd.enable(weft.compile):
        loss.backward()

`weft.config.compiled_autograd = True` does the same, with the code generator, for every backward
of every thread, until it is set to False.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import weft_capture
from torch.fx import GraphModule
from weft_compiled_autograd import (
    disable,
    enable_everywhere,
    graph_compiler,
    runs_user_code,
    taken_inputs,
)
from weft_compiled_autograd import enable as enable_compiler
from weft_core.errors import RecompileLimit, Unsupported

from weft import pipeline
from weft.api import compile, request_of

__all__ = ["disable", "enable"]

# A captured backward is aten ops already: the backend takes it without a second capture.
_backend = pipeline.graph_compiler(pipeline.Request())
_in_pieces = graph_compiler(_backend)
_CHANGES = 3


def _compile(module: GraphModule) -> Callable[..., Any]:
    if runs_user_code(module):
        return _WithUserCode(module, pipeline.Request(fullgraph=True))
    return _in_pieces(module)


class _Captured:
    """A captured backward that frame capture takes in, hooks included."""

    def __init__(self, module: GraphModule, request: pipeline.Request) -> None:
        self.module = module
        self.taken = taken_inputs(module)
        self.backend = pipeline.graph_compiler(request)
        self.graphs = 0
        self.inputs: list[Any] = []
        self.run = weft_capture.capture(
            module.forward,
            self._compile_graph,
            fullgraph=request.fullgraph,
            first_backend=pipeline.aot_eager,
            **request.rules,
        )

    def __call__(self, inputs: list[Any], *rest: Any) -> Any:
        """Run the backward; one at a time does."""
        self.inputs = inputs
        try:
            return self.run(inputs, *rest)
        finally:
            self.inputs = []

    def _compile_graph(self, graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
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


class _WithUserCode(_Captured):
    """A captured backward with calls of hooks or autograd.Functions in it.

    It is captured once more as a whole, so that what these do becomes part of the graph. Where one
    of them would break that graph, the reason is counted and logged as any graph break is, and the
    backward runs in pieces, with the user's code called between them. So it does once the hooks
    were found changed (other closures, a list that grows) more than `_CHANGES` times.
    """

    def __call__(self, inputs: list[Any], *rest: Any) -> Any:
        """Run the backward; one at a time does."""
        if self.graphs <= _CHANGES:
            try:
                return super().__call__(inputs, *rest)
            except (Unsupported, RecompileLimit):  # nothing of it has run
                self.graphs = _CHANGES + 1
        if not isinstance(self.run, GraphModule):
            self.run = _in_pieces(self.module)
        return self.run(inputs, *rest)


def enable(compiler: Callable[..., Any]) -> AbstractContextManager[None]:
    """Capture every backward that this thread runs in the block, and run it compiled.

    Args:
        compiler: `weft.compile`, `weft.compile(...)` with flags, or any `gm -> callable`.

    Raises:
        TypeError: when `compiler` is not callable.
        InvalidBackend, InvalidOption: for flags that `weft.compile` refuses.
    """
    if compiler is compile or getattr(compiler, "func", None) is compile:
        known, flags = vars(compiler), getattr(compiler, "keywords", {})
        if not flags.get("disable"):
            if "backward" not in known:  # one object for good: graphs are found by it
                known["backward"] = partial(_Captured, request=request_of(flags))
            compiler = known["backward"]
    return enable_compiler(compiler)


def switch(on: bool) -> None:
    """Follow `config.compiled_autograd`."""
    enable_everywhere(_compile if on else None)
