"""Runs a tape node by node on real tensors: slow, exact for every size, the reference.

Used for a backward that has no graph form, for one that a compiled graph does not fit any more, and
by tests to compare with. Values, inputs too, are dropped after their last use, as the eager engine
drops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from weft_compiled_autograd.hooks import OmittedGradient, call_backward
from weft_compiled_autograd.saved_tensor_hooks import layout
from weft_compiled_autograd.tape import PLACEHOLDERS, Tape


def _last_uses(tape: Tape) -> dict[Node, list[Node]]:
    """For each node the values that nothing after it needs."""
    last: dict[Node, Node] = {}
    for node in tape.graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    drops: dict[Node, list[Node]] = {}
    for used, node in last.items():
        drops.setdefault(node, []).append(used)
    return drops


class TapeStep:
    """One step of a tape as a function of the values that it uses. A target of fx nodes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.__name__ = getattr(node.target, "__name__", "step")
        self.__module__ = __name__

    def __call__(self, *values: Any) -> Any:
        table = dict(zip(self.node.all_input_nodes, values, strict=True))
        args, kwargs = map_arg((self.node.args, self.node.kwargs), table.__getitem__)
        with torch.no_grad():
            return self.node.target(*args, **kwargs)  # type: ignore[operator]


def needed_after(tape: Tape, step: Node) -> list[Node]:
    """The results of earlier steps that steps after this one use."""
    nodes = list(tape.graph.nodes)
    here = nodes.index(step)
    later = set(nodes[here + 1 :])
    return [n for n in nodes[:here] if n.op != "placeholder" and not later.isdisjoint(n.users)]


def _materialized(context: Any, names: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Zeros for gradients that turned out to be undefined, unless the function wants None.

    Which of the two it wants cannot be read, so the function's code is asked.
    """
    cls = context._forward_cls
    codes = [getattr(f, "__code__", None) for f in (cls.forward, cls.setup_context)]
    if any("set_materialize_grads" in code.co_names for code in codes if code is not None):
        return list(grads)
    return [
        torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if grad is None and isinstance(name, Node)
        else grad
        for name, grad, like in zip(names, grads, context._input_metadata, strict=True)
    ]


def run_tape(
    tape: Tape,
    *arguments: Sequence[Any],
    unpacked: dict[Node, Any] | None = None,
    after: OmittedGradient | None = None,
) -> list[torch.Tensor | None]:
    """Run a tape.

    Args:
        tape: what the engine recorded.
        arguments: inputs, sizes, scalars, hooks, packed_data, as the engine passes them.
        unpacked: receives the layouts of what unpack hooks return, by node; None where there is
            none.
        after: the function where a graph of this tape had to stop.

    Returns:
        The gradients that the engine asked for; variables' gradients have been accumulated.
    """
    drops = _last_uses(tape)
    inputs: Any = arguments[0]
    found = dict(zip(PLACEHOLDERS, arguments, strict=True))
    values: dict[Node, Any] = {}
    outputs: list[torch.Tensor | None] = []
    nodes = list(tape.graph.nodes)
    if after is not None:
        step = nodes[after.position]
        values.update(zip(needed_after(tape, step), after.rest, strict=True))
        values[step] = after.out
        places = [node for node in nodes if node.op == "placeholder"]
        nodes = places + nodes[after.position + 1 :]

    with torch.no_grad():
        for node in nodes:
            if node.op == "placeholder":
                values[node] = found[node.target]
            elif node.op == "output":
                outputs = list(map_arg(node.args[0], values.__getitem__))
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                if node.target is call_backward:
                    context, names = args[0], node.args[4]
                    args = (*args[:4], _materialized(context, names, args[4]))
                values[node] = node.target(*args, **kwargs)
                if args and args[0] is inputs:  # a tensor taken out of `inputs`, each once
                    inputs[args[1]] = None
                if unpacked is not None and kwargs.get("hook_type") == "unpack_hook":
                    unpacked[node] = layout(values[node])
            for used in drops.get(node, ()):
                values.pop(used, None)
    return outputs
