"""The autograd function around a compiled forward and backward.

The class carries the small protocol by which a compiled-autograd stage can inline the backward
without importing this package: `weft_aot_id`, `weft_backward_graph`, `weft_backward_inputs`,
`weft_backward_outputs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from weft_aot.records import JointGraph, Partition
from weft_aot.wrapper import make_backward_inputs, make_backward_outputs, make_call, make_forward

Compiled = Callable[..., Any]
_IDS = itertools.count(1)


def build_inference(joint: JointGraph, compiled: Compiled) -> Compiled:
    """A callable of flat arguments that runs the whole graph; nothing is recorded in it."""
    return make_call(joint, _without_autocast(compiled))


def build_training(
    joint: JointGraph, parts: Partition, forward: Compiled, backward: Compiled
) -> Compiled:
    """A callable of flat arguments whose differentiable results have the compiled backward.

    Args:
        joint: what was traced.
        parts: how it was cut.
        forward: compiled `parts.forward`; returns a sequence.
        backward: compiled `parts.backward`; returns a sequence, None for a missing gradient.
    """
    inputs, outputs = make_backward_inputs(joint, parts), make_backward_outputs(joint)
    run_backward = _without_autocast(backward)

    def apply_backward(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * joint.num_inputs
        if not torch.is_grad_enabled():
            return outputs(ctx, run_backward(*inputs(ctx, *grads)))
        with torch.no_grad():
            gradients = outputs(ctx, run_backward(*inputs(ctx, *grads)))
        return _differentiable_once(gradients)

    members = {
        "forward": staticmethod(make_forward(joint, parts, _without_autocast(forward))),
        "backward": staticmethod(apply_backward),
        # Lets the engine tell compiled autograd the saved sizes by name instead of by value.
        "_compiled_autograd_key": staticmethod(
            lambda ctx: (ctx._autograd_function_id, *getattr(ctx, "symbols", ()))
        ),
        "weft_aot_id": next(_IDS),
        "weft_backward_graph": parts.backward,
        "weft_backward_inputs": staticmethod(inputs),
        "weft_backward_outputs": staticmethod(outputs),
    }
    function: Any = type("CompiledFunction", (torch.autograd.Function,), members)
    return make_call(joint, function.apply)


class _Once(torch.autograd.Function):
    """Identity on gradients whose own backward is an error (under ``create_graph=True``)."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: Any) -> Any:
        return tuple(g.detach() if isinstance(g, torch.Tensor) else g for g in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "a compiled graph can only be differentiated once: its backward is compiled code "
            "without a backward of its own. For second derivatives run this part uncompiled "
            "(weft.disable), or compile a function that calls torch.autograd.grad itself."
        )


def _differentiable_once(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    anchor = torch.empty(0, requires_grad=True)
    results: tuple[Any, ...] = _Once.apply(anchor, *gradients)  # type: ignore[no-untyped-call]
    return results


def _without_autocast(compiled: Compiled) -> Compiled:
    """Graphs traced under autocast hold their casts; running them must not cast again."""
    if not torch._C._is_any_autocast_enabled():
        return compiled

    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return compiled(*args)

    return run
