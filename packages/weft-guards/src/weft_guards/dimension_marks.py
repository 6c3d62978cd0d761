"""What a user says of dimensions: `mark_dynamic` and friends, on a tensor or in a `shapes_spec`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from weft_core.arguments import checked


class Kind(Enum):
    """What a user can say of a dimension."""

    DYNAMIC = "mark_dynamic"  # symbolic from the first compile
    MAYBE = "maybe_mark_dynamic"  # the same, but specialising it is no error
    STATIC = "mark_static"
    UNBACKED = "mark_unbacked"  # symbolic, and nothing may depend on what it is


@dataclass(frozen=True)
class Mark:
    """What a user said of a dimension, and for which sizes (None: no limit)."""

    kind: Kind
    min: int | None = None
    max: int | None = None

    def admits(self, size: int) -> bool:
        """Say whether a size is in the range."""
        return (self.min is None or self.min <= size) and (self.max is None or size <= self.max)


@checked
def varying(*, min: int | None = None, max: int | None = None) -> Mark:
    """Return an entry of a `shapes_spec`: a size or an int that varies within limits."""
    return Mark(Kind.DYNAMIC, min, max)


Dims = int | Iterable[int]  # dimensions; negative ones count from the last
_ATTRIBUTE = "_weft_marks"
# Programs written for torch.compile leave their marks in these attributes.
_FOREIGN = (
    ("_dynamo_dynamic_indices", Kind.DYNAMIC),
    ("_dynamo_weak_dynamic_indices", Kind.MAYBE),
    ("_dynamo_static_indices", Kind.STATIC),
    ("_dynamo_unbacked_indices", Kind.MAYBE),  # generated code is worth more to them
    ("_dynamo_strict_unbacked_indices", Kind.MAYBE),
)


def _mark(tensor: torch.Tensor, index: Dims | None, mark: Mark) -> None:
    everything = range(tensor.dim()) if index is None else index
    dims = everything if isinstance(everything, Iterable) else (everything,)
    marks = dict(getattr(tensor, _ATTRIBUTE, {}))
    for dim in dims:
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"dimension {dim} of a tensor with {tensor.dim()} dimensions")
        if not mark.admits(tensor.shape[dim]):
            raise ValueError(f"size {tensor.shape[dim]} is not in {mark.min} to {mark.max}")
        marks[dim % tensor.dim()] = mark
    setattr(tensor, _ATTRIBUTE, marks)


@checked
def mark_dynamic(
    tensor: torch.Tensor, index: Dims, *, min: int | None = None, max: int | None = None
) -> None:
    """Make these dimensions symbolic from the first compile that sees this tensor.

    The code is compiled for sizes from `min` to `max`; others are compiled again.

    Raises:
        IndexError: for a dimension that the tensor does not have.
        ValueError: for a size that is not in the range.
    """
    _mark(tensor, index, Mark(Kind.DYNAMIC, min, max))


@checked
def mark_unbacked(
    tensor: torch.Tensor, index: Dims, *, min: int | None = None, max: int | None = None
) -> None:
    """As `mark_dynamic`, but no code may depend on the value of these sizes.

    Capture treats such a size as a number out of a tensor: a branch on it breaks the graph, and
    what an operation assumes of it is checked when it runs. Operations run one by one.
    """
    _mark(tensor, index, Mark(Kind.UNBACKED, min, max))


@checked
def maybe_mark_dynamic(tensor: torch.Tensor, index: Dims) -> None:
    """As `mark_dynamic`, but capture may turn the size into a constant."""
    _mark(tensor, index, Mark(Kind.MAYBE))


@checked
def mark_static(tensor: torch.Tensor, index: Dims | None = None) -> None:
    """Never make these dimensions (default: any) symbolic."""
    _mark(tensor, index, Mark(Kind.STATIC))


def marks_of(tensor: torch.Tensor) -> dict[int, Mark]:
    """Return the marks of a tensor by dimension."""
    own = tensor.__dict__
    marks: dict[int, Mark] = {}
    if tensor.numel():  # jagged tensors keep numbers as sizes of empty ones, which torch marks
        marks.update({dim: Mark(kind) for name, kind in _FOREIGN for dim in own.get(name, ())})
        for one in own.get("_dynamo_dynamic_range", ()):
            marks[one.dim] = Mark(Kind.DYNAMIC, one.min, one.max)
    marks.update(own.get(_ATTRIBUTE, {}))
    return marks
