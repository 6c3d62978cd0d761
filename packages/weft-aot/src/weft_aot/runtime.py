"""The autograd function around a compiled forward and backward.

The class carries the small protocol by which a compiled-autograd stage can inline the backward
without importing this package: `weft_aot_id`, `weft_backward_graph`, `weft_dynamic`,
`weft_backward_inputs`, `weft_backward_outputs`, `weft_reached`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from weft_core.events import counters

from weft_aot.piecewise import Pieces
from weft_aot.records import JointGraph, Partition
from weft_aot.replay import Replay
from weft_aot.wrapper import make_backward_inputs, make_backward_outputs, make_call, make_forward

Compiled = Callable[..., Any]
_IDS = itertools.count(1)


def build_inference(joint: JointGraph, compiled: Compiled) -> Compiled:
    """A callable of flat arguments that runs the whole graph; nothing is recorded in it."""
    run = _without_autocast(compiled)
    needy = any(getattr(node.meta["val"], "requires_grad", False) for node in joint.placeholders())
    if torch.is_grad_enabled() and (joint.mutations or needy):
        # Autograd may not see what the program detached, nor the graph's own copies.
        return make_call(joint, torch.no_grad()(run))
    return make_call(joint, run)


def build_training(
    joint: JointGraph,
    parts: Partition,
    forward: Compiled,
    compile_backward: Callable[[fx.GraphModule], Compiled],
    program: Callable[..., Any],
) -> Compiled:
    """A callable of flat arguments whose differentiable results have the compiled backward.

    Args:
        joint: what was traced.
        parts: how it was cut.
        forward: compiled `parts.forward`; returns a sequence.
        compile_backward: makes of `parts.backward`, or an extract of it, a callable that returns a
            sequence, None for a missing gradient. With an attribute `call_owning`, that is called
            with a list of the arguments, from which it takes tensors when it needs them no more.
        program: what `joint` was traced from; it makes gradients under ``create_graph=True``.
    """
    inputs, outputs = make_backward_inputs(joint, parts), make_backward_outputs(joint)
    replay = Replay(program, joint, parts)
    pieces = Pieces(joint, parts, lambda g: _without_autocast(compile_backward(g)), inputs)
    dynamic = _has_symbolic_sizes(parts)
    counters["aot"]["symbolic_backwards"] += dynamic

    members = {
        "forward": staticmethod(
            make_forward(joint, parts, _without_autocast(forward), replay.kept)
        ),
        "backward": staticmethod(
            _make_backward(compile_backward(parts.backward), parts, pieces, replay, outputs)
        ),
        # Lets the engine tell compiled autograd the saved sizes by name instead of by value.
        "_compiled_autograd_key": staticmethod(
            lambda ctx: (ctx._autograd_function_id, *getattr(ctx, "symbols", ()))
        ),
        "boxed_grads_call": True,
        "weft_aot_id": next(_IDS),
        "weft_backward_graph": parts.backward,
        "weft_dynamic": dynamic,
        "weft_backward_inputs": staticmethod(inputs),
        "weft_backward_outputs": staticmethod(outputs),
        "weft_reached": staticmethod(pieces.reached),
    }
    function: Any = type("CompiledFunction", (torch.autograd.Function,), members)
    call = make_call(joint, function.apply)
    return call if torch.is_grad_enabled() else torch.enable_grad()(call)


def _make_backward(
    compiled: Compiled, parts: Partition, pieces: Pieces, replay: Replay, outputs: Compiled
) -> Compiled:
    """`backward(ctx, *grads)` of the autograd function."""
    inputs = pieces.arguments
    owning = getattr(compiled, "call_owning", None)
    compiled = _without_autocast(compiled)

    def run(ctx: Any, grads: list[Any]) -> Any:
        if owning is None:
            return compiled(*inputs(ctx, *grads))
        args = inputs(ctx, *grads)
        grads.clear()
        ctx.maybe_clear_saved_tensors()  # nothing, under retain_graph
        return owning(args)

    def backward(ctx: Any, *passed: Any) -> Any:
        # In a list the engine hands gradients over (torch 2.13): nothing else holds them then.
        boxed = len(passed) == 1 and type(passed[0]) is list
        grads = passed[0] if boxed else list(passed)
        given = pieces.given(grads)
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        # Those of vmap (is_grads_batched) have no memory that a kernel could read.
        batched = not all(grad is None or torch._C._has_storage(grad) for grad in grads)
        if torch.is_grad_enabled() and not batched:
            return replay.gradients(
                ctx, grads, lambda: outputs(ctx, compiled(*inputs(ctx, *grads)))
            )
        if batched:
            outs = parts.backward(*inputs(ctx, *grads))
        elif pieces.is_whole(given):
            outs = run(ctx, grads)
        else:
            outs = pieces.run(ctx, grads, given)
        return outputs(ctx, pieces.only_reached(outs, given))

    return backward


def _has_symbolic_sizes(parts: Partition) -> bool:
    values = [node.meta["val"] for node in parts.backward.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values for size in getattr(value, "shape", (value,))]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _without_autocast(compiled: Compiled) -> Compiled:
    """Graphs traced under autocast hold their casts; running them must not cast again."""
    if not torch._C._is_any_autocast_enabled():
        return compiled

    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return compiled(*args)

    return run
