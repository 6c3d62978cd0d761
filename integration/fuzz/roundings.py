"""Eager execution whose every result is moved by one rounding.

What such runs make of a program tells how far its own roundings reach: Monte Carlo arithmetic
(Parker, 1997). Nudged inputs alone do not, where a program computes with exact numbers.
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


# Whose sums inside cancel.
_TAKEN_APART = get_decompositions([torch.ops.aten.gelu, torch.ops.aten.gelu_backward])


class Roundings(TorchDispatchMode):
    """Within it, inexact results of floats are one rounding larger or smaller, by `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _TAKEN_APART:
            with self:
                return _TAKEN_APART[func](*args, **kwargs or {})
        results = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ not in _EXACT and not func.is_view:
            for result in results if isinstance(results, tuple | list) else (results,):
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    self._move(result)
        return results

    def _move(self, tensor: torch.Tensor) -> None:
        overlaps = torch._debug_has_internal_overlap(tensor) == 1
        if tensor.layout is not torch.strided or overlaps or torch._is_zerotensor(tensor):
            return
        sides = torch.randint(0, 2, tensor.shape, generator=self._random, device="cpu").double()
        scale = 1 + (2 * sides - 1) * torch.finfo(tensor.dtype).eps
        moved = (tensor.double() * scale.to(tensor.device)).to(tensor.dtype)
        # The largest numbers stay finite.
        tensor.copy_(torch.where(moved.isfinite(), moved, tensor))
