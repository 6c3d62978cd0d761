"""Tensors of wrapper classes: those with a `__torch_dispatch__` that can be taken apart.

Such a class has `__tensor_flatten__` (names of the attributes that hold its tensors, and a context)
and `__tensor_unflatten__`, which puts a tensor together again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft_core import jagged

_FOREIGN = "torch.distributed."
"""Classes that wait in their dispatch; not DTensor."""
_MARKS = ("_dynamo_", "_weft_")  # attributes that compilers set


def is_wrapper_subclass(kind: type) -> bool:
    """Say whether tensors of a class have tensors inside that they can be made of again."""
    if kind is torch.Tensor or not issubclass(kind, torch.Tensor):
        return False
    own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ways = own and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return ways and (is_distributed(kind) or not kind.__module__.startswith(_FOREIGN))


def is_distributed(kind: type) -> bool:
    """Say whether a class is DTensor."""
    return kind.__name__ == "DTensor" and kind.__module__ == "torch.distributed.tensor"


@dataclass(frozen=True)
class _DTensorPlacement:
    """How a DTensor lies on its mesh, and settings of DTensors' dispatch."""

    spec: Any
    settings: Any

    __deepcopy__ = lambda self, memo: self  # noqa: E731 - it shares the mesh

    def build(self, kind: Any, local: Any, size: Any, stride: Any) -> Any:
        spec = copy.copy(self.spec)
        meta = sys.modules[type(spec).__module__].TensorMeta
        spec.tensor_meta = meta(torch.Size(size), tuple(stride), local.dtype)
        return kind(local, spec, requires_grad=False)


def _flatten(tensor: Any) -> tuple[list[str], Any]:
    """Return the names of the tensors inside of one, and what else it is made of."""
    if is_distributed(type(tensor)):
        dispatch = tensor._op_dispatcher
        settings = dispatch._allow_implicit_replication, len(dispatch._custom_op_handlers)
        spec = copy.copy(tensor._spec)
        spec.tensor_meta = None
        return ["_local_tensor"], _DTensorPlacement(spec, settings)
    return tensor.__tensor_flatten__()  # type: ignore[no-any-return]


def leaves(value: Any) -> list[Any]:
    """Return the plain tensors inside of one of a wrapper class, and anything else as it is."""
    if not is_wrapper_subclass(type(value)):
        return [value]
    names, _ = _flatten(value)
    return [leaf for name in names for leaf in leaves(getattr(value, name))]


@dataclass(frozen=True, eq=False)
class SubclassLayout:
    """How a tensor is put together from what is inside of it.

    Attributes:
        cls: its class.
        parts: for each attribute that holds a tensor, the layout of that; None for a plain one.
        context: what else `__tensor_unflatten__` wants to know.
        rest: the other attributes of the tensor.
        size, stride: its own, which may be symbolic; none for a jagged one, whose parts tell.
    """

    cls: type
    parts: dict[str, SubclassLayout | None]
    context: Any
    rest: dict[str, Any]
    size: Sequence[Any]
    stride: Sequence[Any]

    @staticmethod
    def of(tensor: Any) -> SubclassLayout | None:
        """Take a tensor apart; None for one that is not of a wrapper class."""
        if not is_wrapper_subclass(type(tensor)):
            return None
        names, context, rest = _describe(tensor)
        parts = {name: SubclassLayout.of(getattr(tensor, name)) for name in names}
        if jagged.is_jagged(type(tensor)):
            return SubclassLayout(type(tensor), parts, context, rest, (), ())
        with torch._C.DisableTorchFunctionSubclass():
            return SubclassLayout(
                type(tensor), parts, context, rest, tensor.size(), tensor.stride()
            )

    def leaves(self, tensor: Any) -> list[Any]:
        """Return the plain tensors inside of a tensor that is put together so."""
        found = []
        for name, part in self.parts.items():
            inner = getattr(tensor, name)
            found += [inner] if part is None else part.leaves(inner)
        return found

    def build(self, given: Iterator[Any]) -> Any:
        """Put a tensor together from plain ones, in the order of `leaves`."""
        inner = {n: next(given) if p is None else p.build(given) for n, p in self.parts.items()}
        return self.join(inner, torch.Size(self.size), tuple(self.stride))

    def join(self, inner: dict[str, Any], size: Any, stride: Any) -> Any:
        """Put a tensor of some size together from its parts."""
        if jagged.is_jagged(self.cls):
            return jagged.build(inner, self.context)
        if isinstance(self.context, _DTensorPlacement):
            return self.context.build(self.cls, inner["_local_tensor"], size, stride)
        make: Any = self.cls.__tensor_unflatten__  # type: ignore[attr-defined]
        return make(inner, copy.deepcopy(self.context), size, stride)  # each has its own context

    def moving(self) -> list[bool]:
        """For each of the `leaves`, whether it is data, not what tells the shape."""
        if jagged.is_jagged(self.cls):
            return [name == "_values" for name in self.parts]
        return [one for part in self.parts.values() for one in (part.moving() if part else [True])]

    def numbers(self) -> list[Any]:
        """Return all sizes and strides, its own and those of its parts."""
        inner = [n for part in self.parts.values() if part is not None for n in part.numbers()]
        return [*self.size, *self.stride, *inner]

    def at(self, numbers: Iterator[Any]) -> SubclassLayout:
        """Return the same with other `numbers`."""
        size, stride = ([next(numbers) for _ in old] for old in (self.size, self.stride))
        parts = {name: part and part.at(numbers) for name, part in self.parts.items()}
        return replace(self, parts=parts, size=size, stride=stride)

    def matches(self, other: SubclassLayout | None) -> bool:
        """Say whether another tensor is put together likewise, sizes aside."""
        if other is None or self.cls is not other.cls:
            return False
        mine, others = (one.parts.keys() - jagged.CACHED.keys() for one in (self, other))
        pairs = [(self.parts[name], other.parts[name]) for name in mine & others]
        same = mine == others and all(b is None if a is None else a.matches(b) for a, b in pairs)
        return same and _same([self.context, self.rest], [other.context, other.rest])

    def for_gradients(self) -> SubclassLayout:
        """Return how gradients are put together: those of a partial DTensor are whole."""
        if not isinstance(self.context, _DTensorPlacement):
            return self
        spec = copy.copy(self.context.spec)
        whole = sys.modules["torch.distributed.tensor"].Replicate()
        spec.placements = tuple(whole if p.is_partial() else p for p in spec.placements)
        return replace(self, context=replace(self.context, spec=spec))

    def fitted(self, gradient: Any) -> Any:
        """Return a gradient that is a DTensor spread as these are, any other as it is."""
        if is_distributed(type(gradient)) and isinstance(self.context, _DTensorPlacement):
            return gradient.redistribute(self.context.spec.mesh, self.context.spec.placements)
        return gradient

    def fits(self, tensor: Any) -> bool:
        """Say whether a tensor of the class has parts of these names, this context and rest."""
        names, context, rest = _describe(tensor)
        same = list(names) == list(self.parts) and _same(rest, self.rest)
        return same and _same(context, self.context)


def _describe(tensor: Any) -> tuple[list[str], Any, dict[str, Any]]:
    """The names of a tensor's parts, its context and its other attributes."""
    if jagged.is_jagged(type(tensor)):
        return jagged.describe(tensor)
    names, context = _flatten(tensor)
    others = {name: value for name, value in vars(tensor).items() if name not in names}
    return names, context, {n: v for n, v in others.items() if not n.startswith(_MARKS)}


def _same(one: Any, other: Any) -> bool:
    """Say whether two contexts are equal, with equal types and signs of zeros in them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    return bool(one is other if isinstance(one, torch.Tensor) else one == other)
