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

from weft_compiled_autograd.hooks import call_backward
from weft_compiled_autograd.packed import layout
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


def run_tape(
    tape: Tape, *arguments: Sequence[Any], unpacked: dict[Node, Any] | None = None
) -> list[torch.Tensor | None]:
    """Run a tape.

    Args:
        tape: what the engine recorded.
        arguments: inputs, sizes, scalars, hooks, packed_data, as the engine passes them.
        unpacked: receives the layouts of what unpack hooks return, by node; None where there is
            none, or where an autograd.Function left a gradient out.

    Returns:
        The gradients that the engine asked for; variables' gradients have been accumulated.
    """
    drops = _last_uses(tape)
    inputs: Any = arguments[0]
    found = dict(zip(PLACEHOLDERS, arguments, strict=True))
    values: dict[Node, Any] = {}
    outputs: list[torch.Tensor | None] = []

    def resolve(value: Any) -> Any:
        if isinstance(value, Node):
            return values[value]
        if isinstance(value, (list, tuple)):
            return type(value)(map(resolve, value))
        return value

    with torch.no_grad():
        for node in tape.graph.nodes:
            if node.op == "placeholder":
                values[node] = found[node.target]
            elif node.op == "output":
                outputs = list(resolve(node.args[0]))
            else:
                kwargs = {key: resolve(value) for key, value in node.kwargs.items()}
                args: Any = resolve(node.args)
                values[node] = node.target(*args, **kwargs)
                if args and args[0] is inputs:  # a tensor taken out of `inputs`, each once
                    inputs[args[1]] = None
                if unpacked is not None and kwargs.get("hook_type") == "unpack_hook":
                    unpacked[node] = layout(values[node])
                elif unpacked is not None and node.target is call_backward:
                    context: Any = resolve(node.args[0])
                    pairs = zip(values[node], context.needs_input_grad, strict=True)
                    omits = any(new is None and needed for new, needed in pairs)
                    unpacked[node] = None if omits else ()
            for used in drops.get(node, ()):
                del values[used]
    return outputs
