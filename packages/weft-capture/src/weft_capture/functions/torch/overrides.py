"""Functions of torch that tensor subclasses with `__torch_function__` and function modes call."""

from __future__ import annotations

from typing import Any

import torch
from torch import overrides
from torch.utils._device import DeviceContext

from weft_capture.breaks import Break
from weft_capture.functions.table import code_rule, rule
from weft_capture.functions.torch.interception import on_device, retyped
from weft_capture.model.constant import FALSE, NONE, constant
from weft_capture.model.contexts import NullContext
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import FunctionValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Kwargs, Output, Tracer, Value, method
from weft_capture.tensors.tensor import TensorValue

method(TensorValue, "as_subclass")(lambda tx, self, cls: retyped(tx, cls.as_constant(), self))


@rule(torch.Tensor._make_subclass)
def _make_subclass(tx: Tracer, cls: Value, data: Value, require_grad: Value = FALSE) -> Value:
    if require_grad.nb_bool(tx):
        raise Break("tensor-subclass", "a new leaf of a tensor subclass")
    return retyped(tx, cls.as_constant(), data, detached=True)


rule(torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic)(
    lambda tx, *args: constant(tx.overrides.concern(list(args), {}))
)
rule(torch._C._has_torch_function, overrides.has_torch_function)(
    lambda tx, args: constant(tx.overrides.concern(args.unpack(tx), {}))
)
rule(torch._C._is_torch_function_mode_enabled)(
    lambda tx: constant(bool(tx.overrides.stack) and tx.overrides.level < 2)
)
rule(overrides.get_default_nowrap_functions)(
    lambda tx: tx.literal(set(overrides.get_default_nowrap_functions()))
)


@rule(overrides.handle_torch_function)
def _handle(
    tx: Tracer, public_api: Value, relevant_args: Value, *args: Value, **kwargs: Value
) -> Value:
    arguments = [tx.force(arg) for arg in relevant_args.unpack(tx)]
    owners = overrides._get_overloaded_args(arguments, lambda value: value.python_type())
    keywords = DictValue([(constant(name), value) for name, value in kwargs.items()])
    classes = [owner.python_type() for owner in owners]
    return tx.overrides.call_handlers(public_api, classes, [tx.tuple_of(args), keywords])


@rule(torch._C._disabled_torch_function_impl)
def _disabled(tx: Tracer, func: Value, types: Value, args: Value, kwargs: Value = NONE) -> Value:
    before, stack = tx.overrides.level, tx.overrides.stack
    keywords = {} if kwargs is NONE else tx.keyword_arguments(kwargs)
    tx.overrides.open(max(1, before), stack)
    try:
        return func.tp_call(tx, args.unpack(tx), keywords)
    finally:
        tx.overrides.close(before, stack)


class HandlersOff(NullContext):
    """DisableTorchFunctionSubclass (level 1) and DisableTorchFunction (level 2)."""

    def enter(self, tx: Tracer) -> Value:
        self.real = tx.overrides.level
        tx.overrides.open(max(_LEVELS[self.cls], self.real), tx.overrides.stack)
        return NONE

    def leave(self, tx: Tracer) -> Value:
        tx.overrides.close(self.real, tx.overrides.stack)
        return FALSE

    def reconstruct(self, out: Output) -> None:
        out.call(self.cls, [])


_LEVELS: dict[Any, int] = {
    torch._C.DisableTorchFunctionSubclass: 1,
    torch._C.DisableTorchFunction: 2,
}
for _kind in _LEVELS:
    rule(_kind)(lambda tx, context_class=_kind: HandlersOff(context_class))


@rule(torch._C._push_on_torch_function_stack)
def _push(tx: Tracer, mode: Value) -> None:
    if not isinstance(mode, UserObject) or issubclass(mode.cls, DeviceContext):
        raise Break("context-manager", "entering a function mode of torch")
    tx.overrides.open(tx.overrides.level, (*tx.overrides.stack, mode))


@rule(torch._C._pop_torch_function_stack)
def _pop(tx: Tracer) -> Value:
    stack = tx.overrides.stack
    tx.overrides.close(tx.overrides.level, stack[:-1])
    return stack[-1]


rule(torch._C._len_torch_function_stack)(lambda tx: constant(len(tx.overrides.stack)))


@rule(torch._C._get_function_stack_at)
def _mode_at(tx: Tracer, index: Value) -> Value:
    mode: Value = tx.overrides.stack[index.as_constant()]
    return mode


def _handle_on_device(
    tx: Tracer, function: FunctionValue, args: list[Value], kwargs: Kwargs
) -> Value:
    mode, func, _, arguments, *rest = args
    keywords = tx.keyword_arguments(rest[0]) if rest and rest[0] is not NONE else {}
    keywords = on_device(tx, mode, getattr(func, "obj", None), keywords)
    return func.tp_call(tx, arguments.unpack(tx), keywords)


code_rule(DeviceContext.__torch_function__.__code__)(_handle_on_device)
