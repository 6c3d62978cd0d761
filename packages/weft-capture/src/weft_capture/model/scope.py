"""Names outside of a frame: globals and builtins, attributes of Python modules, instance dicts.

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
from weft_core import torch_compiler_shim
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
from weft_capture.model.attributes import dict_of, is_slot, read_past
from weft_capture.model.constant import constant, real_call
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import FunctionValue, ObjectConstant
from weft_capture.model.objects import DELETED, UserObject
from weft_capture.model.protocol import Output, Tracer, Value, current_tracer, method


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
            getter = getattr(type(mro_entry[1]), "__get__", None)
            if isinstance(getter, types.FunctionType):
                args = [tx.const_object(mro_entry[1]), self, tx.const_object(type(real))]
                return tx.const_object(getter).tp_call(tx, args, {})
            return tx.wrap(getattr(real, name), AttrSource(ModuleSource(real.__name__), name))
        if name not in real.__dict__:
            return tx.const_object(real_call(tx, getattr, real, name))
        written = tx.effects.global_value(real.__dict__, name)
        if written is not None:
            return written
        obj = torch_compiler_shim.loaded(real.__dict__[name])
        if _is_fixed(real.__name__, name) and not isinstance(obj, torch.Tensor):
            tx.library[real.__name__, name] = obj
            return tx.const_object(obj)
        return tx.wrap(obj, ItemSource(globals_source(tx, real.__dict__), name))

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        entry = attributes.lookup(type(self.obj), name)
        setter = getattr(type(entry[1]), "__set__", None) if entry is not None else None
        if isinstance(setter, types.FunctionType):  # a property of torch.backends
            descriptor = tx.const_object(entry[1])  # type: ignore[index]
            tx.const_object(setter).tp_call(tx, [descriptor, self, value], {})
            return
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


# ---- an instance's `__dict__`, a live view; only plain writes are supported


class InstanceDict(DictValue):
    """The `__dict__` of an instance or function, a live view."""

    def __init__(self, owner: UserObject | FunctionValue) -> None:
        self.owner = owner
        super().__init__()

    @property
    def entries(self) -> dict[object, tuple[Value, Value]]:
        """The attributes as they are now."""
        members = _members(current_tracer(), self.owner)
        return {name: (constant(name), value) for name, value in members.items()}

    def same_object(self, other: Value) -> bool:
        return isinstance(other, InstanceDict) and other.owner is self.owner

    def get(self, tx: Tracer, key: Value) -> Value | None:
        owner, name = self.owner, key.tp_hash()
        if isinstance(owner, UserObject) and isinstance(name, str):  # no other is read, or guarded
            exists = name in owner.attrs or name in dict_of(owner.obj)
            return owner.own_attribute(tx, name) if exists else None
        return super().get(tx, key)

    def put(self, key: Value, value: Value) -> None:
        self.owner.store(current_tracer(), self._name(key), value)

    def undo_put(self, hashed: object) -> None:
        """Return nothing: the owner undoes it."""

    def slot(self, key: Value, writes: bool = False) -> object:
        return self._name(key) if writes else super().slot(key)

    def _name(self, key: Value) -> str:
        name = key.as_constant()
        if not isinstance(name, str) or is_slot(self.owner.python_type(), name):
            raise Break("namespace-dict", f"{name} in the __dict__ of {self.owner.describe()}")
        return name

    def copy(self) -> DictValue:
        return DictValue(list(self.entries.values()))

    def reconstruct(self, out: Output) -> None:
        out.call(object.__getattribute__, [self.owner, constant("__dict__")])


def instance_dict(tx: Tracer, owner: Value) -> Value:
    """Return the `__dict__` of an instance or function."""
    if not isinstance(owner, UserObject | FunctionValue):
        raise Break("namespace-dict", f"__dict__ of {owner.describe()}")
    if owner.obj is not None and owner.source is not None:
        tx.check_namespace(dict_of(owner.obj))
        source = read_past(owner.source, owner.obj, "__dict__")
        tx.guard_keys(source, dict_of(owner.obj))
    return InstanceDict(owner)


def _members(tx: Tracer, owner: UserObject | FunctionValue) -> dict[str, Value]:
    members: dict[str, Value] = {}
    read = owner.tp_getattro if isinstance(owner, FunctionValue) else owner.own_attribute
    for name in dict_of(owner.obj):
        current = read(tx, name)
        if current is not None:
            members[name] = current
    written = owner.attributes if isinstance(owner, FunctionValue) else owner.attrs
    for name, value in written.items():
        if value is not DELETED and not is_slot(owner.python_type(), name):
            members[name] = value
    return members


@method(InstanceDict, "pop")
def _pop(tx: Tracer, self: InstanceDict, key: Value, *default: Value) -> Value:
    if key.as_constant() in self.entries or not default:
        _other_writes(tx, self)
    return default[0]


@method(InstanceDict, "popitem", "clear", "setdefault", "__delitem__", "__ior__")
def _other_writes(tx: Tracer, self: InstanceDict, *args: Value) -> Value:
    raise Break("namespace-dict", "removing from an instance's __dict__")
