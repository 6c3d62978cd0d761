"""torch's modes: grad mode and autocast, as context managers and as functions."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from weft_capture.breaks import Break
from weft_capture.rules.table import rule
from weft_capture.values.base import Value
from weft_capture.values.constant import FALSE, NONE, TRUE, constant
from weft_capture.values.contexts import (
    AttentionContext,
    AutocastContext,
    GradModeContext,
    InferenceContext,
    NullContext,
    decorate,
)

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


def _grad_mode(cls: Any, mode: bool) -> None:
    @rule(cls)
    def make(tx: Tracer, *args: Value) -> Value:
        context = GradModeContext(cls, (), mode)
        return decorate(tx, context, *args) if args else context


_grad_mode(torch.no_grad, mode=False)
_grad_mode(torch.enable_grad, mode=True)


@rule(torch.set_grad_enabled)
def _set_grad_enabled(tx: Tracer, mode: Value) -> Value:
    enabled = mode.as_constant()
    before = torch.is_grad_enabled()
    tx.set_grad_mode(enabled)
    return GradModeContext(torch.set_grad_enabled, (enabled,), enabled, before)


@rule(torch._C._set_grad_enabled)
def _set(tx: Tracer, mode: Value) -> Value:
    tx.set_grad_mode(mode.as_constant())
    return NONE


@rule(torch.inference_mode)
def _inference_mode(tx: Tracer, mode: Value = TRUE) -> Value:
    if mode.python_type() is not bool:
        return decorate(tx, InferenceContext(torch.inference_mode, (True,), {}), mode)
    return InferenceContext(torch.inference_mode, (mode.as_constant(),), {})


@rule(torch.autocast, torch.amp.autocast)
def _autocast(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    real_args = tuple(arg.as_constant() for arg in args)
    real_kwargs = {name: value.as_constant() for name, value in kwargs.items()}
    return AutocastContext(torch.autocast, real_args, real_kwargs)


@rule("torch.nn.attention.sdpa_kernel")
def _attention(tx: Tracer, backends: Value, set_priority: Value = FALSE) -> Value:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415 - loaded by the caller

    found: list[Any] = []
    one = issubclass(backends.python_type(), SDPBackend)
    for value in [backends] if one else map(tx.force, backends.unpack(tx)):
        found.append(getattr(value, "obj", None))
        if not isinstance(found[-1], SDPBackend):
            raise Break("unsupported-value", f"{value.describe()} as an attention backend")
        if value.source is not None:
            tx.guard_identity(value.source, found[-1])
    return AttentionContext(sdpa_kernel, (found, set_priority.truth(tx)), {})


@rule(torch.profiler.record_function)
def _record_function(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    return NullContext(torch.profiler.record_function)


_REGIONS = itertools.count(1)
_CHECKPOINT_OPTIONS = (
    "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop",
)  # fmt: skip


@rule(torch.utils.checkpoint.checkpoint)
def _checkpoint(tx: Tracer, function: Value, *args: Value, **kwargs: Value) -> Value:
    """Trace the function itself; its nodes are marked as those to compute again in the backward.

    What a `context_fn` would keep is not known here: the partitioner chooses. A function that
    writes to what was there before (BatchNorm's statistics) does so twice, so it is no such region.
    """
    kept = {name: value for name, value in kwargs.items() if name not in _CHECKPOINT_OPTIONS}
    before, effects = tx.graph.region, (tx.calls.count, tx.graph.writes())
    if "context_fn" not in kwargs:
        tx.graph.region = next(_REGIONS)
    try:
        result = function.call(tx, list(args), kept)
    finally:
        tx.graph.region = before
    if (tx.calls.count, tx.graph.writes()) != effects:
        raise Break("unknown-call", "effects in a function that the backward pass runs again")
    return result


def _asked_now(function: Any) -> None:
    """Answer from the real state: capture keeps it equal to the program's, and guards it."""

    @rule(function)
    def answer(tx: Tracer, *args: Value) -> Value:
        return constant(function(*(arg.as_constant() for arg in args)))


for _function in (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_enabled,
    torch.get_autocast_dtype,
    torch.is_autocast_cache_enabled,
    torch.is_autocast_cpu_enabled,
    torch._C._is_any_autocast_enabled,
    torch.get_autocast_gpu_dtype,
    torch.get_autocast_cpu_dtype,
    torch.are_deterministic_algorithms_enabled,
):
    _asked_now(_function)
