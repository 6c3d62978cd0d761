"""Names outside of a frame: globals and builtins, attributes of Python modules.

A global is guarded where it is read. Those of torch and the standard library are taken to be
constant, and one guard a module tells when one was replaced.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from weft_guards import Guard, WeakIdentity
from weft_guards.payloads import NamespaceUse
from weft_guards.sources import (
    AttrSource,
    ConstSource,
    GlobalSource,
    GlobalsSource,
    ItemSource,
    ModuleSource,
    ProgramSource,
    Source,
)

from weft_capture.breaks import Break
from weft_capture.model import attributes
from weft_capture.model.constant import real_call
from weft_capture.model.functions import FunctionValue, ObjectConstant
from weft_capture.model.objects import DELETED
from weft_capture.model.protocol import Tracer, Value


def load_global(tx: Tracer, function: FunctionValue, name: str) -> Value:
    """Read a global of a function, or a builtin."""
    global_dict = function.globals
    tx.check_namespace(global_dict)
    written = tx.effects.global_value(global_dict, name)
    if written is DELETED:
        tx.raise_(NameError, f"name '{name}' is not defined")
    if written is not None:
        return written
    if name in global_dict:
        obj = global_dict[name]
        return tx.wrap(obj, _global_source(tx, global_dict, name, obj))
    if not attributes.is_immutable_module(global_dict.get("__name__")):
        tx.guard(globals_source(tx, global_dict), "KEY_ABSENT", name)
    builtins_dict = global_dict.get("__builtins__", {})
    if isinstance(builtins_dict, types.ModuleType):
        builtins_dict = builtins_dict.__dict__
    if name not in builtins_dict:
        tx.raise_(NameError, f"name '{name}' is not defined")
    if builtins_dict is builtins.__dict__:
        tx.library["builtins", name] = builtins_dict[name]
    return tx.const_object(builtins_dict[name])


def store_global(tx: Tracer, function: FunctionValue, name: str, value: Value) -> None:
    """Write a global of a function."""
    tx.check_namespace(function.globals)
    tx.effects.store_global(function.globals, name, value)


def _global_source(tx: Tracer, global_dict: dict[str, Any], name: str, obj: Any) -> Source:
    if global_dict is tx.function.__globals__:
        return GlobalSource(name)
    if _is_fixed(global_dict.get("__name__"), name) and not isinstance(obj, torch.Tensor):
        tx.library[global_dict["__name__"], name] = obj
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
_CHANGING = {"sys": _OF_SYS, "warnings": ("filters", "showwarning", "_showwarnmsg_impl")}
"""Names in the standard library that programs do rebind."""


def _is_fixed(module: str | None, name: str) -> bool:
    return attributes.is_immutable_module(module) and name not in _CHANGING.get(module or "", ())


def library_guards(library: dict[tuple[str, str], Any]) -> Iterator[Guard]:
    """Yield one guard for each module of a library whose globals were read."""
    by_module: dict[str, dict[str, object]] = {}
    for (module, name), obj in library.items():
        owner = sys.modules.get(module)
        if owner is not None and vars(owner).get(name) is obj:
            by_module.setdefault(module, {})[name] = obj
    for module, names in by_module.items():
        module_source = ProgramSource(WeakIdentity(sys.modules[module]))
        yield Guard.of(module_source, "NAMESPACE", NamespaceUse.of(names))


class ModuleObject(ObjectConstant):
    """A Python module."""

    def describe(self) -> str:
        return f"module {self.obj.__name__}"

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        real = self.obj
        if name == "__dict__" and not attributes.is_immutable_module(real.__name__):
            raise Break("namespace-dict", "the __dict__ of a module")
        tx.check_namespace(real.__dict__)
        mro_entry = attributes.lookup(type(real), name)
        listed = sys.modules.get(real.__name__) is real
        # Properties of a module's class, for example of torch.backends.
        if listed and mro_entry is not None and hasattr(mro_entry[1], "__set__"):
            return tx.wrap(getattr(real, name), AttrSource(ModuleSource(real.__name__), name))
        if name not in real.__dict__:
            return tx.const_object(real_call(tx, getattr, real, name))
        written = tx.effects.global_value(real.__dict__, name)
        if written is not None:
            return written
        obj = real.__dict__[name]
        if _is_fixed(real.__name__, name) and not isinstance(obj, torch.Tensor):
            tx.library[real.__name__, name] = obj
            return tx.const_object(obj)
        return tx.wrap(obj, ItemSource(globals_source(tx, real.__dict__), name))

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        plain = type(self.obj) is types.ModuleType and not hasattr(types.ModuleType, name)
        if _is_fixed(self.obj.__name__, name) or not plain:
            super().tp_setattro(tx, name, value)
        tx.effects.store_global(self.obj.__dict__, name, value)


def import_module(tx: Tracer, name: str, *how: Any) -> Value:
    """Import a module as `__import__(name, *how)` does."""
    if name.startswith("torch._") and name not in sys.modules:
        raise Break("dynamic-code", f"import of {name}")
    try:
        return tx.const_object(builtins.__import__(name, *how))
    except ImportError as error:
        tx.raise_real(error)
