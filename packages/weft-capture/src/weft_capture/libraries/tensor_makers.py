"""torch.tensor, as_tensor and asarray, of numbers, arrays, tensors and lists of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from weft_capture.breaks import Break
from weft_capture.functions.table import rule
from weft_capture.libraries.numpy import ArrayValue, np, shared_tensor
from weft_capture.model.constant import NONE, Constant, constant, real_call
from weft_capture.model.containers import ListValue, RangeValue, SequenceValue
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.tensor import SymValue, TensorValue

_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _tensor_of(maker: Any, tx: Tracer, data: Value, **kwargs: Value) -> Value:
    """Create a tensor; NumPy's scalars decide its dtype, arrays are copied where torch does."""
    items = data.items if isinstance(data, SequenceValue) else [data]
    if items and all(isinstance(item, ArrayValue) for item in items):
        return _of_arrays(maker, tx, data, **kwargs)
    if isinstance(data, RangeValue):
        span = data.range
        kwargs.setdefault("dtype", constant(real_call(tx, maker, span[:1]).dtype))
        bounds: list[Value] = [
            constant(span.start),
            constant(span.stop),
            constant(span.step),
        ]
        return tx.graph.emit("call_function", torch.arange, bounds, kwargs)
    if isinstance(data, TensorValue):
        return tx.graph.emit("call_function", maker, [data], kwargs)
    alike = _sample_data(data)
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(alike)):
        return _of_tensors(maker, tx, data, alike, **kwargs)
    if "dtype" not in kwargs and any(isinstance(leaf, np.generic) for leaf in tree_leaves(alike)):
        with unset_fake_temporarily():
            kwargs["dtype"] = constant(real_call(tx, maker, alike).dtype)
    if isinstance(data, SymValue) and type(alike) is int and kwargs.keys() <= {"dtype", "device"}:
        options = {name: value for name, value in kwargs.items() if value is not NONE}
        how = {"dtype": constant(torch.int64), **options}
        return tx.graph.emit("call_function", torch.scalar_tensor, [data], how)
    numbers = [tx.force(item) for item in items]
    sizes = [number for number in numbers if isinstance(number, SymValue) and not number.is_data()]
    plain = all(number.python_type() is int for number in numbers) and kwargs.keys() <= {"dtype"}
    if sizes and plain and isinstance(data, SequenceValue):
        elements = [_tensor_of(maker, tx, number, **kwargs) for number in numbers]
        return tx.builtin(torch.stack, tx.literal(elements))
    return tx.graph.emit("call_function", maker, [_fixed(data)], kwargs)


def _of_tensors(maker: Any, tx: Tracer, data: Value, alike: Any, **kwargs: Value) -> Value:
    """Create a tensor of a list in which 0-dim tensors stand for numbers."""
    options = {name: kwargs.pop(name) for name in ("dtype", "device") if name in kwargs}
    real = {name: option.as_constant() for name, option in options.items()}
    with unset_fake_temporarily():
        dtype = real_call(tx, maker, alike, **real).dtype
    if kwargs:
        raise Break("unsupported-arguments", "a tensor of tensors with more arguments")

    def gather(item: Value) -> Value:
        item = tx.force(item)
        if isinstance(item, SequenceValue):
            return tx.builtin(torch.stack, ListValue([gather(part) for part in item.items]))
        if isinstance(item, TensorValue):
            wide = item.fake.dtype
            if wide in _WHOLE_NUMBERS and dtype not in _WHOLE_NUMBERS:
                item = item.call_method(tx, "to", [constant(torch.float64)], {})
            return item.call_method(tx, "to", [constant(torch.device("cpu")), constant(dtype)], {})
        return tx.call_builtin(torch.tensor, [item], {"dtype": constant(dtype)})

    result = gather(data)
    device = options.get("device", NONE)
    return result if device is NONE else result.call_method(tx, "to", [device], {})


def _fixed(data: Value) -> Value:
    """Fix the sizes in a list of numbers: torch takes 32 bits of each symbolic one."""
    if isinstance(data, SymValue) and data.python_type() is int and not data.is_data():
        return constant(data.as_constant())
    if isinstance(data, SequenceValue):
        items = [_fixed(item) for item in data.items]
        return data if items == list(data.items) else ListValue(items)
    return data


def _of_arrays(
    maker: Any, tx: Tracer, data: Value, dtype: Value = NONE, device: Value = NONE, **more: Value
) -> Value:
    rows: list[Any] = data.items if isinstance(data, SequenceValue) else [data]
    layouts = [(row.tensor.fake.dtype, tuple(row.tensor.fake.shape)) for row in rows]
    listed = rows[0] is not data
    warns = listed and any(row.cls is np.ndarray for row in rows)
    if (
        more
        or warns
        or layouts.count(layouts[0]) < len(rows)
        or (listed and maker is torch.asarray)
    ):
        raise Break("numpy", "a tensor of a list of arrays, or with more arguments")
    tensors = [shared_tensor(tx, row) for row in rows]
    tensor = tensors[0]
    if listed:
        tensor = tx.builtin(torch.stack, tx.literal(tensors))
    elif maker is torch.tensor or rows[0].cls is not np.ndarray:
        tensor = tensor.call_method(tx, "clone", [], {})
    dtype_option = {"dtype": dtype, "device": device}
    dtype_option = {name: value for name, value in dtype_option.items() if value is not NONE}
    return tensor.call_method(tx, "to", [], dtype_option) if dtype_option else tensor


def _sample_data(data: Value) -> Any:
    """Return an object from which torch creates a tensor of the same dtype, or the same error."""
    if isinstance(data, SequenceValue):
        return [_sample_data(item) for item in data.items]
    if isinstance(data, Constant):
        return data.value
    if isinstance(data, TensorValue):
        fake = data.fake
        if fake.dim() or fake.requires_grad:
            raise Break("data-dependent-value", f"a tensor of {data.describe()}")
        with unset_fake_temporarily():
            return torch.zeros((), dtype=fake.dtype)
    try:
        return data.python_type()()
    except TypeError:
        raise Break("numpy", f"a tensor of {data.describe()}") from None


if np is not None:
    for _maker in (torch.tensor, torch.as_tensor):
        rule(_maker)(functools.partial(_tensor_of, _maker))
    rule(torch.asarray)(lambda tx, obj, **kwargs: _tensor_of(torch.asarray, tx, obj, **kwargs))
