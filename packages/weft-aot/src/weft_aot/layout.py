"""The layout the trace assumes of a gradient: dense, dimensions ordered as those of its value."""

from __future__ import annotations

import torch
from weft_core.symnodes import hint


def memory_order(value: torch.Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest, if `value` is dense; else plain order.

    Symbolic sizes and strides are judged by their example values, so nothing is guarded.
    """
    plain = list(range(value.dim()))
    sizes, strides = [*map(hint, value.shape)], [*map(hint, value.stride())]
    order = sorted(plain, key=lambda dim: (-strides[dim], dim))
    span = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != span:
            return plain
        span *= sizes[dim]
    # Dimensions of size one may carry any stride: they do not make a layout of its own.
    matters = [dim for dim in order if sizes[dim] != 1]
    return plain if matters == sorted(matters) else order
