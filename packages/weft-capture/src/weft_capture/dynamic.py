"""Which sizes, strides and ints from outside become symbolic in one capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft_core.wrappers import is_distributed
from weft_guards.sources import ConstSource, DictSource, ItemSource, LocalSource, Source

from weft_capture.breaks import NeedsSymbols
from weft_capture.values.base import Value

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer

Dims = tuple[int, ...]


def dynamic_layout(tx: Tracer, tensor: torch.Tensor, source: Source) -> tuple[Dims, Dims]:
    """Return which dimensions of an input become symbolic, and whose strides become symbols."""
    spread = is_distributed(type(tensor)) or getattr(source, "name", "") == "_local_tensor"
    if tx.policy is None or spread or isinstance(source, ConstSource):
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
    if tx.policy is None or (root is not source and tx.steps.aimless):
        return None  # hundreds of symbols for nothing
    argument = isinstance(root, LocalSource)
    if not tx.policy.int_is_dynamic(source, number, argument=argument):
        return None
    if not tx.symbolic:
        raise NeedsSymbols
    value = tx.graph.symint_input(number, source)
    if value is not None:
        tx.guard(source, "TYPE", int)
    return value
