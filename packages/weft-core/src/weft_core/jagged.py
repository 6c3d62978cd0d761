"""Jagged tensors (`torch.nested`, layout `torch.jagged`): the file that knows their class.

One has its values packed, and offsets that say where each row begins. Its ragged size is a *nested
int*: not a number but the identity of the offsets (or lengths), equal only to itself. torch makes a
symbol of it, with Dynamo's help; here it stays the constant that it is in eager execution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nested._internal import nested_tensor
from torch.nested._internal.nested_int import NestedIntNode
from torch.nested._internal.nested_tensor import NestedTensor

_ids = itertools.count(1 << 40)  # torch counts its own from 0
_library = torch.library.Library("weft_core", "FRAGMENT")
_library.define("jagged_products(Tensor one, Tensor other, Tensor offsets) -> Tensor")
_PRODUCTS = (torch.ops.aten.matmul.default, torch.ops.aten.bmm.default)
CACHED = {"_min_seqlen_tensor": "min_seqlen", "_max_seqlen_tensor": "max_seqlen"}
"""Parts with what can be found out from the others."""
_OWN = ("_size", "_strides", "_ragged_idx", "_lengths", "_metadata_cache")
_MARKS = ("_sym_", "_dynamo_", "_has_dynamo_", "_specialize_on")  # of torch's own


class _Node(NestedIntNode):
    """A nested int whose multiples, which are strides, may be by symbolic numbers."""

    def mul(self, other: Any) -> _Node:
        by: Any = other.constant_int() if other.is_constant() else torch.SymInt(other)
        return _Node(self.t_id, self.coeff * by)


def new_ragged_size() -> torch.SymInt:
    """A nested int that equals no other."""
    return torch.SymInt(_Node(next(_ids), 1))


def set_ragged_size(tensor: torch.Tensor) -> None:
    """Let a tensor of integers that is not torch's fake be offsets."""
    if tensor.dim() == 1 and not tensor.is_floating_point():
        nested_tensor._tensor_symint_registry[tensor] = new_ragged_size()


def is_jagged(kind: type) -> bool:
    """Say whether this is torch's class of jagged tensors."""
    return kind is NestedTensor


def is_ragged_size(number: Any) -> bool:
    """Say whether a size is a nested int."""
    return isinstance(number, torch.SymInt) and number.node.is_nested_int()


def _products(one: Any, other: Any, offsets: torch.Tensor) -> torch.Tensor:
    sizes = offsets.diff().tolist()
    rows = zip(one.split(sizes, 1), other.split(sizes), strict=True)
    return torch.stack([row @ other_row for row, other_row in rows])


def _fake_products(one: Any, other: Any, offsets: Any) -> torch.Tensor:
    return one.new_empty(offsets.shape[0] - 1, one.shape[0], other.shape[1])  # type: ignore[no-any-return]


for _key, _kernel in (("CPU", _products), ("CUDA", _products), ("Meta", _fake_products)):
    _library.impl("jagged_products", _kernel, _key)


def product(func: Any, args: Sequence[Any]) -> Any:
    """Return a product over ragged sizes, which eager execution computes row by row, by numbers.

    That is (batch, n, ragged) by (batch, ragged, m), as in the backward of a product with a
    weight; of anything else None.
    """
    if func not in _PRODUCTS or not all(map(is_jagged, map(type, args))):
        return None
    one, other = args
    places = one._ragged_idx, other._ragged_idx, len(one._size), len(other._size)
    whole = one._lengths is other._lengths is None
    if places != (2, 1, 3, 3) or not whole or one._size[2] != other._size[1]:
        return None
    return partial(torch.ops.weft_core.jagged_products, one._values, other._values, one._offsets)


def are_consistent(values: Iterable[Any]) -> bool:
    """Say whether equal ragged sizes are of the same offsets: a copy may hand its size on."""
    found: dict[int, Any] = {}
    for tensor in filter(lambda value: isinstance(value, NestedTensor), values):
        source = tensor._offsets if tensor._lengths is None else tensor._lengths
        if found.setdefault(tensor._size[tensor._ragged_idx].node.t_id, source) is not source:
            return False
    return True


def has_fatal_backward(results: Iterable[torch.Tensor]) -> bool:
    """Say whether results come out of a split, whose backward in C++ reads past a jagged tensor."""
    pending, seen = [result.grad_fn for result in results], set[Any]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [before for before, _ in node.next_functions]
    return any(node.name().startswith("SplitWithSizesBackwardAutogradNested") for node in seen)


def describe(tensor: Any) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """The names of the parts, what `build` wants to know beside them, what a program added."""
    parts, _ = tensor.__tensor_flatten__()
    names = vars(tensor).keys() - {*_OWN, *parts}
    added = {name: vars(tensor)[name] for name in names if not name.startswith(_MARKS)}
    return parts, {"_ragged_idx": tensor._ragged_idx}, added


def build(inner: dict[str, Any], context: dict[str, Any]) -> Any:
    """Put a tensor together."""
    cache = {CACHED[name]: one for name, one in inner.items() if name in CACHED}
    values, offsets, lengths = map(inner.get, ("_values", "_offsets", "_lengths"))
    return NestedTensor(values, offsets, lengths=lengths, _metadata_cache=cache, **context)
