"""Strides of results where torch's fake tensors differ from the real kernel."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def strides_of(func: Any, args: Any, result: Any) -> tuple[int, ...] | None:
    """Return the strides of the first result of a real kernel; None where the fake's are right."""
    if func not in _STRIDES:
        return _pointwise_strides(func, args, result)
    return _STRIDES[func](func, args, result[0] if isinstance(result, tuple) else result)


def _pointwise_strides(func: Any, args: Any, result: Any) -> tuple[int, ...] | None:
    """Strides of a pointwise result, as a real kernel chooses them; None for others.

    torch's references widen or broadcast operands first, and what they make of these decides the
    layout.
    """
    if func not in _POINTWISE:
        schema = func._schema
        takes_format = any(argument.name == "memory_format" for argument in schema.arguments)
        known = torch.Tag.pointwise in func.tags and not schema.is_mutable and not takes_format
        _POINTWISE[func] = known
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()]
    if not _POINTWISE[func] or not tensors or not isinstance(result, torch.Tensor):
        return None
    strides = [stride for tensor in tensors for stride in (*tensor.shape, *tensor.stride())]
    if all(type(stride) is int for stride in strides):
        rows = all(tensor.is_contiguous() for tensor in tensors)
        if 1 in result.shape and _shapes(func, args) == {result.shape}:
            # As TensorIteratorBase::fast_set_up, for operands of one shape.
            if rows:
                return _contiguous(func, args, result)
            if all(map(_is_channels_last, tensors)):
                layout = torch.channels_last
                return torch.empty_like(result, device="meta", memory_format=layout).stride()
        chosen = not rows or any(1 in tensor.shape for tensor in tensors)
    else:
        chosen = len(tensors) > 1 and _are_not_rows(tensors)
    if not chosen:
        return None
    whole = [_cast(t, result, func).expand(result.shape) for t in tensors]
    return tuple(torch._prims_common.compute_elementwise_output_strides(*whole))


def _are_not_rows(tensors: list[torch.Tensor]) -> bool:
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")  # imports sympy
    known = not any(map(shapes.has_free_unbacked_symbols, tensors))
    return known and not all(tensor.is_contiguous() for tensor in tensors)


def _cast(tensor: torch.Tensor, result: torch.Tensor, func: Any) -> torch.Tensor:
    """An operand as a CPU's kernels see it, which first convert it to the dtype of the result."""
    converts = result.device.type == "cpu" and result.is_floating_point()
    if not converts or tensor.dtype == result.dtype or func is _aten.where.self:
        return tensor
    return torch.empty_like(tensor, device="meta")


_POINTWISE: dict[Any, bool] = {}


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _shapes(func: Any, args: Any) -> set[Any]:
    """Shapes of the operands.

    A number in the place of a tensor is one without dimensions, and so is a number that a kernel
    makes a tensor of, which schemas call `other`.
    """
    operands = zip(args, func._schema.arguments, strict=False)
    given = [
        v for v, one in operands if isinstance(one.type, torch.TensorType) or one.name == "other"
    ]
    return {value.shape if isinstance(value, torch.Tensor) else () for value in given}


def _contiguous(func: Any, args: Any, result: Any) -> tuple[int, ...]:
    """Strides of contiguous results."""
    return tuple(torch._prims_common.make_contiguous_strides_for(result.shape))


def _contiguous_on_cpu(func: Any, args: Any, result: Any) -> tuple[int, ...] | None:
    """Strides of results that a CPU's kernel makes contiguous, unlike torch's references."""
    return _contiguous(func, args, result) if result.device.type == "cpu" else None


def _index_strides(func: Any, args: Any, result: Any) -> tuple[int, ...] | None:
    """Strides of what an index takes, in which the layout of index tensors has a say."""
    tensor, indices = args[:2]
    given = [one for one in indices if one is not None]
    sizes = [n for one in (tensor, *given) for n in (*one.shape, *one.stride())]
    if not all(type(n) is int for n in sizes) and not _are_not_rows([tensor, *given]):
        return None
    if any(one.dtype in (torch.bool, torch.uint8) for one in given):
        return None
    places = [d for d, one in enumerate(indices) if one is not None]
    strides, rank = tensor.stride(), max(one.dim() for one in given)
    adjacent = places[-1] - places[0] == len(places) - 1
    first = places[0] if adjacent else 0
    kept = [strides[d] for d in range(tensor.dim()) if d not in places]
    taken = torch.broadcast_shapes(*(one.shape for one in given))
    operands = [tensor.as_strided(result.shape, (*kept[:first], *[0] * rank, *kept[first:]), 0)]
    for one in given:
        # As ATen's reshape_indexer: a dimension of one element keeps the stride of the view.
        view = one.expand(taken).reshape([1] * first + [*taken] + [1] * (len(kept) - first))
        rows = zip(view.shape, view.stride(), result.shape)
        own = [stride if size == whole else 0 for size, stride, whole in rows]
        operands.append(one.as_strided(result.shape, own, 0))
    return tuple(torch._prims_common.compute_elementwise_output_strides(*operands))


def _fft_strides(func: Any, args: Any, result: Any) -> tuple[int, ...] | None:
    """Strides of MKL's transforms, which torch 2.11 has wrong: what is not transformed comes first,
    the last transformed dimension of real numbers last, others as in the operand."""
    tensor, dims = args[:2]
    if result.device.type != "cpu" or not torch.backends.mkl.is_available() or not dims:
        return None
    last = None if tensor.is_complex() else dims[-1]
    order = sorted(range(tensor.dim()), key=lambda d: (d in dims, d == last, -tensor.stride(d)))
    shape = [result.shape[d] for d in order]
    packed = torch._prims_common.make_contiguous_strides_for(shape)
    return tuple(packed[order.index(d)] for d in range(tensor.dim()))


def _like_operand(func: Any, args: Any, result: Any) -> tuple[int, ...] | None:
    """Strides of a CPU's cross entropy of elements, whatever those of the target."""
    alike = result.device.type == "cpu" and result.shape == args[0].shape
    return torch.empty_like(args[0], device="meta").stride() if alike else None


def _format_strides(func: Any, args: Any, result: Any) -> tuple[int, ...] | None:
    """Strides of what a CPU's kernel makes in its operand's memory format."""
    if result.device.type != "cpu":
        return None
    operand = args[1] if func is _aten.native_batch_norm_backward.default else args[0]
    layout = torch._prims_common.suggest_memory_format(operand)
    return torch.empty_like(result, device="meta", memory_format=layout).stride()


def _of_a_copy(func: Any, args: Any, result: Any) -> tuple[int, ...] | None:
    """Strides of what is written to a copy of an expanded tensor; torch 2.11 keeps its strides."""
    rows = zip(result.shape, result.stride())
    repeats = any(type(size) is int and size > 1 and stride == 0 for size, stride in rows)
    return torch.empty_like(args[0], device="meta").stride() if repeats else None


def _scaled_strides(func: Any, args: Any, result: Any) -> tuple[int, ...]:
    """Strides of a product with powers of two, which are made in rows."""
    powers = torch.empty(args[1].shape, device="meta").expand(result.shape)
    scaled = args[0].expand(result.shape)
    return tuple(torch._prims_common.compute_elementwise_output_strides(scaled, powers))


_SCATTERS = (
    _aten.diagonal_scatter.default, _aten.select_scatter.default, _aten.slice_scatter.default,
)  # fmt: skip
_NORMS = (
    _aten.native_batch_norm.default, _aten.native_batch_norm_backward.default,
    _aten._native_batch_norm_legit.default, _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit_no_training.default,
)  # fmt: skip
_Rule = Callable[[Any, Any, Any], tuple[int, ...] | None]
_STRIDES: dict[Any, _Rule] = {
    **dict.fromkeys(_NORMS, _format_strides),
    **dict.fromkeys(_SCATTERS, _of_a_copy),
    _aten.binary_cross_entropy.default: _like_operand,
    _aten.channel_shuffle.default: _format_strides,
    **dict.fromkeys((_aten._fft_c2c.default, _aten._fft_r2c.default), _fft_strides),
    _aten.index.Tensor: _index_strides,
    _aten.ldexp.Tensor: _scaled_strides,
    _aten.pow.Scalar: _contiguous,
    _aten.mvlgamma.default: _contiguous,
    _aten.isin.Tensor_Tensor: _contiguous,
    _aten.masked_fill.Scalar: _contiguous_on_cpu,
    _aten.masked_fill.Tensor: _contiguous_on_cpu,
}
