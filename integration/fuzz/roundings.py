"""Eager execution whose every result is moved by one rounding.

What such runs make of a program tells how far its own roundings reach: Monte Carlo arithmetic
(Parker, 1997). Nudged inputs alone do not, where a program computes with exact numbers. Nobody
promises the order in which numbers are added, so sums take another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that hand numbers on as they are.
_EXACT = frozenset(
    """
    abs abs_ alias amax amin arange as_strided bernoulli cat ceil ceil_ clamp clamp_ clamp_max
    clamp_min clone complex constant_pad_nd copy copy_ copysign cummax cummin detach diag_embed
    diagonal_scatter embedding empty empty_like empty_strided eq eye fill fill_ flip floor floor_
    fmax fmin frac full full_like gather ge gt hardtanh heaviside histc imag index index_copy
    index_fill index_put index_put_ index_select isinf isnan kthvalue le lift_fresh lt masked_fill
    masked_fill_ masked_scatter masked_select max maximum median min minimum mode nan_to_num
    nanmedian ne neg neg_ new_empty new_empty_strided new_full new_ones new_zeros ones ones_like
    permute put put_ rand rand_like randn randn_like real reflection_pad1d reflection_pad2d relu
    relu_ repeat repeat_interleave replication_pad1d replication_pad2d resize_ roll rot90 round
    round_ scalar_tensor scatter scatter_ searchsorted select_scatter sgn sgn_ sign sign_
    slice_scatter sort split stack take threshold topk tril tril_ triu triu_ trunc trunc_
    unique_consecutive where zero_ zeros zeros_like
    """.split()  # noqa: SIM905 - easier to read
)


_aten = torch.ops.aten


def _euclidean_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    squares = [t.pow(2).sum(-1, keepdim=True) for t in (x, y)]
    return (squares[0] + squares[1].mT - 2 * (x @ y.mT)).clamp_min(0).sqrt()


def _variance_and_mean(
    x: torch.Tensor, dims: Any = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = dims or [*range(x.dim())]
    mean = x.mean(dims, keepdim=True)
    count = x.numel() // max(mean.numel(), 1)
    freedom = count - (1 if correction is None else correction)
    squares = (x - mean).square().mean(dims, keepdim=keepdim)
    scale = count / freedom if freedom > 0 else torch.inf
    return squares * scale, mean if keepdim else mean.squeeze(dims)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A product of matrices whose terms are added in another order."""
    kind = torch.promote_types(x.dtype, torch.float32)  # in which 16-bit numbers are added
    return (x.to(kind).unsqueeze(-1) * y.to(kind).unsqueeze(-3)).sum(-2).to(x.dtype)


def _added_product(
    z: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return z * beta + _product(x, y) * alpha if beta else _product(x, y) * alpha


# Whose terms inside overflow or cancel.
_TAKEN_APART = get_decompositions(
    [
        _aten.gelu, _aten.gelu_backward, _aten.linalg_cross, _aten.addcmul, _aten.logaddexp,
        _aten.logaddexp2, _aten.native_batch_norm, _aten._native_batch_norm_legit,
        _aten.native_layer_norm, _aten.native_group_norm, _aten.lerp, _aten.addr, _aten.addcdiv,
    ]
)  # fmt: skip
_TAKEN_APART |= dict.fromkeys((_aten.mm.default, _aten.bmm.default), _product)
_TAKEN_APART |= dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), _added_product)
_TAKEN_APART[_aten._euclidean_dist.default] = _euclidean_distance
_TAKEN_APART[_aten.var_mean.correction] = _variance_and_mean
_SCALED = (_aten.add.Tensor, _aten.sub.Tensor)
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim)


def _without_write(func: Any) -> Any:
    """What an operator that writes in place computes, if that is taken apart."""
    name = func.overloadpacket.__name__
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    pure = getattr(packet, func._overloadname, None)
    return pure if pure in _TAKEN_APART or pure in _SCALED else None


def _is_float(args: Any) -> bool:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


class Roundings(TorchDispatchMode):
    """Within it, inexact results of floats are one rounding larger or smaller, by `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._efficientzerotensor.default:  # which crashes torch in a mode
            return torch.zeros(*args, **kwargs)
        if (pure := _without_write(func)) is not None:
            return args[0].copy_(self.__torch_dispatch__(pure, types, args, kwargs))
        if func in _TAKEN_APART and _is_float(args):
            with self:
                return _TAKEN_APART[func](*args, **kwargs)
        if func in _SCALED and kwargs.get("alpha", 1) != 1:
            with self:
                return func(args[0], args[1] * kwargs["alpha"])
        if func in _SUMS and args[0].is_floating_point():
            args = self._reordered(*args)
        results = func(*args, **kwargs)
        if func.overloadpacket.__name__ not in _EXACT and not func.is_view:
            for result in results if isinstance(results, tuple | list) else (results,):
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    self._move(result)
        return results

    def _reordered(self, x: torch.Tensor, dims: Any = None, *rest: Any) -> tuple[Any, ...]:
        """The arguments of a sum, with the terms in another order."""
        reduced = [dim % max(x.dim(), 1) for dim in dims or range(x.dim())]
        for dim in reduced if x.dim() else ():
            order = torch.randperm(x.shape[dim], generator=self._random, device="cpu")
            x = x.index_select(dim, order.to(x.device))
        return (x, *(() if dims is None else (dims,)), *rest)

    def _move(self, tensor: torch.Tensor) -> None:
        overlaps = torch._debug_has_internal_overlap(tensor) == 1
        if tensor.layout is not torch.strided or overlaps or torch._is_zerotensor(tensor):
            return
        sides = torch.randint(0, 2, tensor.shape, generator=self._random, device="cpu").double()
        scale = 1 + (2 * sides - 1) * torch.finfo(tensor.dtype).eps
        moved = (tensor.double() * scale.to(tensor.device)).to(tensor.dtype)
        # The largest numbers stay finite.
        tensor.copy_(torch.where(moved.isfinite(), moved, tensor))
