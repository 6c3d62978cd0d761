"""Attributes of `torch.nn.Module`: parameters, buffers and submodules."""

from __future__ import annotations

import inspect

import torch
from weft_core import torch_compiler_shim

from weft_capture.functions.table import code_rule, rule
from weft_capture.model import attributes
from weft_capture.model.objects import ModuleValue
from weft_capture.model.protocol import Kwargs, Tracer, Value

_MEMBERS = (torch.nn.Parameter, torch.nn.Module, torch.nn.Buffer)
_SETATTR = torch.nn.Module.__setattr__


def _module_getattr(tx: Tracer, function: Value, args: list[Value], kwargs: Kwargs) -> Value | None:
    """Read a member of an input module; for a new module, `__getattr__` is inlined."""
    owner, name = args
    if not isinstance(owner, ModuleValue) or owner.source is None:
        return None
    member = attributes.module_member(tx, owner, name.as_constant())
    if member is None:
        text = f"'{owner.cls.__name__}' object has no attribute '{name.as_constant()}'"
        tx.raise_(AttributeError, text)
    return member


code_rule(torch.nn.Module.__getattr__.__code__)(_module_getattr)


@rule(_SETATTR)
def _module_setattr(tx: Tracer, owner: Value, name: Value, value: Value) -> Value:
    if isinstance(owner, ModuleValue) and not issubclass(value.python_type(), _MEMBERS):
        if attributes.module_member(tx, owner, name.as_constant()) is None:
            return tx.builtin(object.__setattr__, owner, name, value)
    return tx.trace_body(_SETATTR, [owner, name, value], {})


@rule(torch_compiler_shim.MODULE_INIT)
def _module_init(tx: Tracer, owner: Value, *args: Value, **kwargs: Value) -> Value:
    """Skip the marker that torch's compiler, once loaded, sets on modules."""
    init = inspect.getclosurevars(torch.nn.Module.__init__).nonlocals["init"]
    return tx.const_object(init).tp_call(tx, [owner, *args], kwargs)
