"""State of fake tensors that an operation changes in place, so that a rollback can restore it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from weft_core.tensor_versions import version_of

Layout = tuple[Any, Any, Any]
"""Sizes, strides and storage offset."""
State = tuple[torch.Tensor, int, bool, Layout | None]
"""A fake, how often it was written, whether it requires grad, its layout if that may change."""


def states(values: Iterable[Any], target: Any) -> list[State]:
    """Return the states of the tensors among values, and in lists of them, before `target`."""
    reshapes = changes_layout(getattr(target, "__name__", target))
    snapshot: list[State] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            laid_out = reshapes and value.layout is torch.strided
            layout = layout_of(value) if laid_out else None
            snapshot.append((value, version_of(value), value.requires_grad, layout))
        elif isinstance(value, list | tuple):
            snapshot += states(value, target)
    return snapshot


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the sizes, strides and storage offset of a tensor."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


@functools.cache
def changes_layout(name: str) -> bool:
    """Say whether an operation changes the layout of its first argument in place (`t_`)."""
    in_place = name[-1:] == "_" and name[-2:] != "__"
    packet: Any = getattr(torch.ops.aten, name.partition(".")[0], None) if in_place else None
    tags = {tag for o in packet.overloads() for tag in getattr(packet, o).tags} if packet else ()
    return torch.Tag.inplace_view in tags


def restore(before: list[State]) -> None:
    """Restore tensors; a view whose base now has a `grad_fn` keeps its own."""
    for tensor, version, requires_grad, layout in before:
        if layout is not None:
            with torch.no_grad():
                tensor.as_strided_(*layout)
        if tensor.requires_grad and not requires_grad:
            with suppress(RuntimeError):
                _ = tensor.requires_grad_(False) if tensor.is_leaf else tensor.detach_()
        if version_of(tensor) != version:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
