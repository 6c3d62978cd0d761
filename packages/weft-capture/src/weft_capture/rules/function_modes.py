"""What torch and the program ask about function modes, and how they enter and leave them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import overrides
from torch.utils._device import DeviceContext

from weft_capture.breaks import Break
from weft_capture.rules.table import rule
from weft_capture.values.base import Value
from weft_capture.values.constant import NONE, constant
from weft_capture.values.dicts import DictValue
from weft_capture.values.objects import UserObject

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


@rule(torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic)
@rule(torch._C._has_torch_function, overrides.has_torch_function)
@rule(torch._C._is_torch_function_mode_enabled)
def _is_any_active(tx: Tracer, *args: Value) -> Value:
    return constant(bool(tx.function_modes.modes))


@rule(overrides.handle_torch_function)
def _handle(
    tx: Tracer, public_api: Value, relevant_args: Value, *args: Value, **kwargs: Value
) -> Value:
    given = relevant_args.unpack(tx)
    owners = overrides._get_overloaded_args(given, lambda value: value.python_type())
    words = DictValue([(constant(name), value) for name, value in kwargs.items()])
    types = tx.tuple_of([tx.type_of(one) for one in owners])
    return tx.function_modes.ask(public_api, types, tx.tuple_of(args), words)


@rule(torch._C._push_on_torch_function_stack)
def _push(tx: Tracer, mode: Value) -> Value:
    if not isinstance(mode, UserObject) or issubclass(mode.cls, DeviceContext):
        raise Break("unknown-call", "entering a mode of torch")
    tx.function_modes.push(mode)
    return NONE


@rule(torch._C._pop_torch_function_stack)
def _pop(tx: Tracer) -> Value:
    return tx.function_modes.pop()
