"""A dispatch mode that writes down, faithfully, every aten op that runs under it.

An op that mutates is recorded as it is: the engine's backward functions fill tensors through views
now and then, and a graph that repeats the very calls cannot differ from them. Whoever compiles the
graph makes it functional, if it has to be. Values are the fake tensors; a value's node is found by
identity, and each node keeps its value in `meta["val"]`, so no identity is used twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from weft_core.symnodes import SymbolTable, SymValue

from weft_compiled_autograd.errors import NotCapturable
from weft_compiled_autograd.tape import ORIGIN

_COMPOSITE = "CompositeImplicitAutograd"


@dataclass(frozen=True, eq=False)
class Unknown:
    """A value that only its node can make: nothing is assumed of it, not even that it is one."""

    node: fx.Node


class Trace(TorchDispatchMode):
    """Records into `graph`; enter it above a fake mode."""

    def __init__(self, symbolic: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.symbols = SymbolTable(self.graph)
        self.symbolic = symbolic
        self.origin: str | None = None
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo on the first dispatch

    @classmethod
    def is_infra_mode(cls) -> bool:
        """This mode is machinery: user code should not notice it."""
        return True

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """Append a call; tensors and symbols among the arguments become their nodes."""
        named = {name: self.node_of(value) for name, value in kwargs.items()}
        packet = getattr(target, "overloadpacket", None)
        name = None if packet is None else packet.__name__
        made = self.graph.create_node("call_function", target, self.node_of(args), named, name)
        return self._mark(made)

    def _mark(self, node: fx.Node) -> fx.Node:
        if self.origin is not None:
            node.meta[ORIGIN] = self.origin
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """Append `node[index]`."""
        return self._mark(self.graph.call_function(operator.getitem, (node, index)))

    def bind(self, node: fx.Node, value: Any) -> None:
        """Let `node` stand for a value: a tensor, a symbol, or a sequence of them.

        Raises:
            NotCapturable: for a tensor that is not dense.
        """
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise NotCapturable(f"a tensor with layout {value.layout}")
        node.meta["val"] = value
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            if self.symbolic:
                self.symbols.bind_sizes(value, node)
        elif isinstance(value, SymValue):
            self.symbols.bind(value, node)
        elif isinstance(value, (tuple, list)):
            for index, element in enumerate(value):
                if isinstance(element, (torch.Tensor, SymValue)):
                    self.bind(self.item(node, index), element)

    def node_of(self, value: Any) -> Any:
        """The graph's argument for a value.

        Raises:
            NotCapturable: for a tensor that the trace has not made and was not given.
        """
        if isinstance(value, torch.Tensor):
            node = self._nodes.get(id(value))
            if node is None:
                raise NotCapturable("a tensor that is no input of the backward")
            return node
        if isinstance(value, (list, tuple)):
            items = [self.node_of(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, SymValue):
            return self.symbols.node_of(value)
        return value.node if isinstance(value, Unknown) else value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        leaves = out if isinstance(out, (tuple, list)) else (out,)
        if func._schema.is_mutable or any(isinstance(x, (torch.Tensor, SymValue)) for x in leaves):
            node = self.call(func, args, **kwargs)
            if out is not None:
                self.bind(node, out)
        return out
