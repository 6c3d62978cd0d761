"""Results of decompositions: they get the strides of the operator, and memory of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from weft_core.symnodes import equal_sizes

aten = torch.ops.aten


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, and those in lists of them."""
    given = (*args, *kwargs.values())
    flat = (one for arg in given for one in (arg if isinstance(arg, list | tuple) else (arg,)))
    return [one for one in flat if isinstance(one, torch.Tensor)]


def unusual_results(func: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    """What an operator makes of fake tensors of which not all are in row-major order; or None."""
    if func.is_view or func._schema.is_mutable or all(map(_is_row_major, tensors)):
        return None
    with contextlib.suppress(NotImplementedError):  # it has a decomposition alone
        return func(*args, **kwargs)


def restride_as(made: Any, wanted: Any) -> Any:
    """The result of a decomposition, with the strides of `wanted` where these are known."""
    if isinstance(made, tuple | list) and isinstance(wanted, tuple | list):
        return tuple(map(restride_as, made, wanted))
    if not isinstance(made, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return made
    same_sizes = equal_sizes(made.shape, wanted.shape)
    if not same_sizes or equal_sizes(made.stride(), wanted.stride()):
        return made
    whole = torch.empty_strided(wanted.shape, wanted.stride(), dtype=made.dtype, device=made.device)
    return aten.copy.default(whole, made)


def unshare(func: OpOverload, made: Any, tensors: list[torch.Tensor]) -> Any:
    """Copy results of a decomposition that are arguments, unless the operator's schema says so."""
    if func is aten._unsafe_view.default or any(one.alias_info for one in func._schema.returns):
        return made
    memory = {*map(_memory, tensors)} - {None}
    if isinstance(made, list | tuple):
        copies = [_unshared(one, memory) for one in made]
        return copies if isinstance(made, list) else tuple(copies)
    return _unshared(made, memory)


def _unshared(made: Any, memory: set[Any]) -> Any:
    return aten.clone.default(made) if _memory(made) in memory else made


def _memory(leaf: Any) -> Any:
    """Return an identifier of a tensor's memory; None for what has none."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return None
    return leaf.untyped_storage()._cdata


def _is_row_major(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    if all(type(number) is int for number in (*tensor.shape, *tensor.stride())):
        return tensor.is_contiguous()
    rows = torch._prims_common.make_contiguous_strides_for(tensor.shape)
    return equal_sizes(tensor.stride(), rows)
