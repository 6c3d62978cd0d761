"""Attention without gradients, which a function of weft's own computes (weft_attention.h).

    _scaled_dot_product_flash_attention_for_cpu(q, k, v)    weft_codegen.attention(q, k, v)

The tensors are [batch, head, row, width], and a mask broadcasts to [batch, head, query, key]. Where
the function is the faster one is decided by who calls (tune.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weft_codegen.loops.index import ONE, ZERO, IndexExpr
from weft_codegen.loops.program import Buffer, Buffers, Extern, on_cpu

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_library = torch.library.Library("weft_codegen", "FRAGMENT")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale) -> Tensor"
)


def _attention(*args: Any) -> Any:
    *tensors, mask, causal, scale = args
    return FLASH(*tensors, 0.0, causal, attn_mask=mask, scale=scale)[0]


_library.impl("attention", _attention, "CompositeExplicitAutograd")

ATTENTION = torch.ops.weft_codegen.attention.default
MOST_WIDTH = 256

AttentionWins = Callable[[int | None], bool]
"""Whether weft's function is faster, by the number of queries (None: only known while running)."""


def own_attention(step: Extern, buffers: Buffers, wins: AttentionWins) -> Extern | None:
    """A call of weft's function, where it can compute an attention and wins."""
    if step.op is not FLASH or step.results[0] is None or step.results[1:] != (None,):
        return None
    names = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
    given = dict.fromkeys(names) | dict(zip(names, step.args, strict=False)) | dict(step.kwargs)
    *operands, dropout, causal, mask, scale = given.values()
    if dropout or not (scale is None or isinstance(scale, float)):
        return None
    used = [buffers[ref.name] for ref in (*operands, *([] if mask is None else [mask]))]
    q, k, v, *masks = used
    width, queries = q.shape[-1], q.shape[2]
    usual = on_cpu(used, torch.float32) and all(b.strides[-1] is ONE for b in used)
    alike = q.shape[:2] == k.shape[:2] and k.shape == v.shape and k.shape[-1] == width
    alike &= all(added_strides(one, q, k) is not None for one in masks)
    fits = (
        width.is_const
        and 0 < width.value <= MOST_WIDTH
        and buffers[step.results[0]].strides[-1] is ONE
    )
    if not (usual and alike and fits and wins(queries.value if queries.is_const else None)):
        return None
    args = (*operands, mask, bool(causal), scale)
    return replace(step, op=ATTENTION, args=args, kwargs=(), results=step.results[:1])


def added_strides(mask: Buffer, q: Buffer, k: Buffer) -> tuple[IndexExpr, ...] | None:
    """The elements from a batch, head and query of a mask to the next; None: it is laid out in a
    way that the function does not take."""
    wanted = (*q.shape[:3], k.shape[2])
    lacking = len(wanted) - len(mask.shape)
    if lacking < 0 or not mask.shape or mask.shape[-1] != wanted[-1]:
        return None
    if any(n not in (ONE, most) for n, most in zip(mask.shape, wanted[lacking:], strict=True)):
        return None
    pairs = zip(mask.shape[:-1], mask.strides[:-1], strict=True)
    return (*[ZERO] * lacking, *(ZERO if n is ONE else stride for n, stride in pairs))
