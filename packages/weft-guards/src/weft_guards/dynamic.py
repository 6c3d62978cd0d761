"""Which sizes and ints become symbolic: the automatic policy, and the user's marks.

The first compile takes every size as it is. A size that differs at a later compile of the same
code object becomes symbolic, so that two compiles, not one per size, serve a program whose batch
changes. `mark_dynamic` and friends decide beforehand. Sizes 0 and 1 stay constants: broadcasting
and emptiness give them meanings of their own. Nothing here needs sympy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from weft_core.errors import Unsupported, UserStack
from weft_core.events import logger

from weft_guards.config import settings
from weft_guards.sources import Source

_log = logger("guards", "dynamic")


class Mark(Enum):
    """What a user said of a dimension."""

    DYNAMIC = "mark_dynamic"  # symbolic from the first compile
    MAYBE = "maybe_mark_dynamic"  # the same, but specialising it is no error
    STATIC = "mark_static"


_ATTRIBUTE = "_weft_marks"
# Programs written for torch.compile leave their marks in these attributes.
_FOREIGN = (
    ("_dynamo_dynamic_indices", Mark.DYNAMIC),
    ("_dynamo_weak_dynamic_indices", Mark.MAYBE),
    ("_dynamo_static_indices", Mark.STATIC),
)


def _mark(tensor: torch.Tensor, index: int | Iterable[int] | None, mark: Mark) -> None:
    if index is None:
        dims: Iterable[int] = range(tensor.dim())
    else:
        dims = (index,) if isinstance(index, int) else index
    marks = dict(getattr(tensor, _ATTRIBUTE, {}))
    for dim in dims:
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"dimension {dim} of a tensor with {tensor.dim()} dimensions")
        marks[dim % tensor.dim()] = mark
    setattr(tensor, _ATTRIBUTE, marks)


def mark_dynamic(tensor: torch.Tensor, index: int | Iterable[int]) -> None:
    """Make these dimensions symbolic from the first compile that sees this tensor.

    Raises:
        IndexError: for a dimension that the tensor does not have.
    """
    _mark(tensor, index, Mark.DYNAMIC)


def maybe_mark_dynamic(tensor: torch.Tensor, index: int | Iterable[int]) -> None:
    """As `mark_dynamic`, but code that needs a constant there may have it."""
    _mark(tensor, index, Mark.MAYBE)


def mark_static(tensor: torch.Tensor, index: int | Iterable[int] | None = None) -> None:
    """Never make these dimensions (default: any) symbolic."""
    _mark(tensor, index, Mark.STATIC)


def marks_of(tensor: torch.Tensor) -> dict[int, Mark]:
    """Return the marks of a tensor by dimension."""
    marks: dict[int, Mark] = {}
    own = tensor.__dict__
    for attribute, mark in _FOREIGN:
        marks.update(dict.fromkeys(own.get(attribute, ()), mark))
    marks.update(own.get(_ATTRIBUTE, {}))
    return marks


@dataclass
class DynamicPolicy:
    """Remembers the sizes and ints one code object was compiled for.

    Args:
        dynamic: None for the automatic policy, True for symbolic from the start, False for never.
    """

    dynamic: bool | None = None
    _sizes: dict[tuple[Source, int], list[int | None]] = field(default_factory=dict)
    _numbers: dict[Source, float | None] = field(default_factory=dict)

    def dims(self, source: Source, tensor: torch.Tensor) -> tuple[bool, ...]:
        """Decide for each dimension of a tensor whether it is symbolic, and remember its sizes.

        Parameters are static unless marked. A tensor of another rank is another case.
        """
        marks = marks_of(tensor)
        seen = self._sizes.setdefault((source, tensor.dim()), list(tensor.shape))
        parameter = isinstance(tensor, torch.nn.Parameter)
        dims = []
        for dim, size in enumerate(tensor.shape):
            if seen[dim] != size:
                if seen[dim] is not None:
                    _log.info("size %d of %s: %s, then %d", dim, source, seen[dim], size)
                seen[dim] = None  # differed once: symbolic from now on
            wish = self._decide(seen[dim] is None, marks.get(dim), parameter)
            dims.append(wish and size not in (0, 1))
        return tuple(dims)

    def _decide(self, changed: bool, mark: Mark | None, parameter: bool) -> bool:
        if mark is not None:
            return mark is not Mark.STATIC
        if self.dynamic is False or parameter:
            return False
        return bool(self.dynamic) or (changed and settings.automatic_dynamic_shapes)

    def dynamic_dims(self, source: Source, tensor: torch.Tensor) -> list[int]:
        """Return the dimensions that `dims` decides to make symbolic."""
        return [dim for dim, how in enumerate(self.dims(source, tensor)) if how]

    def observe(self, source: Source, value: object) -> None:
        """Remember the size or value of an argument of a call that is not compiled."""
        if isinstance(value, torch.Tensor):
            self.dims(source, value)
        elif type(value) in (int, float):
            self._changed(source, value)  # type: ignore[arg-type]

    def int_is_dynamic(self, source: Source, value: int, *, argument: bool = True) -> bool:
        """Decide whether an int becomes symbolic, and remember its value.

        Attributes, globals and the like are configuration until they change, whatever `dynamic`.
        """
        changed = self._changed(source, value)
        if settings.specialize_int or value in (0, 1) or not (argument or changed):
            return False
        return self._decide(changed, None, parameter=False)

    def float_is_dynamic(self, source: Source, value: float) -> bool:
        """Decide whether a float becomes an input of the graph: when it has changed once."""
        changed = self._changed(source, value)
        return changed and self.dynamic is not False and settings.automatic_dynamic_shapes

    def _changed(self, source: Source, value: float) -> bool:
        """Say whether a number was ever another one, and remember it."""
        seen = self._numbers.setdefault(source, value)
        if seen is not None and seen != value:
            _log.info("%s %s: %s, then %s", type(value).__name__, source, seen, value)
            self._numbers[source] = None
        return self._numbers[source] is None


def check_marks(
    source: Source, tensor: torch.Tensor, sizes: Sequence[Any], user_stack: UserStack = ()
) -> None:
    """Refuse a capture in which a dimension marked with `mark_dynamic` became a constant.

    Args:
        source: where the tensor came from.
        tensor: the real tensor, with its marks.
        sizes: its sizes after capture: ints where constant, SymInts where symbolic.
        user_stack: a user frame to name in the message.

    Raises:
        Unsupported: for a constant of 2 or more; 0 and 1 are constants always.
    """
    for dim, mark in marks_of(tensor).items():
        if mark is Mark.DYNAMIC and tensor.shape[dim] > 1 and _constant(sizes[dim]) is not None:
            raise Unsupported(
                "mark-dynamic",
                f"dimension {dim} of {source} is marked with mark_dynamic, but the program needs "
                f"it to be {_constant(sizes[dim])}",
                "use maybe_mark_dynamic, or remove what depends on that size",
                user_stack,
            )


def _constant(size: Any) -> int | None:
    """Return a size that is a number, also a SymInt that was found equal to one."""
    if type(size) is int:
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else None
