"""`as_strided` depends on the storage of its argument: guards on storage offset and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from weft_guards.sources import CallSource

from weft_capture.breaks import Break
from weft_capture.model.protocol import Tracer
from weft_capture.tensors.inputs import GraphInput

_NAMES = ("as_strided", "as_strided_", "as_strided_copy")


def begins_its_memory(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has no storage offset."""
    return tensor.storage_offset() == 0


def guard_strided(tx: Tracer, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Guard what `as_strided` of a fake assumes: offsets count from the start of the memory.

    The fake of an argument begins its memory and has no more than its own elements.

    Raises:
        Break: it would reach memory that the fake does not have.
    """
    name = getattr(target, "__name__", target)
    if not isinstance(name, str) or name.partition(".")[0] not in _NAMES:
        return
    x, sizes, strides, offset = _arguments(*args, **kwargs)
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or 0 in sizes:
        return
    first = x.storage_offset() if offset is None else offset
    end = first + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1
    if end * x.element_size() > x.untyped_storage().nbytes():
        raise Break("tensor-storage", f"{name} beyond the elements of the tensor")
    entry = None if offset is None else _owner(tx.graph.inputs, x)
    if entry is None:
        return
    if not begins_its_memory(entry.example):  # type: ignore[arg-type]
        raise Break("tensor-storage", f"{name} with an offset, of a tensor with an offset")
    tx.guard(CallSource(begins_its_memory, (entry.source,)), "CONST", True)


def _arguments(
    self: Any = None, size: Any = (), stride: Any = (), storage_offset: Any = None, **rest: Any
) -> tuple[Any, Any, Any, Any]:
    return rest.get("input", self), size, stride, storage_offset


def _owner(inputs: Sequence[GraphInput], x: torch.Tensor) -> GraphInput | None:
    memory = x.untyped_storage()._cdata
    for entry in inputs:
        fake = entry.node_example
        if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
            if fake.untyped_storage()._cdata == memory:
                return entry
    return None
