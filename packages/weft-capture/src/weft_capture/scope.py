"""Names outside of a frame: globals and builtins, attributes of Python modules and functions.

A global is guarded where it is read; those of torch and the standard library are taken to be
constant, since nobody changes them and there are thousands.
"""

from __future__ import annotations

import builtins
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from weft_guards.sources import (
    AttrSource,
    ConstSource,
    GlobalSource,
    GlobalsSource,
    ItemSource,
    ModuleSource,
    Source,
)

from weft_capture import attributes
from weft_capture.breaks import Break
from weft_capture.values.base import MethodOf, Value
from weft_capture.values.constant import NONE
from weft_capture.values.functions import FunctionValue, ModuleObject
from weft_capture.values.objects import DELETED
from weft_capture.values.wrap import function_cells

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


def load_global(tx: Tracer, function: FunctionValue, name: str) -> Value:
    """Read a global of a function, or a builtin."""
    global_dict = function.globals
    written = tx.effects.global_value(global_dict, name)
    if written is DELETED:
        tx.raise_(NameError, f"name '{name}' is not defined")
    if written is not None:
        return written
    if name in global_dict:
        obj = global_dict[name]
        return tx.wrap(obj, _global_source(tx, global_dict, name, obj))
    if not attributes.is_trusted(global_dict.get("__name__")):
        tx.guard(globals_source(tx, global_dict), "KEY_ABSENT", name)
    builtins_dict = global_dict.get("__builtins__", {})
    if isinstance(builtins_dict, types.ModuleType):
        builtins_dict = builtins_dict.__dict__
    if name not in builtins_dict:
        tx.raise_(NameError, f"name '{name}' is not defined")
    return tx.const_object(builtins_dict[name])


def store_global(tx: Tracer, function: FunctionValue, name: str, value: Value) -> None:
    """Write a global of a function."""
    tx.effects.store_global(function.globals, name, value)


def _global_source(tx: Tracer, global_dict: dict[str, Any], name: str, obj: Any) -> Source:
    if global_dict is tx.function.__globals__:
        return GlobalSource(name)
    trusted = attributes.is_trusted(global_dict.get("__name__"))
    if trusted and not isinstance(obj, torch.Tensor):
        return ConstSource(obj)
    return ItemSource(globals_source(tx, global_dict), name)


def globals_source(tx: Tracer, global_dict: dict[str, Any]) -> Source:
    """Return the source of a globals dict."""
    if global_dict is tx.function.__globals__:
        return GlobalsSource()
    name = global_dict.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is not None and module.__dict__ is global_dict:
        return AttrSource(ModuleSource(module.__name__), "__dict__")
    return ConstSource(global_dict)


_OF_SYS = ("stdout", "stderr", "stdin", "argv", "path", "modules", "warnoptions")
_CHANGING = frozenset([("warnings", "filters"), *(("sys", name) for name in _OF_SYS)])
"""Names in the standard library that programs do rebind."""


def module_attribute(tx: Tracer, module: ModuleObject, name: str) -> Value:
    """Read an attribute of a Python module."""
    real = module.obj
    if name not in real.__dict__:
        try:
            return tx.const_object(getattr(real, name))
        except AttributeError as error:
            tx.raise_(AttributeError, *error.args)
    written = tx.effects.global_value(real.__dict__, name)
    if written is not None:
        return written
    obj = real.__dict__[name]
    fixed = attributes.is_trusted(real.__name__) and (real.__name__, name) not in _CHANGING
    if fixed and not isinstance(obj, torch.Tensor):
        return tx.const_object(obj)
    return tx.wrap(obj, ItemSource(globals_source(tx, real.__dict__), name))


def set_module_attribute(tx: Tracer, module: ModuleObject, name: str, value: Value) -> None:
    """Write an attribute of a Python module, which is a global of its functions."""
    real = module.obj
    fixed = attributes.is_trusted(real.__name__) and (real.__name__, name) not in _CHANGING
    if fixed or type(real) is not types.ModuleType or hasattr(types.ModuleType, name):
        raise Break("unsupported-value", f"setting {name} of {module.describe()}")
    tx.effects.store_global(real.__dict__, name, value)


_CONSTANT_NAMES = ("__name__", "__qualname__", "__module__")


def function_attribute(tx: Tracer, function: FunctionValue, name: str) -> Value:
    """Read an attribute of a function from outside."""
    assert function.obj is not None
    source = function.source or ConstSource(function.obj)
    if name == "__get__":
        return MethodOf(function, name)
    if name == "__closure__":
        cells = function_cells(tx, function.obj, source)
        return tx.tuple_of(list(cells)) if cells else NONE
    if not hasattr(function.obj, name):
        tx.raise_(AttributeError, f"'function' object has no attribute '{name}'")
    real = getattr(function.obj, name)
    if isinstance(source, ConstSource) or name in _CONSTANT_NAMES:
        return tx.literal(real)
    return tx.wrap(real, AttrSource(source, name))


def import_module(tx: Tracer, name: str, *how: Any) -> Value:
    """Import a module as `__import__(name, *how)` does."""
    if name.startswith("torch._") and name not in sys.modules:
        raise Break("unknown-call", f"import of {name}")
    try:
        return tx.const_object(builtins.__import__(name, *how))
    except ImportError as error:
        tx.raise_real(error)
