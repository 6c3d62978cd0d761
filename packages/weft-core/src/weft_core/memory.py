"""Whether tensors have elements in common, judged by where their elements lie."""

from __future__ import annotations

import torch


def are_disjoint(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two strided tensors surely have no byte in common.

    They have none where they lie one behind the other in their storage, or in different columns of
    rows of one length.
    """
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return True
    if 0 in one.shape or 0 in other.shape:
        return True
    spans, others = _spans(one), _spans(other)
    start, end = _begin(one), _begin(other)
    if start + sum(spans.values()) < end or end + sum(others.values()) < start:
        return True
    for row in sorted(spans.keys() & others.keys(), reverse=True):
        inner = [_inner(tensor, row) for tensor in (one, other)]
        if None not in inner:
            (first, last), (other_first, other_last) = inner  # type: ignore[misc]
            if last < other_first or other_last < first:
                return True
    return False


def _begin(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _spans(tensor: torch.Tensor) -> dict[int, int]:
    """How many bytes the dimensions of each stride reach over; the last byte of an element too."""
    size = tensor.element_size()
    spans = {0: size - 1}
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        spans[stride * size] = spans.get(stride * size, 0) + (count - 1) * stride * size
    return spans


def _inner(tensor: torch.Tensor, row: int) -> tuple[int, int] | None:
    """The first and last byte of a tensor in each row; None where its rows are not of one kind."""
    spans = _spans(tensor)
    if not row or any(stride % row for stride in spans if stride > row):
        return None
    first = _begin(tensor) % row
    last = first + sum(span for stride, span in spans.items() if stride < row)
    return (first, last) if last < row else None
