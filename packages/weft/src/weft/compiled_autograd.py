"""`weft.compiled_autograd`: capture what the autograd engine runs in `backward()`.

    with weft.compiled_autograd.enable(weft.compile):
        loss.backward()

`weft.config.compiled_autograd = True` does the same, with the code generator, for every backward
of every thread, until it is set to False.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import weft_capture
from torch.fx import GraphModule
from weft_compiled_autograd import (
    disable,
    enable,
    enable_everywhere,
    graph_compiler,
    runs_user_code,
    taken_inputs,
)
from weft_core.errors import RecompileLimit, Unsupported

from weft import pipeline

__all__ = ["disable", "enable"]

# A captured backward is aten ops already: the backend takes it without a second capture.
_backend = pipeline.graph_compiler(pipeline.Request())
_in_pieces = graph_compiler(_backend)
_CHANGES = 3


def _compile(module: GraphModule) -> Callable[..., Any]:
    return _WithUserCode(module) if runs_user_code(module) else _in_pieces(module)


class _WithUserCode:
    """A captured backward with calls of hooks or autograd.Functions in it.

    It is captured once more as a whole, so that what these do becomes part of the graph. Where one
    of them would break that graph, the reason is counted and logged as any graph break is, and the
    backward runs in pieces, with the user's code called between them. So it does once the hooks
    were found changed (other closures, a list that grows) more than `_CHANGES` times.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.taken = taken_inputs(module)
        self.graphs = 0
        self.inputs: list[Any] = []
        self.run = weft_capture.capture(module.forward, self._compile_graph, fullgraph=True)

    def __call__(self, inputs: list[Any], *rest: Any) -> Any:
        """Run the backward; one at a time does."""
        if self.graphs <= _CHANGES:
            self.inputs = inputs
            try:
                return self.run(inputs, *rest)
            except (Unsupported, RecompileLimit):  # nothing of it has run
                self.graphs = _CHANGES + 1
            finally:
                self.inputs = []
        if not isinstance(self.run, GraphModule):
            self.run = _in_pieces(self.module)
        return self.run(inputs, *rest)

    def _compile_graph(self, graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        compiled = _backend(graph, examples)
        owning = getattr(compiled, "call_owning", None)
        if owning is None:
            return compiled

        def call_boxed(arguments: list[Any]) -> Any:
            for index in self.taken:
                self.inputs[index] = None  # `arguments` alone keeps it from here on
            return owning(arguments)

        def call(*arguments: Any) -> Any:
            return compiled(*arguments)

        call.call_boxed = call_boxed  # type: ignore[attr-defined]
        return call


def switch(on: bool) -> None:
    """Follow `config.compiled_autograd`."""
    enable_everywhere(_compile if on else None)
