"""Which sizes, strides and ints from outside become symbolic in one capture."""

from __future__ import annotations

from typing import Any

import torch
from weft_guards.sources import CallSource, ConstSource, DictSource, ItemSource, LocalSource, Source

from weft_capture.breaks import NeedsSymbols
from weft_capture.model.constant import constant
from weft_capture.model.protocol import Tracer, Value

Dims = tuple[int, ...]


def dynamic_layout(tx: Tracer, tensor: torch.Tensor, source: Source) -> tuple[Dims, Dims]:
    """Return the dimensions of an input that become symbolic, and those whose strides do."""
    if tx.policy is None or isinstance(source, ConstSource):
        return (), ()
    dims = tuple(d for d, varies in enumerate(tx.policy.dims(source, tensor)) if varies)
    strides = tx.policy.free_strides(source, tensor)
    if (dims or strides) and not tx.symbolic:
        raise NeedsSymbols
    return dims, strides


def dynamic_int(tx: Tracer, number: int, source: Source) -> Value | None:
    """Return a symbolic int for an input that varies; None to keep it constant."""
    root = source
    while isinstance(root, ItemSource) and not isinstance(root.base, DictSource):
        root = root.base
    if tx.policy is None or (root is not source and tx.steps.no_tensor_yet):
        return None  # it would create hundreds of symbols
    argument = isinstance(root, LocalSource)
    if not tx.policy.int_is_dynamic(source, number, argument=argument):
        return None
    if not tx.symbolic:
        raise NeedsSymbols
    value = tx.graph.symint_input(number, source)
    if value is not None:
        tx.guard(source, "TYPE", int)
    return value


def unread_length(tx: Tracer, container: Any) -> Value | None:
    """Return the length of an untouched container from outside; None for another one."""
    if not container.is_untouched():
        return None
    length = len(container.real)
    varying = tx.dynamic_int(length, CallSource(len, (container.source,)))
    if varying is None:
        tx.guard(container.source, "LEN", length)
    return varying or constant(length)
