"""Jagged tensors: their rows, which are views of the values between two offsets, and attention.

The offsets become symbolic sizes of the graph, also without `capture_scalar_outputs`. For attention
torch converts jagged tensors to strided nested ones, whose sizes it reads from the offsets; the
operator here runs the kernel for dense tensors row by row, so that no graph depends on a size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nested._internal import nested_tensor, sdpa
from weft_core.inlinable import inlinable
from weft_core.jagged import is_jagged

from weft_capture.functions.language.polyfilled import polyfill
from weft_capture.functions.table import rule
from weft_capture.functions.torch.tensors import getitem
from weft_capture.model.constant import Constant, constant
from weft_capture.model.containers import TupleValue
from weft_capture.model.protocol import Tracer, Value, method
from weft_capture.tensors.subclass import WrapperValue
from weft_capture.tensors.tensor import SymValue


def _read(method: str, tensor: Any, *args: Any) -> Any:
    """Call a method while capture may read numbers and sizes from tensors."""


@rule(_read)
def _reading(tx: Tracer, method: Value, tensor: Value, *args: Value) -> Value:
    before, tx.graph.reading = tx.graph.reading, True
    try:
        return tensor.call_method(tx, method.as_constant(), list(args), {})
    finally:
        tx.graph.reading = before


@inlinable
def _rows(tensor: Any) -> Any:
    """Return all rows."""
    sizes = _read("tolist", tensor.offsets().diff().cpu())
    return _read("split", tensor.values(), sizes, tensor._ragged_idx - 1)


@inlinable
def _row(tensor: Any, at: int) -> Any:
    """Return one row, by splitting the values before and after it."""
    values, offsets, dim = tensor.values(), tensor.offsets(), tensor._ragged_idx - 1
    ends = offsets[at : at + 2]
    start, size = _read("tolist", torch.cat([ends[:1], ends.diff()]).cpu())
    return _read("split", values, [start, size, values.size(dim) - start - size], dim)[1]


@inlinable
def _select_masked(tensor: Any, mask: Any) -> Any:
    """Return the chosen elements of each row, as `torch.nested.masked_select` does."""
    if tensor.layout != torch.strided or mask.layout != torch.strided:
        raise RuntimeError("masked_select requires a strided tensor and a strided mask")
    chosen = _read("masked_select", tensor, mask)
    offsets = mask.expand(tensor.shape).sum(-1).view(-1).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(chosen, torch.nn.functional.pad(offsets, (1, 0)))


polyfill(torch.nested.masked_select, _select_masked)


def _is_whole(tx: Tracer, tensor: Value) -> bool:
    """Say whether the rows of a tensor are contiguous."""
    jagged = isinstance(tensor, WrapperValue) and is_jagged(tensor.cls)
    return jagged and tensor.fake._lengths is None and not tx.transforms  # type: ignore[attr-defined]


@method(WrapperValue, "unbind")
def _unbind(tx: Tracer, self: WrapperValue, dim: Value | None = None) -> Value:
    if _is_whole(tx, self) and (dim is None or dim.as_constant() == 0):
        return tx.const_object(_rows).tp_call(tx, [self], {})
    return tx.graph.emit("call_method", "unbind", [self, dim or constant(0)], {})


@rule(torch.unbind)
def _unbind_any(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    if args and _is_whole(tx, args[0]):
        return args[0].call_method(tx, "unbind", list(args[1:]), kwargs)
    return tx.graph.emit("call_function", torch.unbind, list(args), kwargs)


@method(WrapperValue, "__getitem__")
def _getitem(tx: Tracer, self: WrapperValue, key: Value) -> Value:
    first, *rest = key.items if type(key) is TupleValue and key.items else [key]
    fixed = isinstance(first, Constant) or (isinstance(first, SymValue) and not first.is_data())
    at: Any = first.as_constant() if fixed else None  # this fixes a size, like the number of rows
    count = int(self.fake.shape[0]) if type(at) is int and _is_whole(tx, self) else 0
    if not count or not -count <= at < count:
        return getitem(tx, self, key)
    row = tx.const_object(_row).tp_call(tx, [self, constant(at % count)], {})
    return row.call_method(tx, "__getitem__", [tx.tuple_of(rest)], {}) if rest else row


# ---- attention on a CPU, as one operator with a backward


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


def _split_rows(offsets: torch.Tensor, *tensors: torch.Tensor) -> Iterator[list[Any]]:
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
    both = zip(_split_rows(rows, q, *outputs), _split_rows(key_rows, k, v), strict=True)
    for (query, *into), (key, value) in both:
        if query.shape[2] and key.shape[2]:
            _copy(into, _FLASH(query, key, value, scale=scale))
    return tuple(outputs)


def _backward(
    q: Any, k: Any, v: Any, rows: Any, key_rows: Any, scale: Any, out: Any, lse: Any, grad: Any
) -> Any:
    grads = [t.zero_() for t in _fake_backward(q, k, v)]
    queries = _split_rows(rows, grads[0], grad, q, out, lse)
    for (a, g, query, *kept), (b, c, *keys) in zip(
        queries, _split_rows(key_rows, *grads[1:], k, v), strict=True
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
