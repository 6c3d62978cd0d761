"""Optimizers: decorators and helpers of torch.optim, and the `_foreach` functions.

`step`, `zero_grad` and gradient clipping are inlined like any Python code. The rules here are for
the decorators of torch.optim, which call torch's own compiler, and for helpers that behave
differently under `is_compiling()`. A `_foreach` function becomes its C++ slow path: one operation
for each element of the lists.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from weft_capture.breaks import Break
from weft_capture.functions.table import code_rule, pure, rule, rule_of_each
from weft_capture.model.constant import NONE, constant
from weft_capture.model.containers import ListValue, SequenceValue, TupleValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import FunctionValue
from weft_capture.model.protocol import Kwargs, Tracer, Value
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.scalar_operands import before_graph
from weft_capture.tensors.tensor import TensorValue

pure(torch._C._get_privateuse1_backend_name, torch.cuda.is_current_stream_capturing)


def _free(function: FunctionValue, name: str) -> Value:
    """Return a free variable of a decorator's inner function."""
    cell = function.cells[function.code.co_freevars.index(name)]
    assert cell.contents is not None
    return cell.contents


def _inner_code(decorator: Any, name: str) -> types.CodeType:
    """Return the code of the function that a decorator defines."""
    consts = decorator.__code__.co_consts
    return next(c for c in consts if isinstance(c, types.CodeType) and c.co_name == name)


def _use_grad(tx: Tracer, function: FunctionValue, args: list[Value], kwargs: Kwargs) -> Value:
    """Run `step` in the grad mode that the optimizer asks for."""
    defaults = args[0].tp_getattro(tx, "defaults")
    differentiable = defaults.mp_subscript(tx, constant("differentiable"))
    before = torch.is_grad_enabled()
    tx.builtin(torch._C._set_grad_enabled, constant(differentiable.nb_bool(tx)))
    result = tx.force(_free(function, "func")).tp_call(tx, args, kwargs)
    tx.builtin(torch._C._set_grad_enabled, constant(before))
    return result


def _undisabled(tx: Tracer, function: FunctionValue, args: list[Value], kwargs: Kwargs) -> Value:
    """Unwrap the function of an optimizer that `torch._disable_dynamo` wraps."""
    wrapped = _free(function, "fn")
    inner = tx.force(wrapped)
    module = getattr(getattr(inner, "obj", None), "__module__", None) or ""
    if not module.startswith("torch.optim"):
        raise Break("disabled", function.code.co_qualname)
    return inner.tp_call(tx, args, kwargs)


code_rule(_inner_code(optimizer._use_grad_for_differentiable, "_use_grad"))(_use_grad)
code_rule(_inner_code(torch._compile._disable_dynamo, "inner"))(_undisabled)


@rule(optimizer._get_value)
def _get_value(tx: Tracer, value: Value) -> Value:
    if not isinstance(value, TensorValue):
        return value
    return symbolic_scalars.computed(tx, value, before_graph(tx, value))


@rule(optimizer._stack_if_compiling)
def _stack_if_compiling(tx: Tracer, values: Value) -> Value:
    return values


@rule(
    torch._C._group_tensors_by_device_and_dtype,
    _foreach_utils._group_tensors_by_device_and_dtype,
    optimizer.Optimizer._group_tensors_by_device_and_dtype,
)
def _group_tensors(tx: Tracer, lists: Value, with_indices: Value = NONE) -> Value:
    """Group the elements of several lists by device and dtype of those of the first list."""
    columns = [column.unpack(tx) for column in lists.unpack(tx)]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(columns[0]):
        fake = tensor.example()
        groups.setdefault((fake.device, fake.dtype), []).append(index)
    pairs: list[tuple[Value, Value]] = []
    for key, indices in groups.items():
        group = [ListValue([column[i] for i in indices] if column else []) for column in columns]
        numbers = ListValue([constant(i) for i in indices])
        pairs.append((tx.literal(key), TupleValue([ListValue(list(group)), numbers])))
    return DictValue(pairs)


# ---- _foreach functions

_SPECIAL = {"norm": torch.linalg.vector_norm}
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
_SCALARS = {"addcmul": "value", "addcdiv": "value", "addcmul_": "value", "addcdiv_": "value"}


def _is_mapped(name: str) -> bool:
    """Say whether this is a `_foreach` function of an operation that exists for one tensor."""
    single = name.removeprefix("_foreach_")
    return single != name and (single in _SPECIAL or hasattr(torch.Tensor, single))


@rule_of_each(*(getattr(torch, name) for name in dir(torch) if _is_mapped(name)))
def _foreach(function: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    single = function.__name__.removeprefix("_foreach_")
    target: Any = _SPECIAL.get(single, single)
    count = next(len(arg.items) for arg in args if isinstance(arg, SequenceValue))
    results = []
    for index in range(count):
        row = [_element(arg, index) for arg in args]
        keywords = {key.removesuffix("s"): _element(v, index) for key, v in kwargs.items()}
        if single in _SCALARS and len(row) == 4:
            keywords[_SCALARS[single]] = row.pop()
        plain = single.removesuffix("_")
        if plain in _OF_NUMBERS and not isinstance(row[-1], TensorValue):
            target = single.replace(plain, _OF_NUMBERS[plain])
        results.append(_one(tx, target, row, keywords))
    if single.endswith("_"):
        return args[0]
    floating = [result.example() for result in results if result.example().is_floating_point()]
    if len({tensor.requires_grad for tensor in floating}) > 1:  # in eager: one autograd node
        raise Break("autograd-state", "only some elements of a foreach function require grad")
    return TupleValue(results)


def _one(tx: Tracer, target: Any, args: list[Value], kwargs: Kwargs) -> Value:
    if isinstance(target, str) and isinstance(args[0], TensorValue):
        return args[0].call_method(tx, target, args[1:], kwargs)
    function = getattr(torch, target) if isinstance(target, str) else target
    return tx.graph.emit("call_function", function, args, kwargs)


def _element(value: Value, index: int) -> Value:
    return value.items[index] if isinstance(value, SequenceValue) else value
