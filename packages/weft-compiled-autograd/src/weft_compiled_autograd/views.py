"""Gradients of writes through a view (`x[:, 0].mul_(2)`), torch's CopySlices node, in two halves.

Between the halves the engine runs the backward of the write itself, on the slice only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def copy_slices_prologue(
    inputs: Sequence[torch.Tensor],
    base_sizes: Sequence[int],
    base_strides: Sequence[int],
    base_offset: int,
    view_sizes: Sequence[int],
    view_strides: Sequence[int],
    view_offset: int,
) -> list[torch.Tensor]:
    """Return the base's gradient as a copy, its slice under the view, and a copy of that slice."""
    grad = inputs[0]
    result = grad.new_empty_strided(tuple(base_sizes), tuple(base_strides))
    result.copy_(grad)
    window = result.as_strided(tuple(view_sizes), tuple(view_strides), view_offset - base_offset)
    return [result, window, window.clone(memory_format=torch.contiguous_format)]


def copy_slices_epilogue(
    needs: Sequence[bool], result: torch.Tensor, grads: Sequence[Any], window: torch.Tensor
) -> list[torch.Tensor | None]:
    """Write the slice's own gradient into the base's; return the gradients of the inputs."""
    out = [grad if needed else None for grad, needed in zip(grads, needs, strict=True)]
    if out and out[0] is not None:
        window.copy_(out[0])
        out[0] = result
    return out
