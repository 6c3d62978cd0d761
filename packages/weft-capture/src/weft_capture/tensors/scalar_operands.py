"""Symbolic floats as arguments of tensor operations."""

from __future__ import annotations

import operator
from typing import Any

import torch

from weft_capture.breaks import Break
from weft_capture.model.constant import constant, plain_scalar
from weft_capture.model.protocol import Kwargs, Tracer, Value
from weft_capture.tensors.symbolic_scalars import (
    SymFloatValue,
    computed,
    is_whole,
    operands,
    symbol,
    symbols,
)
from weft_capture.tensors.tensor import TensorValue

_SCALES = ("alpha", "value")


def concern(args: list[Value], kwargs: Kwargs) -> bool:
    """Say whether `emit` handles these arguments: a symbolic float, or a tensor as a scale."""
    return _any_varies([*args, *kwargs.values()]) or any(
        isinstance(kwargs.get(name), TensorValue) for name in _SCALES
    )


def _any_varies(values: list[Value]) -> bool:
    return any(
        isinstance(value, SymFloatValue)
        or (isinstance(items := getattr(value, "items", None), list) and _any_varies(items))
        for value in values
    )


def emit(tx: Tracer, op: str, target: Any, args: list[Value], kwargs: Kwargs) -> Value:
    """Emit an operation that has symbolic floats among its arguments.

    `alpha=` and `value=` scale the second argument, so they are multiplied into it; elsewhere a
    0-dim tensor replaces the number. Where that is not the same operation, the number is fixed with
    a guard.
    """
    rate = kwargs.get("lr")
    if isinstance(rate, SymFloatValue) and _name(target).startswith("fused_"):
        return tx.graph.emit(op, target, args, {**kwargs, "lr": rate.tensor()})
    data, last = (args[0], args[-1]) if args else (None, None)
    if target in (torch.tensor, torch.as_tensor) and isinstance(data, SymFloatValue):
        if not (kwargs.keys() - {"dtype", "device"} or data.python_type() is bool):
            default = torch.int64 if is_whole(data.hint) else torch.get_default_dtype()
            how = {"dtype": constant(default), **kwargs, "copy": constant(True)}
            return tx.graph.emit("call_method", "to", [data.tensor()], how)
    number = kwargs.get("fill_value", last)
    fills = isinstance(number, SymFloatValue) and not is_whole(number.hint)
    if _name(target) in _FILLED and fills and "requires_grad" not in kwargs:
        return _full(tx, op, target, args, dict(kwargs))
    scaled = _scale_second(tx, target, args, kwargs)
    if scaled is not None:
        return tx.graph.emit(op, target, *scaled)
    example = next((a.fake for a in args if isinstance(a, TensorValue)), None)
    fixed = example is None or _any_varies([*kwargs.values()])
    dtype = None if fixed else _result_dtype(target, args)
    if dtype is not None:
        assert example is not None
        swapped = [_at_dtype(tx, arg, dtype, example.device) for arg in args]
        try:
            result = tx.graph.emit(op, target, swapped, kwargs)
        except Break:
            result = None
        if isinstance(result, TensorValue) and result.fake.dtype is dtype:
            return result
    keywords = {name: symbol(tx, value) for name, value in kwargs.items()}
    return tx.graph.emit_plain(op, target, symbols(tx, args), keywords)


_FILLED = {"full": "empty", "full_like": "empty_like", "new_full": "new_empty"}


def _full(tx: Tracer, op: str, target: Any, args: list[Value], kwargs: Kwargs) -> Value:
    number = kwargs.pop("fill_value", None) or args[-1]
    maker = getattr(torch, _FILLED[target.__name__]) if callable(target) else _FILLED[target]
    if target is torch.full:
        kwargs.setdefault("dtype", constant(torch.get_default_dtype()))
    full = tx.graph.emit(op, maker, [arg for arg in args if arg is not number], kwargs)
    return tx.graph.emit("call_method", "fill_", [full, *operands(number)], {})


def _scale_second(
    tx: Tracer, target: Any, args: list[Value], kwargs: Kwargs
) -> tuple[list[Value], Kwargs] | None:
    name = next(
        (n for n in _SCALES if isinstance(kwargs.get(n), SymFloatValue | TensorValue)), None
    )
    if name is None or len(args) < 2 or not isinstance(args[1], TensorValue):
        return None
    if _name(target) not in ("add", "sub", "addcmul", "addcdiv"):
        return None
    scale = kwargs[name]
    if isinstance(scale, TensorValue):  # torch reads its value
        scale = computed(tx, scale)
    moved = tx.graph.emit("call_function", operator.mul, [args[1], scale], {})
    rest = {key: value for key, value in kwargs.items() if key != name}
    return [args[0], moved, *args[2:]], rest


_NUMBER_OPERATORS = frozenset(("add", "sub", "mul", "truediv", "div", "pow", "rsub", "lerp"))


def _name(target: Any) -> str:
    """The name of the out-of-place operation: `add` for `add_` and `iadd`."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    name = name.strip("_")
    return name[1:] if name[:1] == "i" and name[1:] in _NUMBER_OPERATORS else name


def _result_dtype(target: Any, args: list[Value]) -> torch.dtype | None:
    """The result's dtype with a Python float among the operands; None where a tensor changes it."""
    if _name(target) not in _NUMBER_OPERATORS or len(args) < 2:
        return None
    return torch.result_type(
        *(
            type(plain_scalar(arg.hint))(1) if isinstance(arg, SymFloatValue) else arg.example()
            for arg in args[:2]
        )
    )


def _at_dtype(tx: Tracer, value: Value, dtype: torch.dtype, device: torch.device) -> Value:
    if not isinstance(value, SymFloatValue):
        return value
    # As a Python float the number would be used at the operation's own precision.
    precision = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    tensor: Value = value.tensor()
    if not dtype.is_floating_point and dtype is not torch.int64:
        value.as_constant()
    if precision is not tensor.example().dtype:
        tensor = tx.graph.emit("call_method", "to", [tensor, constant(precision)], {})
    if device.type != "cpu":
        tensor = tx.graph.emit("call_method", "to", [tensor, constant(device)], {})
    return tensor
