"""Attribute lookup as the interpreter does it, on values.

`plain_attribute` follows `object.__getattribute__`: data descriptors of the class, the instance
dict, other class attributes, `__getattr__`. What is found in a class is turned into a value by
`bind`, through a table keyed by the type of the descriptor.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from weft_core import torch_compiler_shim
from weft_guards import ClassUse, Guard, WeakIdentity
from weft_guards.payloads import find_in_class, is_descriptor
from weft_guards.sources import (
    AttrSource,
    CallSource,
    ConstSource,
    DictSource,
    InstanceAttrSource,
    ItemSource,
    ModuleSource,
    ProgramSource,
    Source,
    TypeSource,
)

from weft_capture import frame
from weft_capture.breaks import Break
from weft_capture.library_traits import IMMUTABLE_PACKAGES, UNGUARDED_PACKAGES
from weft_capture.model.constant import FRAME_CLASSES, NONE, constant
from weft_capture.model.dicts import DictValue, LazyValue
from weft_capture.model.functions import BoundMethod
from weft_capture.model.protocol import Call, InstanceValue, Kwargs, MethodOf, Raised, Tracer, Value
from weft_capture.python_compat import TYPE_VARIABLE_FIELDS, type_name

MroEntry = tuple[type, Any]
_MEMBER_DICTS = ("_parameters", "_buffers", "_modules")


@functools.cache
def is_immutable_module(module: str | None) -> bool:
    """Say whether a module's globals and classes are assumed constant, as those of libraries."""
    if not module:
        return False
    root = module.partition(".")[0]
    return root in IMMUTABLE_PACKAGES or (root in sys.stdlib_module_names and root != "__main__")


def check_hashes(keys: Iterable[Any]) -> None:
    """Check that hashing dict keys runs no code of the program, except generated `__hash__`es.

    Raises:
        Break: for a key with another `__hash__` in Python.
    """
    referred = (key() if isinstance(key, weakref.ref) else key for key in keys)
    for cls in {type(key) for key in referred}:
        code = getattr(cls.__hash__, "__code__", None)
        if code is None or code.co_filename == "<string>":
            continue
        if not any(map(is_immutable_module, (cls.__module__, cls.__hash__.__module__))):
            raise Break("dict-key", "a dict whose keys have a __hash__ in Python")


def metadata_of(obj: Any, source: Source) -> Value | None:
    """Return the attribute that torch gives to a state dict.

    Raises:
        Break: when a dict of a class of the library has other attributes of its own.
    """
    variables = getattr(obj, "__dict__", {})
    if variables.keys() - {"_metadata"}:
        raise Break("c-attribute", f"attributes of a {type(obj).__name__}")
    return LazyValue(obj._metadata, AttrSource(source, "_metadata")) if variables else None


class ClassReads(threading.local):
    """The class attributes that the current capture looked up, with the results."""

    def __init__(self) -> None:
        self.mro_entries: dict[type, dict[str, MroEntry | None]] | None = None

    @contextmanager
    def recorded(self) -> Iterator[dict[type, dict[str, MroEntry | None]]]:
        """Record the lookups of a block; the table is filled as they happen."""
        before, self.mro_entries = self.mro_entries, {}
        try:
            yield self.mro_entries
        finally:
            self.mro_entries = before


class_reads = ClassReads()
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def lookup(cls: type, name: str) -> MroEntry | None:
    """Look a name up in a class and its bases without running descriptors.

    During a capture, the new code depends on the result, also where there is none.
    """
    mro_entry = find_in_class(cls, name)
    package = (cls.__module__ or "").partition(".")[0]
    fixed = cls.__flags__ & _IMMUTABLE_TYPE or package in UNGUARDED_PACKAGES
    if class_reads.mro_entries is not None and not fixed:
        class_reads.mro_entries.setdefault(cls, {})[name] = mro_entry
    return mro_entry


def class_guards(reads: dict[type, dict[str, MroEntry | None]]) -> Iterator[Guard]:
    """Yield one guard for each class that was read.

    An attribute that is no descriptor is guarded by its value where it is read, unless it is fixed.
    """
    for cls, names in reads.items():
        plain = {
            name
            for name, m in names.items()
            if m and not is_descriptor(m[1]) and not is_immutable_module(m[0].__module__)
        }
        use = ClassUse.of(cls, names, plain)
        yield Guard.of(ProgramSource(WeakIdentity(cls)), "CLASS", use)


def is_python_code(attribute: object) -> bool:
    """Say whether a class attribute is a Python function (and not one of builtins or C)."""
    if isinstance(attribute, classmethod | staticmethod):
        attribute = attribute.__func__
    return isinstance(attribute, types.FunctionType)


def is_data_descriptor(attribute: object) -> bool:
    """Say whether a class attribute is a data descriptor."""
    return any(lookup(type(attribute), name) for name in ("__set__", "__delete__"))


def is_slot(cls: type, name: str) -> bool:
    """Say whether instances store an attribute outside of their `__dict__`, in a slot."""
    mro_entry = lookup(cls, name)
    return mro_entry is not None and isinstance(mro_entry[1], SLOTS)


SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def is_hidden(cls: type, name: str) -> bool:
    """Say whether a data descriptor hides an entry of the instance's `__dict__`."""
    mro_entry = lookup(cls, name)
    return (
        mro_entry is not None
        and is_data_descriptor(mro_entry[1])
        and not isinstance(mro_entry[1], SLOTS)
    )


def is_user_code(mro_entry: MroEntry) -> bool:
    """Say whether a class attribute is Python code of the program."""
    return is_python_code(mro_entry[1]) and not is_immutable_module(mro_entry[0].__module__)


def is_fixed(cls: type) -> bool:
    """Say whether a class is never changed: one of a library, or created during capture."""
    return is_immutable_module(cls.__module__) or cls in FRAME_CLASSES


def class_source(tx: Tracer, owner: Value, cls: type, definer: type, name: str) -> Source:
    """Return the source of a class attribute; a constant for a fixed class."""
    if is_fixed(definer):
        return ConstSource(definer.__dict__[name])
    base = TypeSource(owner.source) if owner.source is not None else ConstSource(cls)
    return AttrSource(base, name)


# ---- binding what a class holds


def _bind_property(tx: Tracer, mro_entry: MroEntry, name: str, owner: Value, cls: type) -> Value:
    if mro_entry[1].fget is None:
        raise Break("builtin-error", f"the property {name} without a getter")
    return tx.const_object(mro_entry[1].fget).tp_call(tx, [owner], {})


def _bind_cached_property(
    tx: Tracer, mro_entry: MroEntry, name: str, owner: Value, cls: type
) -> Value:
    value = tx.const_object(mro_entry[1].func).tp_call(tx, [owner], {})
    cached: Any = owner
    if not hasattr(owner, "store"):
        raise Break("c-attribute", f"the cached property {name} of {owner.describe()}")
    # A class that is made while capturing has not named it yet; `__setattr__` is not called.
    cached.store(tx, mro_entry[1].attrname or name, value)
    return value


def _bind_field(tx: Tracer, mro_entry: MroEntry, name: str, owner: Value, cls: type) -> Value:
    _, (index, _) = mro_entry[1].__reduce__()
    base = getattr(owner, "base", None)  # a named tuple with operators has one
    if base is None:
        raise Break("c-attribute", f"descriptor {name} of {cls.__name__}")
    return cast("Value", base.mp_subscript(tx, constant(index)))


def _bind_classmethod(tx: Tracer, mro_entry: MroEntry, name: str, owner: Value, cls: type) -> Value:
    function = mro_entry[1].__func__
    if hasattr(type(function), "__get__") and type(function) not in _FUNCTIONS:
        # Up to 3.12 a classmethod calls the `__get__` of the object that it wraps.
        raise Break("c-attribute", f"a classmethod over a {type(function).__name__}")
    return BoundMethod(tx.const_object(function), tx.const_object(cls))


_FUNCTIONS = (types.FunctionType, functools._lru_cache_wrapper)


# Computed in C, and as good as stored: the same until somebody sets it.
_STORED = frozenset([vars(torch._C._FunctionBase)["needs_input_grad"], *TYPE_VARIABLE_FIELDS])


def _bind_slot(tx: Tracer, mro_entry: MroEntry, name: str, owner: Value, cls: type) -> Value:
    member = owner.tp_member(tx, mro_entry[0], name)
    if member is not None:
        return member
    if name == "__dict__":
        return tx.instance_dict(owner)
    if name == "__class__":
        return tx.const_object(cls)
    obj = getattr(owner, "obj", None)
    overlay = getattr(owner, "attrs", {})
    if name in overlay:
        value: Value = overlay[name]
        if value.source is None and type(value) is Value:  # deleted
            tx.raise_(AttributeError, f"'{type_name(cls)}' object has no attribute '{name}'")
        return value
    stored = isinstance(mro_entry[1], types.MemberDescriptorType) or mro_entry[1] in _STORED
    if obj is None or not stored:
        base = getattr(owner, "base", None)
        if base is not None:
            read: Value = base.tp_getattro(tx, name)
            return read
        if isinstance(mro_entry[1], types.MemberDescriptorType):
            tx.raise_(AttributeError, f"'{type_name(cls)}' object has no attribute '{name}'")
        raise Break("c-attribute", f"attribute {name} of {owner.describe()}")
    try:
        real = mro_entry[1].__get__(obj)
    except AttributeError as error:
        if owner.source is not None and isinstance(mro_entry[1], types.MemberDescriptorType):
            unset = CallSource(_is_unset, (owner.source, ConstSource(name)))
            tx.guard(unset, "CONST", True)
        tx.raise_(AttributeError, *error.args)
    source = read_past(owner.source, obj, name) if owner.source else ConstSource(real)
    return tx.wrap(real, source)


def _is_unset(obj: object, name: str) -> bool:
    """Say whether a slot of an object, whose class is guarded, is empty."""
    try:
        object.__getattribute__(obj, name)
    except AttributeError:
        return True
    return False


def _bind_c_method(tx: Tracer, mro_entry: MroEntry, name: str, owner: Value, cls: type) -> Value:
    defining_class = getattr(mro_entry[1], "__objclass__", object)
    if not issubclass(cls, defining_class):
        text = f"requires a '{defining_class.__name__}' object but received a '{cls.__name__}'"
        tx.raise_(TypeError, f"descriptor '{name}' {text}")
    return MethodOf(owner, name)


C_DESCRIPTORS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
C_METHODS = (*C_DESCRIPTORS, types.BuiltinFunctionType)
FIELD = type(vars(collections.namedtuple("_", "a"))["a"])
"""What reads a field of a named tuple."""
_BINDERS: dict[type, Callable[[Any, MroEntry, str, Value, type], Value]] = {
    **dict.fromkeys(
        _FUNCTIONS,
        lambda tx, mro_entry, name, owner, cls: BoundMethod(tx.const_object(mro_entry[1]), owner),
    ),
    property: _bind_property,
    FIELD: _bind_field,
    functools.cached_property: _bind_cached_property,
    classmethod: _bind_classmethod,
    staticmethod: lambda tx, mro_entry, name, owner, cls: tx.const_object(mro_entry[1].__func__),
    **dict.fromkeys(C_DESCRIPTORS, _bind_c_method),
    types.MemberDescriptorType: _bind_slot,
    types.GetSetDescriptorType: _bind_slot,
}


def bind(tx: Tracer, mro_entry: MroEntry, name: str, owner: Value, cls: type) -> Value:
    """Bind a class attribute to an instance, as `__get__` does."""
    definer, attribute = mro_entry
    binder = _BINDERS.get(type(attribute))
    if binder is not None:
        return binder(tx, mro_entry, name, owner, cls)
    getter = lookup(type(attribute), "__get__")
    if getter is not None and not isinstance(attribute, type):
        if not is_python_code(getter[1]):
            binder = _BINDERS.get(getter[0])  # the binder of its base, such as property
            if binder is None:
                raise Break("c-attribute", f"descriptor {name} of {cls.__name__}")
            return binder(tx, mro_entry, name, owner, cls)
        descriptor = tx.const_object(attribute)
        method = BoundMethod(tx.const_object(getter[1]), descriptor)
        instance = NONE if getattr(owner, "obj", None) is cls else owner
        return method.tp_call(tx, [instance, tx.const_object(cls)], {})
    return tx.wrap(attribute, class_source(tx, owner, cls, definer, name))


# ---- instances


def plain_attribute(tx: Tracer, self: InstanceValue, name: str) -> Value:
    """Do what `object.__getattribute__` and then `__getattr__` do."""
    fallback = lookup(self.cls, "__getattr__")
    value = None
    try:
        value = _own_or_inherited(tx, self, name)
    except Raised as raised:
        if fallback is None or not issubclass(raised.value.python_type(), AttributeError):
            raise
    if value is not None:
        return value
    if fallback is not None:
        return tx.const_object(fallback[1]).tp_call(tx, [self, constant(name)], {})
    tx.raise_(AttributeError, f"'{type_name(self.cls)}' object has no attribute '{name}'")


def _own_or_inherited(tx: Tracer, self: InstanceValue, name: str) -> Value | None:
    cls = self.cls
    changed = written(tx, cls, name)
    if changed is not None:
        return self.own_attribute(tx, name) or changed
    mro_entry = lookup(cls, name)
    if (
        mro_entry is not None
        and is_data_descriptor(mro_entry[1])
        and hasattr(mro_entry[1], "__get__")
    ):
        return bind(tx, mro_entry, name, self, cls)
    value = self.own_attribute(tx, name)
    if value is not None:
        return value
    if mro_entry is not None:
        if self.find_method(name) is not None:
            return MethodOf(self, name)
        return bind(tx, mro_entry, name, self, cls)
    return None


def dict_of(obj: object) -> dict[str, Any]:
    """Return the dict of an instance, bypassing any `__getattribute__`, or an empty dict."""
    try:
        return object.__getattribute__(obj, "__dict__") if frame.has_dict(obj) else _NO_DICT
    except AttributeError:
        return _NO_DICT


_NO_DICT: dict[str, Any] = {}


def read_past(source: Source, obj: object, name: str) -> Source:
    """Return a source that reads an instance's dict or slot without running code of its class."""
    mro_entry = find_in_class(type(obj), "__getattribute__")
    if mro_entry is not None and is_python_code(mro_entry[1]):
        return CallSource(object.__getattribute__, (source, ConstSource(name)))
    return DictSource(source) if name == "__dict__" else AttrSource(source, name)


def real_instance_attribute(tx: Tracer, self: InstanceValue, name: str) -> Value | None:
    """Read the dict of an instance from outside, guarding absence."""
    instance_dict = dict_of(self.obj)
    if instance_dict is _NO_DICT and frame.has_dict(self.obj):  # a type parameter (3.12) hides it
        mro_entry = find_in_class(self.cls, name)
        plain = mro_entry is None or not hasattr(type(mro_entry[1]), "__get__")
        if plain and getattr(self.obj, name, _NO_DICT) is not (mro_entry or (None, _NO_DICT))[1]:
            raise Break("c-attribute", f"{name} of {self.describe()}, which hides its __dict__")
    tx.check_namespace(instance_dict)
    if name in instance_dict:
        real = instance_dict[name]
        if self.source is None:
            return tx.wrap(real, ConstSource(real))
        return tx.wrap(real, ItemSource(read_past(self.source, self.obj, "__dict__"), name))
    if self.source is not None and self.cls.__dictoffset__:
        tx.guard(self.source, "ATTR_ABSENT", name)
    return None


def module_member(tx: Tracer, self: InstanceValue, name: str) -> Value | None:
    """Read a parameter, buffer or submodule, guarding absence."""
    absent: list[Source] = []
    for group in _MEMBER_DICTS:
        members = self.obj.__dict__.get(group)
        changed = tx.values_by_id.get(id(members))
        if changed is not None and isinstance(changed[0], DictValue):
            entry = changed[0].entries.get(name)
            if entry is not None:
                return tx.force(entry[1])
            continue
        if members is not None and name in members:
            assert self.source is not None
            source = ItemSource(InstanceAttrSource(self.source, group), name)
            return tx.wrap(members[name], source)
        if members is not None and self.source is not None:
            absent.append(InstanceAttrSource(self.source, group))
    for members_source in absent:
        tx.guard(members_source, "KEY_ABSENT", name)
    return None


_MODULE_CALL, _CALL_IMPL = torch.nn.Module.__call__, torch.nn.Module._call_impl
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def global_hooks(tx: Tracer) -> bool:
    """Say whether hooks on all modules are set, and guard it."""
    holder = DictSource(ModuleSource("torch.nn.modules.module"))
    counts = {name: len(getattr(torch.nn.modules.module, name)) for name in _GLOBAL_HOOKS}
    for name, count in counts.items():
        tx.guard(ItemSource(holder, name), "LEN", count)
    return any(counts.values())


def _hooks_now(tx: Tracer, hooks: Any) -> Any:
    """Return a dict of hooks as the captured program left it."""
    tracked = tx.values_by_id.get(id(hooks))
    return tracked[0].entries if tracked and isinstance(tracked[0], DictValue) else hooks


def module_call(tx: Tracer, self: InstanceValue, args: list[Value], kwargs: Kwargs) -> Call:
    """Return the callee of a module's call: `forward` when it has no hooks, which is guarded."""
    cls = self.cls
    entry, inner = lookup(cls, "__call__"), lookup(cls, "_call_impl")
    by_torch = cls.__module__ == torch_compiler_shim.COMPILED_MODULE
    plain = entry is not None and entry[1] is _MODULE_CALL and inner and inner[1] is _CALL_IMPL
    if not plain and not by_torch:
        return self.special(tx, "__call__"), args, kwargs
    module_dict = self.obj.__dict__
    if global_hooks(tx) or any(_hooks_now(tx, module_dict.get(name)) for name in _HOOKS):
        return tx.const_object(_CALL_IMPL), [self, *args], kwargs
    assert self.source is not None
    for name in _HOOKS:
        tx.guard(InstanceAttrSource(self.source, name), "LEN", 0)
    return self.tp_getattro(tx, "forward"), args, kwargs


# ---- classes


def written(tx: Tracer, cls: type, name: str) -> Value | None:
    """Return the value that captured code stored in an input class or a base of it."""
    for base in cls.__mro__ if tx.effects.globals else ():
        value = tx.effects.global_value(base, name)
        if value is not None or name in base.__dict__:
            return value
    return None
