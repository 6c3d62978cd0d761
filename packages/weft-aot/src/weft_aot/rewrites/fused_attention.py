"""Attention that a program spells out, as one call of `scaled_dot_product_attention`.

The fused operator gives zeros where all keys of a query are masked. A program gives NaN there (a
mask of -inf) or the mean of the values (a finite one), and so does the call here: `_restore`
replaces those rows, such that gradients are the program's as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

_LOW = -1e30
"""Scores are lost when added to it, and its exponential is 0."""


@dataclass(frozen=True)
class Mask:
    """One change of the scores between their product and the softmax.

    Args:
        kind: "add" to the scores, or "block" where the mask is true, or "keep" where it is.
        factor: of what is added.
        flat: the scores have one batch dimension where this is done to them.
        rows: whether each query is known to have a key.
        finite: whether no number that is added is known to be infinite.
    """

    kind: str
    factor: float = 1.0
    flat: bool = False
    rows: bool = False
    finite: bool = False


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """Attention as a function of (query, key, value, *masks).

    Args:
        orders: permutations that give query, key and value the shape (..., length, width).
        out_order: permutation of the result.
        lead: batch dimensions in which masks are; None for those of the operands.
        dtype: of the result.
        scale: of the scores.
        masks: what is done to the scores.
        fill: the value of blocked scores, -inf or a number so low that its exponential is 0.
        causal: the only mask lets each query see the keys up to its own position.
        dropout: probability.
    """

    orders: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    out_order: tuple[int, ...]
    lead: tuple[int, ...] | None
    dtype: torch.dtype
    scale: float
    masks: tuple[Mask, ...]
    fill: float
    causal: bool
    dropout: float

    __name__ = "fused_attention"

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the attention, laid out as the product that it replaces."""
        operands = [t.permute(order) for t, order in zip(tensors[:3], self.orders, strict=True)]
        before = torch.broadcast_shapes(*(t.shape[:-2] for t in operands))
        lead = self.lead or before
        lead = (*lead, *(1,) * (2 - len(lead)))
        query, key, value = (
            t.to(self.dtype).expand(*before, *t.shape[-2:]).reshape(*lead, *t.shape[-2:])
            for t in operands
        )
        size = (query.shape[-2], key.shape[-2])
        bias, blocked = self._masks(tensors[3:], lead, size)
        empty = self._empty_rows(bias, blocked)
        with _autocast_off(query.device.type):
            out = F.scaled_dot_product_attention(
                query, key, value, _one_mask(bias, blocked, empty, self.dtype), self.dropout,
                self.causal, scale=self.scale,
            )  # fmt: skip
            if empty is not None:
                out = self._restore(out, value, empty)
        return out.reshape(*before, *out.shape[-2:]).contiguous().permute(self.out_order)

    def _masks(
        self, tensors: Sequence[torch.Tensor], lead: Sequence[Any], size: tuple[Any, Any]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What is added to the scores, and where they are blocked."""
        bias = blocked = None
        for mask, given in zip(self.masks, tensors, strict=True):
            tensor = _with_lead(given, lead, size, mask.flat)
            if mask.kind == "add":
                tensor = tensor if mask.factor == 1 else tensor * mask.factor
                bias = tensor if bias is None else bias + tensor
            else:
                tensor = tensor if mask.kind == "block" else ~tensor
                blocked = tensor if blocked is None else blocked | tensor
        return bias, blocked

    def _empty_rows(
        self, bias: torch.Tensor | None, blocked: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Which queries have no key, (..., length, 1); None where all are known to have one."""
        if len(self.masks) < 2 and all(mask.rows for mask in self.masks):
            return None
        if bias is None or all(mask.finite for mask in self.masks if mask.kind == "add"):
            return None if blocked is None else blocked.all(-1, keepdim=True)
        missing = bias.detach() == -torch.inf
        return (missing if blocked is None else missing | blocked).all(-1, keepdim=True)

    def _restore(self, out: torch.Tensor, value: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
        """Give rows without a key what the program gives them, and the gradient of the values.

        Their scores are replaced, so they pass no gradient on.
        """
        if self.fill != -torch.inf:
            return torch.where(empty, value.mean(-2, keepdim=True), out)
        spoilt = torch.where(empty.any(-2, keepdim=True), torch.nan, 1.0).to(out.dtype)
        return torch.where(empty, value.sum(-2, keepdim=True) * spoilt, out)


def _with_lead(
    mask: torch.Tensor, lead: Sequence[Any], size: tuple[Any, Any], flat: bool
) -> torch.Tensor:
    """`mask` with the batch dimensions `lead`, or ones, and with all keys."""
    if flat and mask.dim() == 3 and mask.shape[0] != 1:
        mask = mask.reshape(*lead, *mask.shape[-2:])
    while mask.dim() < len(lead) + 2:
        mask = mask.unsqueeze(0)
    return mask if mask.shape[-1] == size[1] else mask.expand(*mask.shape[:-1], size[1])


def _one_mask(
    bias: torch.Tensor | None,
    blocked: torch.Tensor | None,
    empty: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """The mask of the fused operator, in which no row is without a key."""
    if bias is None:
        if blocked is None:
            return None
        return ~blocked if empty is None else ~blocked | empty
    if bias.device.type != "cpu":  # kernels there multiply by log2(e), which the lowest overflow
        bias = torch.where((bias < _LOW) & (bias > -torch.inf), _LOW, bias).to(dtype)
    if blocked is not None:
        bias = torch.where(blocked, -torch.inf, bias)
    return bias if empty is None else torch.where(empty, 0, bias)


def _autocast_off(device: str) -> contextlib.AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
