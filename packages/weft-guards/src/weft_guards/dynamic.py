"""Which sizes and ints become symbolic: the automatic policy, and the user's marks.

The first compile takes every size as it is. A size that differs at a later compile of the same
code object becomes symbolic, so that two compiles, not one per size, serve a program whose batch
changes. `mark_dynamic` and friends decide beforehand. Sizes 0 and 1 stay constants: broadcasting
and emptiness give them meanings of their own. Nothing here needs sympy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from weft_core.errors import Unsupported, UserStack
from weft_core.events import logger

from weft_guards.config import settings
from weft_guards.profile import Fact, Profile
from weft_guards.sources import Source

_log = logger("guards", "dynamic")


class Mark(Enum):
    """What a user said of a dimension."""

    DYNAMIC = "mark_dynamic"  # symbolic from the first compile
    MAYBE = "maybe_mark_dynamic"  # the same, but specialising it is no error
    STATIC = "mark_static"
    UNBACKED = "mark_unbacked"  # symbolic, and nothing may depend on what it is


_ATTRIBUTE = "_weft_marks"
_RANGES = "_weft_ranges"
# Programs written for torch.compile leave their marks in these attributes.
_FOREIGN = (
    ("_dynamo_dynamic_indices", Mark.DYNAMIC),
    ("_dynamo_weak_dynamic_indices", Mark.MAYBE),
    ("_dynamo_static_indices", Mark.STATIC),
    ("_dynamo_unbacked_indices", Mark.MAYBE),  # generated code is worth more to them
    ("_dynamo_strict_unbacked_indices", Mark.MAYBE),
)


def _mark(tensor: torch.Tensor, index: int | Iterable[int] | None, mark: Mark) -> list[int]:
    """Mark dimensions; returns them, counted from the first."""
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
    return [dim % tensor.dim() for dim in dims]


def mark_dynamic(
    tensor: torch.Tensor,
    index: int | Iterable[int],
    *,
    min: int | None = None,
    max: int | None = None,
) -> None:
    """Make these dimensions symbolic from the first compile that sees this tensor.

    Args:
        tensor: the tensor.
        index: the dimensions, negative ones counted from the last.
        min: the least size that the compiled code is for.
        max: the greatest one; sizes outside are compiled again.

    Raises:
        IndexError: for a dimension that the tensor does not have.
        ValueError: for a size that is not in the range.
    """
    _mark_range(tensor, index, Mark.DYNAMIC, min, max)


def mark_unbacked(
    tensor: torch.Tensor,
    index: int | Iterable[int],
    *,
    min: int | None = None,
    max: int | None = None,
) -> None:
    """Compile once for all sizes of these dimensions, 0 and 1 included; otherwise `mark_dynamic`.

    Capture treats such a size as a number out of a tensor: a branch on it breaks the graph, and
    what an operation assumes of it is checked when it runs. An operation is taken not to broadcast
    it: where one would, for a size of 1, the call raises. Operations run one by one.

    Raises:
        IndexError: for a dimension that the tensor does not have.
        ValueError: for a size that is not in the range.
    """
    _mark_range(tensor, index, Mark.UNBACKED, min, max)


def _mark_range(
    tensor: torch.Tensor,
    index: int | Iterable[int],
    mark: Mark,
    min: int | None,
    max: int | None,
) -> None:
    ranges = dict(getattr(tensor, _RANGES, {}))
    for dim in _mark(tensor, [index] if isinstance(index, int) else [*index], mark):
        size = tensor.shape[dim]
        if not _is_within(size, min, max):
            raise ValueError(f"size {size} of dimension {dim} is not in the range {min} to {max}")
        ranges[dim] = (min, max)
    setattr(tensor, _RANGES, ranges)


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


def unbacked_dims(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions that are marked with `mark_unbacked`."""
    return [dim for dim, mark in marks_of(tensor).items() if mark is Mark.UNBACKED]


def ranges_of(tensor: torch.Tensor) -> dict[int, tuple[int | None, int | None]]:
    """Return the ranges that sizes were marked with, by dimension, where the tensor is in them."""
    foreign = tensor.__dict__.get("_dynamo_dynamic_range", ())
    ranges = {one.dim: (one.min, one.max) for one in foreign} | tensor.__dict__.get(_RANGES, {})
    return {dim: ends for dim, ends in ranges.items() if _is_within(tensor.shape[dim], *ends)}


def _is_within(size: int, least: int | None, greatest: int | None) -> bool:
    return (least is None or least <= size) and (greatest is None or size <= greatest)


@dataclass
class DynamicPolicy:
    """Remembers the sizes and ints one code object was compiled for.

    Args:
        dynamic: None for the automatic policy, True for symbolic from the start, False for never.
        profile: what varied in earlier processes; the automatic policy reads and extends it.
    """

    dynamic: bool | None = None
    profile: Profile | None = None
    _varied: set[Fact] | None = None  # what the profile says; None until it is asked
    _new: set[Fact] = field(default_factory=set)  # what it does not say yet
    _sizes: dict[tuple[Source, int], list[int | None]] = field(default_factory=dict)
    _numbers: dict[Source, float | None] = field(default_factory=dict)

    def dims(self, source: Source, tensor: torch.Tensor) -> tuple[bool, ...]:
        """Decide for each dimension of a tensor whether it is symbolic, and remember its sizes.

        Parameters are static unless marked. A tensor of another rank is another case.
        """
        marks = marks_of(tensor)
        rank = tensor.dim()
        seen = self._sizes.get((source, rank))
        if seen is None:
            known = [self._has_varied(source, rank, dim) for dim in range(rank)]
            seen = [None if varied else size for varied, size in zip(known, tensor.shape)]
            self._sizes[source, rank] = seen
        parameter = isinstance(tensor, torch.nn.Parameter)
        dims = []
        for dim, size in enumerate(tensor.shape):
            if seen[dim] != size:
                if seen[dim] is not None:
                    _log.info("size %d of %s: %s, then %d", dim, source, seen[dim], size)
                    self._new.add((source.expr(), rank, dim))
                seen[dim] = None  # differed once: symbolic from now on
            wish = self._decide(seen[dim] is None, marks.get(dim), parameter)
            wish = wish or is_listed(source, dim)
            constant = size in (0, 1) and marks.get(dim) is not Mark.UNBACKED
            dims.append(wish and not constant)
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
        if value in (0, 1):
            return False
        if is_listed(source):
            return True
        if settings.specialize_int or not (argument or changed):
            return False
        return self._decide(changed, None, parameter=False)

    def float_is_dynamic(self, source: Source, value: float, *, varies: bool = False) -> bool:
        """Decide whether a float becomes an input of the graph.

        Args:
            source: where it comes from.
            value: what it is.
            varies: it is known to change, as learning rates do; others are inputs once they have.
        """
        if varies or settings.specialize_float:
            return not settings.specialize_float
        changed = self._changed(source, value)
        return changed and self.dynamic is not False and settings.automatic_dynamic_shapes

    def _changed(self, source: Source, value: float) -> bool:
        """Say whether a number was ever another one, and remember it."""
        if source not in self._numbers:
            self._numbers[source] = None if self._has_varied(source) else value
        seen = self._numbers[source]
        if seen is not None and seen != value:
            _log.info("%s %s: %s, then %s", type(value).__name__, source, seen, value)
            self._numbers[source] = None
            self._new.add((source.expr(),))
        return self._numbers[source] is None

    def _has_varied(self, source: Source, *dim: int) -> bool:
        """Say whether a number, or a size (of rank, dimension), varied in an earlier process."""
        if self._varied is None:
            wanted = self.profile if self._uses_profile() else None
            self._varied = wanted.load() if wanted is not None else set()
        return bool(self._varied) and (source.expr(), *dim) in self._varied

    def _uses_profile(self) -> bool:
        automatic = self.dynamic is None and settings.automatic_dynamic_shapes
        return automatic and settings.automatic_dynamic_local_pgo

    def keep(self) -> None:
        """Tell the profile what has varied; called when code was compiled with it symbolic."""
        if self._new and self.profile is not None and self._uses_profile():
            self.profile.add(self._new)
        self._new.clear()


def is_listed(source: Source, dim: int | None = None) -> bool:
    """Say whether `config.dynamic_sources` names a number, or a dimension of a tensor."""
    if not settings.dynamic_sources:
        return False
    name = source.expr()
    return any(
        (dim is None or only in (None, dim)) and (name == pattern or _begins(pattern, name))
        for pattern, only in _patterns(settings.dynamic_sources)
    )


@functools.cache
def _patterns(text: str) -> list[tuple[str, int | None]]:
    """Split the comma list into patterns, each with the dimension it is limited to."""
    found = (re.fullmatch(r"(.*?)(?::(\d+))?", part.strip()) for part in text.split(","))
    return [(one[1], int(one[2]) if one[2] else None) for one in found if one and one[1]]


def _begins(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:  # a name that is no regular expression
        return False


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
