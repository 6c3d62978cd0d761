"""Which sizes and ints become symbolic: the automatic policy, or what the user says.

The first compile takes every size as it is. A size that differs at a later compile of the same
code object becomes symbolic, so that two compiles, not one per size, serve a program whose batch
changes. `mark_dynamic` and friends decide beforehand. Sizes 0 and 1 stay constants: broadcasting
and emptiness give them meanings of their own. Nothing here needs sympy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from weft_core.errors import Unsupported
from weft_core.events import logger
from weft_core.symbolic_sizes import packed_dims

from weft_guards.config import settings
from weft_guards.dimension_marks import Kind, Mark, marks_of
from weft_guards.profile import Fact, Profile
from weft_guards.sources import Source
from weft_guards.spec import ShapesSpec

_log = logger("guards", "dynamic")
_STRIDE = "stride"  # in what a profile says
_PACKED = -1  # stands for a stride that sizes decide


@dataclass
class DynamicPolicy:
    """Remembers the sizes and ints one code object was compiled for.

    Args:
        dynamic: None for the automatic policy, True for symbolic from the start, False for never.
        profile: what varied in earlier processes; the automatic policy reads and extends it.
        spec: decides everything but floats where it is given.
    """

    dynamic: bool | None = None
    profile: Profile | None = None
    spec: ShapesSpec | None = None
    _varied: set[Fact] | None = None  # what the profile says; None until it is asked
    _new: set[Fact] = field(default_factory=set)  # what it does not say yet
    _sizes: dict[tuple[Source, int], list[int | None]] = field(default_factory=dict)
    _strides: dict[tuple[Source, tuple[int, ...]], list[int | None]] = field(default_factory=dict)
    _numbers: dict[Source, object] = field(default_factory=dict)

    def dims(self, source: Source, tensor: torch.Tensor) -> tuple[bool, ...]:
        """Decide for each dimension of a tensor whether it is symbolic, and remember its sizes.

        Parameters are static unless marked. A tensor of another rank is another case.
        """
        marks = self.marks(source, tensor)
        rank = tensor.dim()
        if (source, rank) not in self._sizes:
            known = [self._has_varied(source, rank, dim) for dim in range(rank)]
            sizes = [None if varied else size for varied, size in zip(known, tensor.shape)]
            self._sizes[source, rank] = sizes
        seen = self._sizes[source, rank]
        parameter = isinstance(tensor, torch.nn.Parameter)
        dims = []
        for dim, size in enumerate(tensor.shape):
            if seen[dim] not in (None, size):
                _log.info("size %d of %s: %s, then %d", dim, source, seen[dim], size)
                self._new.add((source.expr(), rank, dim))
                seen[dim] = None  # differed once: symbolic from now on
            changed = seen[dim] is None
            wish = is_dynamic_source(source, dim) or self._decide(
                changed, marks.get(dim), parameter
            )
            dims.append(wish and size not in (0, 1))
        return tuple(dims)

    def free_strides(self, source: Source, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the dimensions whose strides are symbols of their own, and remember the strides.

        A stride that is the extent of the inner dimensions varies with sizes alone, and any other
        is a number that may vary. Other orders of the dimensions in memory are other cases.
        """
        if tensor.layout is not torch.strided:
            return ()
        packed = packed_dims(tensor)
        order = tuple(dim for dim, _ in packed)
        now = {dim: _PACKED if inside else tensor.stride(dim) for dim, inside in packed}
        if (source, order) not in self._strides:
            known = (self._has_varied(source, len(order), dim, _STRIDE) for dim in sorted(order))
            strides = [None if varied else now[dim] for dim, varied in enumerate(known)]
            self._strides[source, order] = strides
        seen = self._strides[source, order]
        fixed = isinstance(tensor, torch.nn.Parameter)
        free = []
        for dim, stride in sorted(now.items()):
            if seen[dim] not in (None, stride):
                text = "stride %d of %s has changed, to %d"
                _log.info(text, dim, source, tensor.stride(dim))
                self._new.add((source.expr(), len(order), dim, _STRIDE))
                seen[dim] = None
            changed = seen[dim] is None
            wish = (changed or stride != _PACKED) and self._decide(changed, None, fixed)
            if wish and tensor.stride(dim) not in (0, 1):
                free.append(dim)
        return tuple(free)

    def _decide(self, changed: bool, mark: Mark | None, fixed: bool) -> bool:
        if mark is not None:
            return mark.kind is not Kind.STATIC
        if self.dynamic is False or fixed:
            return False
        return bool(self.dynamic) or (changed and settings.automatic_dynamic_shapes)

    def marks(self, source: Source, value: torch.Tensor | int) -> dict[int, Mark]:
        """Return the marks of a tensor by dimension, or of an int as dimension 0."""
        if self.spec is not None:
            return self.spec.marks(source, value)
        if not isinstance(value, torch.Tensor):
            return {}
        unbacked = settings.unbacked_sources and range(value.dim())
        named = [dim for dim in unbacked or () if is_named(settings.unbacked_sources, source, dim)]
        return {dim: Mark(Kind.UNBACKED) for dim in named} | marks_of(value)

    def check(self, source: Source, tensor: torch.Tensor, sizes: Sequence[Any]) -> None:
        """Refuse a capture that made a constant of a dimension that is to be dynamic.

        Args:
            source: where the tensor came from.
            tensor: the real tensor, with its marks.
            sizes: its sizes after capture: ints where constant, SymInts where symbolic.

        Raises:
            Unsupported: for a constant of 2 or more; 0 and 1 are constants always.
        """
        for dim, mark in self.marks(source, tensor).items():
            size = sizes[dim] if type(sizes[dim]) is int else sizes[dim].node.maybe_as_int()
            if mark.kind is Kind.DYNAMIC and tensor.shape[dim] > 1 and size is not None:
                raise Unsupported(
                    "mark-dynamic",
                    f"dimension {dim} of {source} is marked with mark_dynamic, but the program "
                    f"needs it to be {size}",
                    "use maybe_mark_dynamic, or remove what depends on that size",
                )

    def observe(self, source: Source, value: object) -> None:
        """Remember the size or value of an argument of a call that is not compiled."""
        if isinstance(value, torch.Tensor):
            self.dims(source, value)
            self.free_strides(source, value)
        elif type(value) in (int, float):
            self._changed(source, value)

    def int_is_dynamic(self, source: Source, value: int, *, argument: bool = True) -> bool:
        """Decide whether an int becomes symbolic, and remember its value.

        Attributes, globals and the like are configuration until they change, whatever `dynamic`.
        """
        changed = self._changed(source, value)
        fixed = settings.specialize_int or not (argument or changed)
        wish = is_dynamic_source(source) or self._decide(
            changed, self.marks(source, value).get(0), fixed
        )
        return wish and value not in (0, 1)

    def data_is_dynamic(self, source: Source, value: object, *, varies: bool = False) -> bool:
        """Decide whether a float, a text and the like is known in each call only.

        It is once it has changed, and from the start where it `varies`.
        """
        if isinstance(value, float) and (varies or settings.specialize_float):
            return not settings.specialize_float
        changed = self._changed(source, value)
        return changed and self.dynamic is not False and settings.automatic_dynamic_shapes

    def _changed(self, source: Source, value: object) -> bool:
        """Say whether a number or a text was ever another one, and remember it."""
        if source not in self._numbers:
            self._numbers[source] = None if self._has_varied(source) else value
        seen = self._numbers[source]
        if seen is not None and seen != value:
            _log.info("%s %s: %s, then %s", type(value).__name__, source, seen, value)
            self._numbers[source] = None
            self._new.add((source.expr(),))
        return self._numbers[source] is None

    def _has_varied(self, source: Source, *dim: int | str) -> bool:
        """Say whether a number, or a size (of rank, dimension), varied in an earlier process.

        Of a stride, `_STRIDE` comes last.
        """
        if self._varied is None:
            self._varied = self.profile.load() if self.profile and self._is_automatic() else set()
        return bool(self._varied) and (source.expr(), *dim) in self._varied

    def _is_automatic(self) -> bool:
        wanted = settings.automatic_dynamic_shapes and settings.automatic_dynamic_local_pgo
        return wanted and self.dynamic is None

    def store_profile(self) -> None:
        """Tell the profile what has varied; called when code was compiled with it symbolic."""
        if self._new and self.profile and self._is_automatic():
            self.profile.add(self._new)
        self._new.clear()


def is_dynamic_source(source: Source, dim: int | None = None) -> bool:
    """Say whether `config.dynamic_sources` names a number, or a dimension of a tensor."""
    return is_named(settings.dynamic_sources, source, dim)


def is_named(names: str, source: Source, dim: int | None = None) -> bool:
    """Say whether a setting such as `config.dynamic_sources` names a number or a dimension."""
    listed = filter(None, map(str.strip, names.split(",")))
    for pattern, only in re.findall(r"^(.+?)(?::(\d+))?$", "\n".join(listed), re.MULTILINE):
        if dim is None or not only or int(only) == dim:
            name = source.expr()
            if name == pattern or re.match(pattern, name):
                return True
    return False
