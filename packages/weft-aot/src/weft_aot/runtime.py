"""The autograd functions around a compiled forward and backward, one for each part of it.

Their class carries the small protocol by which a compiled-autograd stage can inline the backward
without importing this package: `weft_aot_id`, `weft_backward_graph`, `weft_dynamic`,
`weft_backward_graph_for` (where gradients are missing), `weft_backward_inputs`,
`weft_backward_outputs`, `weft_reached`, `weft_watched`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from weft_core.events import counters

from weft_aot import runtime_codegen
from weft_aot.backward_components import split_backward, without_tangents
from weft_aot.config import settings
from weft_aot.double_backward import DoubleBackward
from weft_aot.gradient_buckets import no_links, split_into_buckets
from weft_aot.hook_order import skip_unreached_hooks
from weft_aot.records import BackwardComponent, JointGraph, Partition

Compiled = Callable[..., Any]
_IDS = itertools.count()
_TRANSFORMS_ACTIVE = torch._C._are_functorch_transforms_active


def build_inference(joint: JointGraph, compiled: Compiled) -> Compiled:
    """A callable of flat arguments that runs the whole graph; nothing is recorded in it."""
    run = _without_autocast(compiled)
    needy = any(getattr(node.meta["val"], "requires_grad", False) for node in joint.placeholders())
    recorded = any(plan.recorded for plan in joint.plans)
    if (recorded or torch.is_grad_enabled()) and (joint.mutations or needy):
        # Autograd may not see what the program detached, nor the graph's own copies.
        run = torch.no_grad()(run)
    call = runtime_codegen.make_inference_call(joint, run)
    return torch.enable_grad()(call) if recorded and not torch.is_grad_enabled() else call


def build_training(
    joint: JointGraph,
    cut: Partition,
    forward: Compiled,
    compile_backward: Callable[[fx.GraphModule], Compiled],
    program: Callable[..., Any],
    bucket_bytes: int = 0,
) -> Compiled:
    """A callable of flat arguments whose differentiable results have the compiled backward.

    Args:
        joint: what was traced.
        cut: how it was cut.
        forward: compiled `cut.forward`; returns a sequence.
        compile_backward: makes of `cut.backward`, or a part of it, a callable that returns a
            sequence, None for a missing gradient. With an attribute `call_owning`, that is called
            with a list of the arguments, from which it takes tensors when it needs them no more.
        program: what `joint` was traced from; it makes gradients under ``create_graph=True``.
        bucket_bytes: for data parallel training: gradients arrive in buckets of about that size.
    """
    nodes: list[runtime_codegen.Node] = []
    parts = split_backward(joint, cut)
    links: runtime_codegen.Links = no_links
    if bucket_bytes and settings.optimize_ddp and len(parts) == 1:
        outputs: Any = cut.forward.graph.output_node().args[0]
        parts, links = split_into_buckets(joint, parts[0], bucket_bytes, len(outputs))
        counters["aot"]["gradient_buckets"] += len(parts)
    for part in parts:
        replay = DoubleBackward(program, joint, part)
        first = None if nodes else _without_autocast(forward)
        forward_of_part = runtime_codegen.make_forward(joint, part, replay.kept, first)
        function = _function(joint, part, forward_of_part, compile_backward, replay)
        reached = [index for index in part.gradients if index is not None]
        # Without an input, autograd would not take the results for differentiable.
        inputs = [] if part.links else [joint.gradients[0]]
        nodes.append((_apply(function), reached or inputs, part.links, replay.held))
    copied = [saved.source.index for saved in cut.saved if saved.source.kind == "copy"]
    call = runtime_codegen.make_training_call(joint, nodes, copied, links)
    return call if torch.is_grad_enabled() else torch.enable_grad()(call)


def _function(
    joint: JointGraph,
    part: BackwardComponent,
    forward: Compiled,
    compile_backward: Callable[[fx.GraphModule], Compiled],
    replay: DoubleBackward,
) -> Any:
    """The autograd function of one part."""
    inputs = runtime_codegen.make_backward_inputs(part)
    outputs = runtime_codegen.make_backward_outputs(part)
    backwards = _Backwards(part, compile_backward)
    dynamic = _has_symbolic_sizes(part.backward)
    counters["aot"]["symbolic_backwards"] += dynamic
    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(_make_backward(backwards, part, replay, inputs, outputs)),
        # Lets the engine tell compiled autograd the saved sizes by name instead of by value.
        "_compiled_autograd_key": staticmethod(
            lambda ctx: (ctx._autograd_function_id, *getattr(ctx, "symbols", ()))
        ),
        "boxed_grads_call": True,
        "weft_aot_id": next(_IDS),
        "weft_backward_graph": part.backward,
        "weft_backward_graph_for": staticmethod(lambda grads: backwards.of(grads).graph),
        "weft_replay": replay,
        "weft_dynamic": dynamic,
        "weft_backward_inputs": staticmethod(inputs),
        "weft_backward_outputs": staticmethod(outputs),
        "weft_watched": staticmethod(functools.partial(_watched, part)),
        "weft_reached": staticmethod(functools.partial(_reached, part)),
    }
    return type("CompiledFunction", (torch.autograd.Function,), members)


def _apply(function: Any) -> Compiled:
    """`function.apply`, but for what that does in Python for functorch's transforms."""
    direct, active = super(torch.autograd.Function, function).apply, _TRANSFORMS_ACTIVE

    def apply(*args: Any) -> Any:
        return function.apply(*args) if active() else direct(*args)

    return apply


def _reached(part: BackwardComponent, grads: Sequence[Any]) -> list[bool]:
    """Which gradients depend on those of the forward values that are there."""
    return [any(grads[place] is not None for place in places) for places in part.behind]


@dataclasses.dataclass(frozen=True)
class _Backward:
    """A backward graph, and what it was compiled to."""

    graph: fx.GraphModule
    compiled: Compiled
    owning: Compiled | None  # takes a list of arguments, which it empties

    def interpreted(self, *args: Any) -> Any:
        # A frame of its own might be captured, and only plain tensors have memory.
        return fx.Interpreter(self.graph).run(*args)


class _Backwards:
    """The backward of a part, and those where some gradients are missing, compiled when needed."""

    def __init__(
        self, part: BackwardComponent, compile_backward: Callable[[fx.GraphModule], Compiled]
    ) -> None:
        autocast = torch._C._is_any_autocast_enabled()

        def make(graph: fx.GraphModule) -> _Backward:
            compiled = compile_backward(graph)
            owning = getattr(compiled, "call_owning", None)
            return _Backward(graph, _without_autocast(compiled, autocast), owning)

        self.whole = make(part.backward)
        self._part, self._make = part, make
        self._known: dict[tuple[int, ...], _Backward] = {}
        self._lock = threading.RLock()

    def of(self, grads: Sequence[Any]) -> _Backward:
        """The backward where some of `grads` are None."""
        missing = tuple(place for place, grad in enumerate(grads) if grad is None)
        with self._lock:
            if missing not in self._known:
                graph = without_tangents(self._part, missing) if missing else None
                self._known[missing] = self.whole if graph is None else self._make(graph)
            return self._known[missing]


def _make_backward(
    backwards: _Backwards,
    part: BackwardComponent,
    replay: DoubleBackward,
    inputs: Compiled,
    outputs: Compiled,
) -> Compiled:
    """`backward(ctx, *grads)` of the autograd function."""
    edges = [k for k, index in enumerate(part.gradients) if index is not None]

    def read(ctx: Any, grads: list[Any], chosen: _Backward) -> Any:
        try:
            return inputs(ctx, *grads)
        except RuntimeError:  # a saved tensor was written
            if chosen is backwards.whole:
                raise
        return inputs(_UsedSavedTensors(ctx, part, chosen.graph.graph), *grads)

    def run(ctx: Any, grads: list[Any], chosen: _Backward) -> Any:
        args = read(ctx, grads, chosen)
        if chosen.owning is None:
            return chosen.compiled(*args)
        grads.clear()
        ctx.maybe_clear_saved_tensors()  # nothing, under retain_graph
        return chosen.owning(args)

    def backward(ctx: Any, *passed: Any) -> Any:
        # In a list the engine hands gradients over (torch 2.13): nothing else holds them then.
        boxed = len(passed) == 1 and type(passed[0]) is list
        grads = passed[0] if boxed else list(passed)
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        reached = None if len(given) == len(grads) else _reached(part, grads)
        if reached is not None or not edges:
            skip_unreached_hooks(
                ctx, [reached is not None and reached[k] for k in edges] or [False]
            )
        if part.inner:
            _add_retained_gradients(ctx, part, replay, grads)
        # Those of vmap (is_grads_batched) have no memory that a kernel could read.
        batched = not all(map(torch._C._has_storage, given))
        plain = not batched and all(type(grad) is torch.Tensor for grad in given)
        del given
        chosen = backwards.whole if reached is None else backwards.of(grads)
        if torch.is_grad_enabled():
            once = chosen.interpreted if batched else chosen.compiled
            return replay.gradients(
                ctx, grads, lambda: outputs(ctx, once(*read(ctx, grads, chosen)))
            )
        outs = run(ctx, grads, chosen) if plain else chosen.interpreted(*read(ctx, grads, chosen))
        if reached is not None:
            outs = [out if there else None for out, there in zip(outs, reached, strict=True)]
        return outputs(ctx, outs)

    return backward


class _UsedSavedTensors:
    """A context whose saved tensors are unpacked only where a backward graph uses them, for others
    may have been written since."""

    def __init__(self, ctx: Any, part: BackwardComponent, graph: fx.Graph) -> None:
        rows = zip(part.saved, graph.find_nodes(op="placeholder"))
        self._ctx, self._used = ctx, [bool(x.users) for saved, x in rows if not saved.symbolic]

    @property
    def saved_tensors(self) -> list[Any]:
        raw = zip(self._ctx._raw_saved_tensors, self._used, strict=True)
        return [saved.unpack() if used else saved.data for saved, used in raw]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _watched(part: BackwardComponent, ctx: Any) -> list[tuple[Any, int, tuple[int, ...]]]:
    """Values with hooks or a gradient to retain, of which others are made: the rows of `inner`."""
    rows = [(held(), *row) for held, row in zip(getattr(ctx, "inner", ()), part.inner)]
    return [row for row in rows if row[0] is not None and _is_watched(row[0])]


def _is_watched(value: torch.Tensor) -> bool:
    return value.retains_grad or bool(value._backward_hooks)


def _looks(hook: Any) -> bool:
    """Say whether a hook may look at its gradient; those of torch (FSDP's) want the moment only."""
    return not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.")


def _add_retained_gradients(
    ctx: Any, part: BackwardComponent, replay: DoubleBackward, grads: Sequence[Any]
) -> None:
    """Add to the gradients that values retain what comes from others that are made of them.

    The engine saw what comes from outside of the graph alone.

    Raises:
        RuntimeError: hooks were called with that, or the program cannot run again.
    """
    for value, place, users in _watched(part, ctx):
        if all(grads[user] is None for user in users):
            continue
        if any(map(_looks, (value._backward_hooks or {}).values())):
            raise RuntimeError(
                "a hook on a result of a compiled graph was called without the gradient that comes "
                "from another result which the graph makes of it; end the graph between the two "
                "(weft.graph_break), or register the hook inside the compiled function"
            )
        if value.retains_grad:
            grad = replay.inner(ctx, place, {user: grads[user] for user in users})
            value.grad = grad if value.grad is None else value.grad + grad


def _has_symbolic_sizes(backward: fx.GraphModule) -> bool:
    values = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values for size in getattr(value, "shape", (value,))]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _without_autocast(compiled: Compiled, autocast: bool | None = None) -> Compiled:
    """Graphs traced under autocast hold their casts; running them must not cast again."""
    if not (torch._C._is_any_autocast_enabled() if autocast is None else autocast):
        return compiled

    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return compiled(*args)

    return run
