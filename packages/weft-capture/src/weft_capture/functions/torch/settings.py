"""Settings of torch that the program changes: deterministic algorithms, precisions, backends.

A setting is changed by a deferred call, before the graph or after it; between operations the graph
breaks. The code that sets and reads them is torch's own Python, down to functions of `torch._C`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from weft_guards.sources import CallSource

from weft_capture.breaks import Break
from weft_capture.functions.table import rule, rule_of_each
from weft_capture.model.constant import FALSE, TRUE, Constant, constant
from weft_capture.model.protocol import Tracer, Value

_C: Any = torch._C
_SAME_NAME = """
    cublas_allow_tf32 cudnn_allow_tf32 cudnn_benchmark cudnn_enabled cudnn_deterministic
    cublas_allow_fp16_reduced_precision_reduction cublas_allow_bf16_reduced_precision_reduction
    float32_matmul_precision mkldnn_enabled
"""
_PAIRS: dict[Any, tuple[Callable[..., Any], ...]] = {
    getattr(_C, f"_set_{name}"): (getattr(_C, f"_get_{name}"),)
    for name in _SAME_NAME.split()
    if hasattr(_C, f"_set_{name}") and hasattr(_C, f"_get_{name}")
}
_PAIRS[torch.set_anomaly_enabled] = (torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled)
"""Setter -> the functions that read what its arguments were."""


def _read(getter: Any, tx: Tracer) -> Value:
    written = tx.calls.settings.get(getter)
    if written is not None:
        return written
    tx.guard(CallSource(getter, ()), "CONST", getter())
    return constant(getter())


@rule_of_each(*_PAIRS)
def _set(setter: Any, tx: Tracer, *values: Value) -> None:
    getters = _PAIRS[setter]
    known = values if len(values) == len(getters) else (*values, TRUE)  # anomaly's `check_nan`
    now = [_read(getter, tx).as_constant() for getter in getters]
    if [value.as_constant() for value in known] == now:
        return
    if setter is torch.set_anomaly_enabled and known[0] is TRUE:
        raise Break("autograd-mode", "anomaly detection, which needs eager's graph")
    tx.calls.change_setting(setter, values, dict(zip(getters, known, strict=True)))


rule_of_each(*(getter for getters in _PAIRS.values() for getter in getters))(_read)


@rule(torch.use_deterministic_algorithms)
def _deterministic(tx: Tracer, mode: Value, *, warn_only: Value = FALSE) -> None:
    values = Constant(bool(mode.as_constant())), Constant(bool(warn_only.as_constant()))
    getters = (
        torch.are_deterministic_algorithms_enabled,
        torch.is_deterministic_algorithms_warn_only_enabled,
    )
    if tx.graph.device_types() - {"cpu"}:  # kernels are chosen by the setting at compile time
        raise Break("context-manager", "deterministic algorithms set beside operations on a GPU")
    known: dict[Any, Value] = dict(zip(getters, values, strict=True))
    tx.calls.change_setting(_set_deterministic, values, known)


def _set_deterministic(mode: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


@rule_of_each(
    torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled
)
def _is_deterministic(getter: Any, tx: Tracer) -> Value:
    return _read(getter, tx)
