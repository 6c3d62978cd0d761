"""torch's modes: grad mode and autocast, as context managers and as functions."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from weft_core import torch_compiler_shim
from weft_core.tensor_versions import version_of
from weft_guards.sources import CallSource, ConstSource

from weft_capture.breaks import Break
from weft_capture.effects.rehearsals import watched
from weft_capture.functions.table import code_rule, pure, rule, rule_of_each
from weft_capture.model.constant import FALSE, TRUE, fold
from weft_capture.model.contexts import (
    AttentionContext,
    AutocastContext,
    HooksDisabled,
    InferenceContext,
    NullContext,
    decorate_with_clones,
)
from weft_capture.model.functions import BuiltinValue
from weft_capture.model.protocol import Kwargs, Tracer, Value
from weft_capture.model.region_marks import nodes_after


@rule(torch._C._set_grad_enabled)
def _set(tx: Tracer, mode: Value) -> None:
    tx.set_grad_mode(mode.as_constant())


@rule(torch.inference_mode)
def _inference_mode(tx: Tracer, mode: Value = TRUE) -> Value:
    if mode.python_type() is not bool:
        return decorate_with_clones(tx, InferenceContext(torch.inference_mode, (True,), {}), mode)
    return InferenceContext(torch.inference_mode, (mode.as_constant(),), {})


@rule(torch.autocast, torch.amp.autocast)
def _autocast(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    real_args = tuple(arg.as_constant() for arg in args)
    real_kwargs = {name: value.as_constant() for name, value in kwargs.items()}
    return AutocastContext(torch.autocast, real_args, real_kwargs)


@rule(torch.autocast.__exit__)
def _leave_autocast(tx: Tracer, self: Value, *error: Value) -> Value:
    if not isinstance(self, AutocastContext):
        raise Break("context-manager", "torch.autocast.__exit__ of another object")
    return self.leave(tx)


@rule("torch.nn.attention.sdpa_kernel")
def _attention(tx: Tracer, backends: Value, set_priority: Value = FALSE) -> Value:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415 - loaded by the caller

    enabled: list[Any] = []
    single = issubclass(backends.python_type(), SDPBackend)
    for value in [backends] if single else map(tx.force, backends.unpack(tx)):
        enabled.append(getattr(value, "obj", None))
        if not isinstance(enabled[-1], SDPBackend):
            raise Break("unsupported-arguments", f"{value.describe()} as an attention backend")
        if value.source is not None:
            tx.guard_identity(value.source, enabled[-1])
    return AttentionContext(sdpa_kernel, (enabled, set_priority.nb_bool(tx)), {})


rule_of_each(
    torch.profiler.record_function,
    "torch.fx.traceback.annotate",
    *torch_compiler_shim.NO_EFFECT,
    eager_transforms.enable_inplace_requires_grad,
    forward_ad._set_fwd_grad_enabled,
)(lambda make, tx, /, *args, **kwargs: NullContext(make))


@rule(torch.autograd.graph.disable_saved_tensors_hooks)
def _disable_hooks(tx: Tracer, error_message: Value) -> Value:
    make = torch.autograd.graph.disable_saved_tensors_hooks
    return HooksDisabled(make, (error_message.as_constant(),))


def _recreate(tx: Tracer, function: Value, args: list[Value], kwargs: Kwargs) -> Value | None:
    """Create the context of a decorator such as `@sdpa_kernel(...)` by its function's rule."""
    (manager,) = args
    make = manager.tp_getattro(tx, "func")
    if not isinstance(make, BuiltinValue):
        return None
    arguments = manager.tp_getattro(tx, "args").unpack(tx)
    return make.tp_call(tx, arguments, tx.keyword_arguments(manager.tp_getattro(tx, "kwds")))


code_rule(vars(contextlib._GeneratorContextManagerBase)["_recreate_cm"].__code__)(_recreate)
_REGIONS = itertools.count(1)
_CHECKPOINT_OPTIONS = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop",
)  # fmt: skip


@rule(torch.utils.checkpoint.checkpoint)
def _checkpoint(tx: Tracer, function: Value, *args: Value, **kwargs: Value) -> Value:
    """Inline the function; its nodes are marked for recomputation in the backward.

    A `context_fn` is ignored: the partitioner chooses the tensors to save. A function that writes
    to existing objects (BatchNorm's statistics, a counter) does so twice, so the graph breaks.
    """
    kept = {name: value for name, value in kwargs.items() if name not in _CHECKPOINT_OPTIONS}
    before, writes, step = tx.graph.region, tx.graph.writes(), tx.steps.now
    last = next(iter(reversed(tx.graph.graph.nodes)), None)
    if "context_fn" not in kwargs:
        tx.graph.region = next(_REGIONS)
    try:
        with watched(tx) as has_effects:
            result = function.tp_call(tx, list(args), kept)
    finally:
        tx.graph.region = before
    if not torch.is_grad_enabled():
        return result
    if tx.graph.writes() != writes or has_effects():
        raise Break("higher-order-op", "side effects in a checkpointed function")
    nodes = nodes_after(tx, last)
    reads = {node for n in nodes for node in n.all_input_nodes}.difference(nodes)
    fakes = [node.meta["example_value"] for node in reads]
    tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
    tx.watch(_CheckpointReads(step, [(tensor, version_of(tensor)) for tensor in tensors]))
    return result


@dataclass(eq=False)
class _CheckpointReads:
    """Tensors that a checkpointed function reads, which the backward reads again."""

    step: int
    versions: list[tuple[torch.Tensor, int]]

    def check(self, _: Tracer, out: object) -> None:
        """Run the call eagerly if the program writes to them afterwards."""
        if any(version_of(tensor) != version for tensor, version in self.versions):
            detail = "a write to what a checkpointed function reads"
            raise Break("higher-order-op", detail, self.step)


# Answered from the real state: capture keeps it equal to the program's, and guards it.
pure(torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled)
pure(torch.is_autocast_cpu_enabled, torch._C._is_any_autocast_enabled)
pure(torch.get_autocast_gpu_dtype, torch.get_autocast_cpu_dtype)


@rule_of_each(torch.get_autocast_dtype, torch.is_autocast_cache_enabled, torch.get_num_threads)
def _setting(function: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    """Read the real state, with a guard where torch's own guard does not cover it."""
    result = fold(tx, function, list(args), kwargs)
    if not any(isinstance(context, torch.autocast) for context in tx.open_contexts):
        arguments = tuple(ConstSource(arg.as_constant()) for arg in (*args, *kwargs.values()))
        tx.guard(CallSource(function, arguments), "CONST", result.as_constant())
    return result
