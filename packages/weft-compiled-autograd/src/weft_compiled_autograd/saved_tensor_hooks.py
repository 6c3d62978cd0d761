"""Saved-tensor hooks in a graph: what an unpack hook returns is known from the packed data.

A graph needs the layout of every tensor in it, and what an unpack hook returns is seen only when
it runs. So the first backward of a structure runs node by node and notes the results; the next one
becomes a graph, for packed data that look the same. Packed objects that show no layout (a file
name, checkpoint's holders) never become part of a graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from weft_core.inlinable import inlinable

Layouts = dict[Any, tuple[Any, ...]]
"""By tape node: size, strides, dtype, device of what an unpack hook returned; if it needs grad."""

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


_DENSE = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def packed_data_key(packed: Sequence[Any]) -> Hashable:
    """What packed data look like, or None if one of them does not show it.

    Each has to hold a tensor or an array: a mere number may be a key to anything.
    """
    looks: list[Hashable] = []
    for item in packed:
        leaves, spec = pytree.tree_flatten(item, lambda value: value is None)
        found = [_look(leaf) for leaf in leaves]
        if None in found or all(isinstance(leaf, _PLAIN) for leaf in leaves):
            return None
        looks.append((str(spec), *found))
    return tuple(looks)


def _look(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return layout(leaf)
    if hasattr(leaf, "__array_interface__"):
        return ("array", leaf.shape, leaf.strides, str(leaf.dtype))
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else None


def layout(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What a graph has to know of a tensor; None if it is no dense one."""
    if tensor.layout is not torch.strided or type(tensor) not in _DENSE:
        return None
    size, strides = tuple(tensor.shape), tensor.stride()
    return (size, strides, tensor.dtype, tensor.device, tensor.requires_grad)


@inlinable
def restore_layout(
    tensor: torch.Tensor,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """An unpack hook's result, in the strides that the graph was made for.

    Raises:
        RuntimeError: when it is another tensor than the same packed data gave before.
    """
    if tuple(tensor.shape) != size or tensor.dtype != dtype or tensor.device != device:
        raise RuntimeError(
            "an unpack hook of saved_tensors_hooks returned a tensor of another size, dtype or "
            "device than it did for the same kind of packed data before"
        )
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(size, strides, dtype=dtype, device=device).copy_(tensor)
