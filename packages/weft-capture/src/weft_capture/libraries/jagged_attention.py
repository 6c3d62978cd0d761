"""Attention of jagged tensors on a CPU, as one operator with a backward.

torch converts them to strided nested tensors, whose sizes it reads from the offsets. The operator
runs torch's kernel for dense tensors row by row, so that no graph depends on the size of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nested._internal import nested_tensor, sdpa
from weft_core.jagged import is_jagged

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_library = torch.library.Library("weft_capture", "FRAGMENT")
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor rows, Tensor key_rows, float? scale"
_library.define(f"jagged_attention({_GIVEN}) -> (Tensor, Tensor)")
_library.define(
    f"jagged_attention_backward({_GIVEN}, Tensor out, Tensor lse, Tensor grad)"
    " -> (Tensor, Tensor, Tensor)"
)


def _rows(offsets: torch.Tensor, *tensors: torch.Tensor) -> Iterator[list[Any]]:
    """Split tensors (length, heads, ...) into rows (1, heads, length, ...)."""
    sizes = offsets.diff().tolist()
    for row in zip(*(tensor.split(sizes) for tensor in tensors), strict=True):
        yield [head.transpose(0, 1)[None] for head in row]


def _fake(q: Any, k: Any, v: Any, rows: Any, key_rows: Any, scale: float | None) -> Any:
    precise = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=precise)


def _fake_backward(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _forward(q: Any, k: Any, v: Any, rows: Any, key_rows: Any, scale: float | None) -> Any:
    outputs = [t.zero_() for t in _fake(q, k, v, rows, key_rows, scale)]
    both = zip(_rows(rows, q, *outputs), _rows(key_rows, k, v), strict=True)
    for (query, *into), (key, value) in both:
        if query.shape[2] and key.shape[2]:
            _copy(into, _FLASH(query, key, value, scale=scale))
    return tuple(outputs)


def _backward(
    q: Any, k: Any, v: Any, rows: Any, key_rows: Any, scale: Any, out: Any, lse: Any, grad: Any
) -> Any:
    grads = [t.zero_() for t in _fake_backward(q, k, v)]
    queries = _rows(rows, grads[0], grad, q, out, lse)
    for (a, g, query, *kept), (b, c, *keys) in zip(
        queries, _rows(key_rows, *grads[1:], k, v), strict=True
    ):
        if query.shape[2] and keys[0].shape[2]:
            _copy((a, b, c), _BACKWARD(g, query, *keys, *kept, 0.0, False, scale=scale))
    return tuple(grads)


def _copy(into: Any, results: Any) -> None:
    for target, result in zip(into, results, strict=True):
        target.copy_(result)


_library.impl("jagged_attention", _forward, "CPU")
_library.impl("jagged_attention", _fake, "Meta")
_library.impl("jagged_attention_backward", _backward, "CPU")
_library.impl("jagged_attention_backward", _fake_backward, "Meta")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        out, lse = torch.ops.weft_capture.jagged_attention(*args)
        ctx.save_for_backward(*args[:-1], out, lse)
        ctx.scale = args[-1]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        *saved, out, lse = ctx.saved_tensors
        backward = torch.ops.weft_capture.jagged_attention_backward
        return *backward(*saved, ctx.scale, out, lse, grad), None, None, None


def supports(*tensors: Any) -> bool:
    """Say whether the operator supports attention of a query, a key and a value."""
    if not all(is_jagged(type(t)) and t.device.type == "cpu" for t in tensors):
        return False
    query, key, value = tensors
    return (
        torch.backends.cuda.math_sdp_enabled()
        and all(t.dim() == 4 and t._ragged_idx == 2 and t._lengths is None for t in tensors)
        and all(t._values.transpose(0, 1).is_contiguous() for t in tensors)
        and query.dtype in _DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.shape[0] == key.shape[0]
        and query.shape[1] == key.shape[1]
        and query.shape[3] == key.shape[3]
        and key.shape == value.shape
    )


def attend(query: Any, key: Any, value: Any, scale: float | None) -> Any:
    """Evaluate `scaled_dot_product_attention` of tensors (batch, heads, ragged, width)."""
    query, key, value, _ = sdpa._autocast(query, key, value, None)
    transposed = [t.transpose(1, 2) for t in (query, key, value)]
    values = [t.values() for t in transposed]
    out = _Attention.apply(*values, query.offsets(), key.offsets(), scale)  # type: ignore[no-untyped-call]
    nested = nested_tensor.nested_view_from_values_offsets_lengths(
        out,
        query.offsets(),
        None,
        min_seqlen=query._maybe_min_seqlen,
        max_seqlen=query._maybe_max_seqlen,
    )
    return nested.transpose(1, 2)
