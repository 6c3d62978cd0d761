"""Inlines the backward of an ahead-of-time compiled forward, through attributes of its Function.

docs/architecture/aot.md says which; nothing of the ahead-of-time package is imported. Nodes that
come from such a graph are named `aot<id>_<name>`; `aot<id>_<n>_<name>` for the n-th further use in
one backward.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node
from weft_core.events import counters

from weft_compiled_autograd.hooks import ContextView
from weft_compiled_autograd.tape import exposes_graph
from weft_compiled_autograd.trace import Trace


class _Sizes(ContextView):
    """A context whose saved sizes, `symbols`, are those that the trace knows by name."""

    def __init__(self, real: Any, saved: Sequence[Any], symints: Sequence[Any]) -> None:
        super().__init__(real, saved)
        object.__setattr__(self, "symbols", tuple(symints))


class _NamingInterpreter(Interpreter):
    """Runs a backward graph on the trace's values and names what that leaves behind."""

    def __init__(self, trace: Trace, module: torch.fx.GraphModule, prefix: str) -> None:
        super().__init__(module)
        self.trace = trace
        self.prefix = prefix

    def run_node(self, node: Node) -> Any:
        nodes = self.trace.graph.nodes
        before = next(iter(reversed(nodes)))
        result = super().run_node(node)
        if node.op == "placeholder" and isinstance(result, torch.Tensor):
            self._name(self.trace.node_of(result), node)
        last = next(iter(reversed(nodes)))
        if last is not before and node.op == "call_function":
            self._name(last, node)
        return result

    def _name(self, made: Node, node: Node) -> None:
        if not made.name.startswith("aot"):
            made._rename(self.prefix + node.name)


class BackwardInliner:
    """Traces the backward graphs that autograd.Functions expose; one for each trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._uses: Counter[int] = Counter()  # of each graph, by its id

    def inline(
        self, context: Any, saved: Sequence[Any], symints: Sequence[Any], grads: Sequence[Any]
    ) -> tuple[Any, ...] | None:
        """Trace the backward graph that an autograd.Function exposes.

        Returns:
            The gradients of its inputs, or None when the function exposes no graph or the graph
            takes something that the trace cannot name (the function is then called).
        """
        if not exposes_graph(context):
            return None
        cls = context._forward_cls
        if any(grad is None for grad in grads) and cls.weft_dynamic:
            return None  # zeros in its place would have sizes that nothing here can name
        view = _Sizes(context, saved, symints)
        args = list(cls.weft_backward_inputs(view, *grads))
        if not all(map(self._nameable, args)):
            return None
        uses = self._uses[cls.weft_aot_id]
        self._uses[cls.weft_aot_id] += 1
        prefix = f"aot{cls.weft_aot_id}_" + (f"{uses}_" if uses else "")
        graph = cls.weft_backward_graph_for(grads)
        outputs = _NamingInterpreter(self.trace, graph, prefix).run(*args)
        pairs = zip(outputs, cls.weft_reached(grads), strict=True)
        outputs = [out if there else None for out, there in pairs]
        return tuple(cls.weft_backward_outputs(view, outputs))

    def _nameable(self, value: Any) -> bool:
        """Whether it is a fake tensor or symbol of the trace: a number could change unnoticed."""
        if isinstance(value, torch.Tensor):
            return getattr(value, "fake_mode", None) is self.trace.mode
        return value is None or isinstance(value, torch.SymInt)


def symbolic_dims(context: Any, count: int) -> list[list[int]]:
    """For each of the `count` tensors that a compiled forward saved, its symbolic dimensions."""
    if not exposes_graph(context) or not context._forward_cls.weft_dynamic:
        return [[] for _ in range(count)]
    holders = context._forward_cls.weft_backward_graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in holders]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    return [
        [dim for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]
        for shape in shapes[:count]
    ]


_NEAR = 16


def reaches_dynamic(roots: Sequence[Any]) -> bool:
    """Whether a compiled forward with symbolic sizes is among the nodes nearest to the roots."""
    if not counters["aot"]["symbolic_backwards"]:
        return False
    todo = deque(root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots)
    for _ in range(_NEAR):
        if not todo:
            return False
        node = todo.popleft()
        if node is None:
            continue
        if getattr(getattr(node, "_forward_cls", None), "weft_dynamic", False):
            return True
        todo.extend(child for child, _ in node.next_functions)
    return False
