"""Operators that change the sizes of a tensor in place, in a graph that is run node by node."""

from __future__ import annotations

from typing import Any

from torch import fx

RESHAPE_ITSELF = "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_".split()  # noqa: SIM905


def take_reshaped(env: dict[fx.Node, Any], node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Let another view take a tensor's place in `env`, for a `node` that changes its shape.

    In a trace, autograd counts that for a write, which eager does not, and would replay the
    tensor's views on the new shape.
    """
    tensor = args[0]
    if tensor.is_leaf and tensor.requires_grad:  # which eager refuses
        return getattr(tensor, str(node.target))(*args[1:], **kwargs)
    view = getattr(tensor, str(node.target).removesuffix("_"))(*args[1:], **kwargs)
    for known, value in env.items():
        if value is tensor:
            env[known] = view
    return view
