"""What an operation that writes to fake tensors changes of them, to be put back with its step."""

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
    found: list[State] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            laid_out = reshapes and value.layout is torch.strided
            layout = layout_of(value) if laid_out else None
            found.append((value, version_of(value), value.requires_grad, layout))
        elif isinstance(value, list | tuple):
            found += states(value, target)
    return found


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the sizes, strides and storage offset of a tensor."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


@functools.cache
def changes_layout(name: str) -> bool:
    """Say whether an operation gives its first argument another layout in place (`t_`)."""
    in_place = name[-1:] == "_" and name[-2:] != "__"
    found: Any = getattr(torch.ops.aten, name.partition(".")[0], None) if in_place else None
    tags = {tag for one in found.overloads() for tag in getattr(found, one).tags} if found else ()
    return torch.Tag.inplace_view in tags


def restore(before: list[State]) -> None:
    """Put tensors back; a view whose base has a history now keeps that."""
    for one, version, requires_grad, layout in before:
        if layout is not None:
            with torch.no_grad():
                one.as_strided_(*layout)
        if one.requires_grad and not requires_grad:
            with suppress(RuntimeError):
                _ = one.requires_grad_(False) if one.is_leaf else one.detach_()
        if version_of(one) != version:
            torch._C._autograd._unsafe_set_version_counter((one,), (version,))
