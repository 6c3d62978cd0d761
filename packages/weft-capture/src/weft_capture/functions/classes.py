"""Classes: attributes and instantiation."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from weft_core.tensor_subclass import is_wrapper_subclass
from weft_guards.sources import AttrSource, ConstSource

from weft_capture.breaks import Break
from weft_capture.functions import table
from weft_capture.functions.torch.interception import check_no_finalizer, has_handler, retyped
from weft_capture.model import attributes
from weft_capture.model.constant import (
    FRAME_CLASSES,
    NONE,
    constant,
    fold,
    real_call,
)
from weft_capture.model.containers import ListValue, SetValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.exceptions import ExceptionValue, class_by_number
from weft_capture.model.functions import BoundMethod, ObjectConstant, parametrised
from weft_capture.model.iterators import DequeValue
from weft_capture.model.objects import OBJECT_METHODS, UserObject
from weft_capture.model.protocol import Kwargs, MethodOf, Tracer, Value
from weft_capture.model.weakrefs import make_ref
from weft_capture.tensors.subclass import construct_wrapper

BUILTIN_BASES: dict[type, Callable[[Any, list[Value]], Value]] = {
    collections.OrderedDict: lambda tx, args: DictValue(cls=collections.OrderedDict),
    collections.defaultdict: lambda tx, args: DictValue(cls=collections.defaultdict),
    dict: lambda tx, args: DictValue(),
    list: lambda tx, args: ListValue([]),
    set: lambda tx, args: SetValue([]),
    collections.deque: lambda tx, args: DequeValue([]),
    weakref.ref: lambda tx, args: make_ref(tx, *args),
    **{
        scalar_class: lambda tx, args, scalar_class=scalar_class: tx.builtin(scalar_class, *args)  # type: ignore[misc]
        for scalar_class in (int, float, str, bytes, tuple, frozenset, complex)
    },
}
"""Builtin class -> (tx, arguments of `__new__`) -> the base value of an instance."""


def instantiate(tx: Tracer, cls: ClassValue, args: list[Value], kwargs: Kwargs) -> Value:
    """Call a class that has no rule.

    Raises:
        Break: when its instances cannot be created symbolically.
    """
    real_class = cls.obj
    meta_call = attributes.lookup(type(real_class), "__call__")
    if meta_call is not None and meta_call[1] is dict:  # typing.TypedDict
        return tx.call_builtin(dict, args, kwargs)
    if meta_call is not None and attributes.is_python_code(meta_call[1]):
        if issubclass(real_class, enum.Enum):
            return fold(tx, real_class, args, kwargs)
        return BoundMethod(tx.const_object(meta_call[1]), cls).tp_call(tx, args, kwargs)
    if meta_call is not None and not isinstance(meta_call[1], types.WrapperDescriptorType):
        raise Break("object-creation", f"{type(real_class).__qualname__}.__call__")
    return construct(tx, cls, args, kwargs)


def construct(tx: Tracer, cls: ClassValue, args: list[Value], kwargs: Kwargs) -> Value:
    """Do what `type.__call__` does: `__new__`, then `__init__`."""
    real_class = cls.obj
    if issubclass(real_class, BaseException):
        new = attributes.lookup(real_class, "__new__")
        numbered = issubclass(real_class, OSError) and len(args) > 1
        in_python = new is not None and isinstance(new[1], staticmethod) and not numbered
        if in_python or issubclass(real_class, BaseExceptionGroup):
            raise Break("object-creation", f"making a {real_class.__qualname__}")
        real_class = class_by_number(real_class, args) if numbered else real_class
        instance: Value = ExceptionValue(real_class, list(args))
    elif table.is_pure(real_class):
        plainly = functools.partial(fold, tx, real_class)
        return tx.overrides.evaluate(real_class, args, kwargs, plainly)
    elif is_wrapper_subclass(real_class):
        return construct_wrapper(tx, real_class, args, kwargs)
    else:
        instance = _new(tx, cls, args, kwargs)
        if not issubclass(instance.python_type(), real_class):
            return instance
    _initialise(tx, instance.python_type(), instance, args, kwargs)
    return instance


def _initialise(tx: Tracer, cls: type, instance: Value, args: list[Value], kwargs: Kwargs) -> None:
    init = attributes.lookup(cls, "__init__")
    if init is None or init[1] is object.__init__:
        new = attributes.lookup(cls, "__new__")
        if (args or kwargs) and new is not None and new[1] is object.__new__:
            raise Break("builtin-error", f"arguments of {cls.__qualname__}")
    elif attributes.is_python_code(init[1]):
        result = tx.const_object(init[1]).tp_call(tx, [instance, *args], kwargs)
        if result is not NONE:
            text = f"__init__() should return None, not '{result.python_type().__name__}'"
            tx.raise_(TypeError, text)
    elif isinstance(instance, ExceptionValue):
        instance.call_base_method(tx, cls, "__init__", args, kwargs)
    elif not isinstance(init[1], types.WrapperDescriptorType):
        raise Break("object-creation", f"{cls.__qualname__}.__init__")
    elif isinstance(instance, UserObject):
        tx.base_method(instance, init[0], "__init__").tp_call(tx, args, kwargs)


def _new(tx: Tracer, cls: ClassValue, args: list[Value], kwargs: Kwargs) -> Value:
    real_class = cls.obj
    made_by_torch = issubclass(real_class, torch.Tensor) and not has_handler(real_class)
    if made_by_torch or issubclass(real_class, torch.autograd.Function):
        raise Break("object-creation", f"making a {real_class.__qualname__}")
    if issubclass(real_class, torch.nn.Module) and attributes.global_hooks(tx):
        raise Break(
            "object-creation", f"making a {real_class.__qualname__} while all modules have hooks"
        )
    if real_class.__flags__ & 1 << 7:  # Py_TPFLAGS_DISALLOW_INSTANTIATION
        real_call(tx, real_class)  # raises
    new = attributes.lookup(real_class, "__new__")
    if new is not None and isinstance(new[1], staticmethod):
        return tx.const_object(new[1].__func__).tp_call(tx, [cls, *args], kwargs)
    init = attributes.lookup(real_class, "__init__")
    if kwargs and init is not None and not attributes.is_python_code(init[1]):
        if not issubclass(real_class, dict | torch.Size) and init[0] is not types.SimpleNamespace:
            raise Break("object-creation", f"keyword arguments of {real_class.__qualname__}")
    return new_object(tx, real_class, args)


def new_object(tx: Tracer, cls: type, args: list[Value]) -> Value:
    """Do what the builtin `__new__` of a class does."""
    for base, make in BUILTIN_BASES.items():
        if issubclass(cls, base):
            check_no_finalizer(cls)
            return UserObject(cls, base=make(tx, args))
    if has_handler(cls) and len(args) == 1 and issubclass(args[0].python_type(), torch.Tensor):
        return retyped(tx, cls, args[0])
    new = attributes.lookup(cls, "__new__")
    inits = (vars(base).get("__init__") for base in cls.__mro__[:-1])
    of_c = any(isinstance(init, types.WrapperDescriptorType) for init in inits)
    if of_c or (new is not None and new[0] is not object and new[0].__module__ != "typing"):
        raise Break("object-creation", f"making a {cls.__module__}.{cls.__qualname__}")
    return plain_object(tx, cls)


def plain_object(tx: Tracer, cls: type) -> Value:
    """Do what `object.__new__` does, which refuses abstract classes and C types."""
    check_no_finalizer(cls)
    real_call(tx, object.__new__, cls)
    return UserObject(cls)


_UNION_MEMBERS = (type, types.NoneType, types.GenericAlias, types.UnionType)


class ClassValue(ObjectConstant):
    """A class."""

    def describe(self) -> str:
        return f"class {self.obj.__qualname__}"

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        if table.find(self.obj) is not None:
            return table.call_rule(tx, self.obj, args, kwargs)
        return instantiate(tx, self, args, kwargs)

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        # An operator or builtin function looks a method up in the metaclass.
        special = self._of_metaclass(tx, name) if name.startswith("__") else None
        bound = special or self.tp_getattro(tx, name)
        if isinstance(bound, MethodOf):
            raise Break("c-function", f"{self.obj.__qualname__}.{name}")
        return bound.tp_call(tx, args, kwargs)

    def declines(self, name: str, argument: Value) -> bool:
        in_union = argument.is_constant() and isinstance(argument.as_constant(), _UNION_MEMBERS)
        return name in ("__or__", "__ror__") and not in_union  # CPython: _Py_union_type_or

    def nb_bool(self, tx: Tracer) -> bool:
        for name in ("__bool__", "__len__"):
            if attributes.lookup(type(self.obj), name) is not None:
                return self.call_method(tx, name, [], {}).nb_bool(tx)
        return True

    def tp_iter(self, tx: Tracer) -> Value:
        if attributes.lookup(type(self.obj), "__iter__") is None:
            tx.raise_(TypeError, f"'{type(self.obj).__name__}' object is not iterable")
        return self._from_metaclass(tx, "__iter__").tp_call(tx, [], {})

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        cls = self.obj
        if name == "__dict__":
            if tx.effects.touches(cls):
                raise Break("pending-mutation", "the __dict__ of a changed class")
            if attributes.is_fixed(cls):
                return tx.const_object(types.MappingProxyType(dict(cls.__dict__)))
            return tx.wrap(cls.__dict__, AttrSource(self.source or ConstSource(cls), name))
        if name in _OF_TYPE:
            value = getattr(cls, name)
            if name in ("__mro__", "__bases__") and not attributes.is_fixed(cls):
                tx.guard_constant(AttrSource(self.source or ConstSource(cls), name), value)
            return tx.literal(value)
        if (written := attributes.written(tx, cls, name)) is not None:
            return written
        mro_entry = attributes.lookup(cls, name)
        above = attributes.lookup(type(cls), name)
        if mro_entry is None or (above is not None and _is_active(above[1])):
            return self._from_metaclass(tx, name)
        definer, attribute = mro_entry
        getter = attributes.lookup(type(attribute), "__get__")
        active = getter is not None and attributes.is_user_code(getter)
        if active or isinstance(attribute, staticmethod | classmethod):
            return attributes.bind(tx, mro_entry, name, self, cls)
        if isinstance(attribute, types.FunctionType | property | functools.cached_property):
            return tx.const_object(attribute)
        return self._read(tx, name, definer)

    def _from_metaclass(self, tx: Tracer, name: str) -> Value:
        metaclass = type(self.obj)
        if (written := attributes.written(tx, metaclass, name)) is not None:
            return written
        mro_entry = attributes.lookup(metaclass, name)
        if mro_entry is not None and _is_active(mro_entry[1]):
            return attributes.bind(tx, mro_entry, name, self, metaclass)
        if mro_entry is None:
            fallback = attributes.lookup(metaclass, "__getattr__")
            if fallback is not None and attributes.is_user_code(fallback):
                return tx.const_object(fallback[1]).tp_call(tx, [self, constant(name)], {})
            if hasattr(self.obj, name):
                return tx.const_object(getattr(self.obj, name))
            tx.raise_(
                AttributeError, f"type object {self.obj.__name__!r} has no attribute '{name}'"
            )
        if attributes.is_python_code(mro_entry[1]):
            return BoundMethod(tx.const_object(mro_entry[1]), self)
        return self._read(tx, name, mro_entry[0])

    def _read(self, tx: Tracer, name: str, definer: type) -> Value:
        """Return the value of an attribute; C methods of a class of this frame stay unbound."""
        real = real_call(tx, getattr, self.obj, name)
        if not attributes.is_fixed(definer) and not callable(real):
            return tx.wrap(real, AttrSource(self.source or ConstSource(self.obj), name))
        bound = self.obj in FRAME_CLASSES and isinstance(real, types.BuiltinFunctionType)
        known = (real, getattr(type, name, None), vars(definer).get(name))
        if bound and not any(map(table.find, known)):
            return MethodOf(self, name)
        return tx.const_object(real)

    def call_base_method(
        self, tx: Tracer, base_class: type, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        if name == "__new__" and base_class is not object:
            return new_object(tx, args[0].as_constant(), args[1:])
        if name == "__call__":
            return construct(tx, self, args, kwargs)
        if base_class is type and name in ("__setattr__", "__delattr__"):
            getattr(self, f"plain_{name.strip('_')}")(tx, args[0].as_constant(), *args[1:])
            return NONE
        if name == "__new__":
            return tx.call_builtin(object.__new__, args, kwargs)
        if name in OBJECT_METHODS:
            return OBJECT_METHODS[name](tx, self, *args, **kwargs)
        raise Break("c-function", f"{base_class.__name__}.{name}")

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        self._change_by(tx, "setattr", name, value)

    def tp_delattro(self, tx: Tracer, name: str) -> None:
        self._change_by(tx, "delattr", name)

    def _change_by(self, tx: Tracer, operation: str, name: str, *value: Value) -> None:
        """Set or delete an attribute as the metaclass does."""
        special = self._of_metaclass(tx, f"__{operation}__")
        if special is not None:
            special.tp_call(tx, [constant(name), *value], {})
        elif getattr(type(self.obj), f"__{operation}__") is getattr(type, f"__{operation}__"):
            getattr(self, f"plain_{operation}")(tx, name, *value)
        else:
            raise Break("c-attribute", f"{operation} of {self.describe()}")

    def _of_metaclass(self, tx: Tracer, name: str) -> Value | None:
        """Return a method that the metaclass defines in Python."""
        mro_entry = attributes.lookup(type(self.obj), name)
        in_python = mro_entry is not None and attributes.is_python_code(mro_entry[1])
        return BoundMethod(tx.const_object(mro_entry[1]), self) if mro_entry and in_python else None

    plain_delattr = Value.tp_delattro

    def plain_setattr(self, tx: Tracer, name: str, value: Value) -> None:
        """Do what `type.__setattr__` does."""
        # A class that existed before the frame: only data.
        cls = self.obj
        mro_entry = attributes.lookup(cls, name)
        plain = not (hasattr(type(cls), name) or name.startswith("__"))
        plain = plain and not attributes.is_immutable_module(cls.__module__)
        active = mro_entry is not None and hasattr(type(mro_entry[1]), "__get__")
        if not plain or active or hasattr(value.python_type(), "__get__"):
            super().tp_setattro(tx, name, value)
        tx.effects.store_global(cls, name, value)

    def mp_subscript(self, tx: Tracer, key: Value) -> Value:
        # The metaclass's `__getitem__`, else `__class_getitem__`.
        mro_entry = attributes.lookup(type(self.obj), "__getitem__")
        if mro_entry is not None and attributes.is_user_code(mro_entry):
            return BoundMethod(tx.const_object(mro_entry[1]), self).tp_call(tx, [key], {})
        class_getitem = attributes.lookup(self.obj, "__class_getitem__")
        if class_getitem is not None and attributes.is_user_code(class_getitem):
            function = getattr(class_getitem[1], "__func__", class_getitem[1])
            return tx.const_object(function).tp_call(tx, [self, key], {})
        return parametrised(tx, self, key)


def _is_active(attribute: object) -> bool:
    """Say whether this is a property, or another data descriptor of the program that is read."""
    if isinstance(attribute, property):
        return True
    custom = not attributes.is_immutable_module(type(attribute).__module__)
    return custom and hasattr(attribute, "__get__") and attributes.is_data_descriptor(attribute)


_OF_TYPE = ("__name__", "__qualname__", "__module__", "__mro__", "__bases__", "__class__")
