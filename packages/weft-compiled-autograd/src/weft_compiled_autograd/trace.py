"""A recorder that writes down, faithfully, every aten op that runs under it.

An op that mutates is recorded as it is: the engine's backward functions fill tensors through views
now and then, and a graph that repeats the very calls cannot differ from them. Whoever compiles the
graph makes it functional, if it has to be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from weft_core import tracing

from weft_compiled_autograd.errors import NotCapturable
from weft_compiled_autograd.tape import ORIGIN


@dataclass(frozen=True, eq=False)
class Unknown:
    """A value that only its node can make: nothing is assumed of it, not even that it is one."""

    node: fx.Node


class Trace(tracing.AtenRecorder):
    """Records into `graph`; enter it above its fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__({}, mode)
        self.mode = mode
        self.origin: str | None = None

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """Append a call; tensors and symbols among the arguments become their nodes."""
        return self._new_node(target, self.node_of(args), self.node_of(kwargs))

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Append `node[index]`."""
        return self._new_node(operator.getitem, (node, index), {})

    def _new_node(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        packet = getattr(func, "overloadpacket", None)
        name = None if packet is None else packet.__name__
        node = self.graph.create_node("call_function", func, args, kwargs, name)
        if self.origin is not None:
            node.meta[ORIGIN] = self.origin
        return node

    def bind(self, node: fx.Node, value: Any) -> None:
        """Let `node` stand for a value: a tensor, a symbol, or a sequence of them.

        Raises:
            NotCapturable: for a tensor that is not dense.
        """
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise NotCapturable(f"a tensor with layout {value.layout}")
        super().bind(node, value)

    def node_of(self, value: Any) -> Any:
        """The graph's argument for a value.

        Raises:
            NotCapturable: for a tensor that the trace has not made and was not given.
        """
        return value.node if isinstance(value, Unknown) else super().node_of(value)

    def _constant(self, value: torch.Tensor) -> fx.Node:
        raise NotCapturable("a tensor that is no input of the backward")

    def _special_handler(self, func: Any) -> None:
        """No op is treated apart."""
