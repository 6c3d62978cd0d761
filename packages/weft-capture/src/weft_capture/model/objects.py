"""Instances of Python classes, from outside or made by the program, and nn.Modules.

Attribute reads follow `object.__getattribute__` (see `attributes`); writes go to `attrs`, an
overlay over the real instance dict, and are replayed after the graph. An instance of a subclass
of dict, list, tuple and the like keeps the builtin part in `base`.
"""

from __future__ import annotations

import enum
import functools
import io
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from weft_guards.sources import Source, is_literal

from weft_capture import polyfills
from weft_capture.breaks import Break, NotConstant
from weft_capture.library_traits import COUNTED_HASHES
from weft_capture.model import attributes
from weft_capture.model.constant import class_value, constant
from weft_capture.model.containers import ListValue, SetValue
from weft_capture.model.dicts import DictValue, DictView
from weft_capture.model.iterators import items_of, next_by_call
from weft_capture.model.protocol import (
    Call,
    InstanceValue,
    Kwargs,
    MethodOf,
    MutableValue,
    Output,
    Tracer,
    Value,
    current_tracer,
    identity_key,
)
from weft_capture.model.region_marks import mark_call
from weft_capture.model.thread_locals import own_of_thread
from weft_capture.model.weakrefs import WeakRefValue
from weft_capture.python_compat import error_text, type_name

DELETED = Value()
"""Marks an attribute that the program deleted."""


OBJECT_METHODS: dict[str, Callable[..., Value]] = {}
"""Name of a method of `object` -> what it does; rules add theirs."""


class ObjectKey:
    """An object with a `__hash__` in Python as a dict key or set element."""

    def __init__(self, value: UserObject) -> None:
        self.value = value
        self.number: int | None = None  # its first hash
        self.step = current_tracer().steps.now

    def __hash__(self) -> int:
        tx = current_tracer()
        with tx.journal.unchanged("a __hash__ with effects"):
            number: int = tx.builtin(hash, self.value).as_constant()
        self.number = number if self.number is None else self.number
        return number

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Value):
            return False
        tx = current_tracer()
        right = other.value if isinstance(other, ObjectKey) else tx.const_object(other)
        with tx.journal.unchanged("an __eq__ with effects"):
            return tx.is_equal(self.value, right)

    def is_repeatable(self) -> bool:
        """Say whether a new object, built of literals, hashes in the new code as it does here."""
        tx, value = current_tracer(), self.value
        code = getattr(value.cls.__hash__, "__code__", None)
        if value.obj is not None or (tx.effects and getattr(code, "co_filename", "") != "<string>"):
            return False
        for attribute in map(tx.force, value.attrs.values()):
            if attribute.python_type().__hash__ is None:
                return False
            key = attribute.tp_hash()
            nested = isinstance(key, ObjectKey) and key.is_repeatable()
            if not nested and not isinstance(key, enum.Enum) and not is_literal(key):
                return False
        return hash(self) == self.number


@dataclass(eq=False)
class UserObject(InstanceValue):
    """An instance of a Python class; `obj` is None for one made during capture."""

    cls: type
    obj: Any = None
    source: Source | None = None
    base: Value | None = None
    base_changed: bool = False
    attrs: dict[str, Value] = field(default_factory=dict)
    changing = ("attrs",)

    def describe(self) -> str:
        return f"{self.cls.__name__} object"

    def tp_hash(self) -> object:
        by_identity: Any = object.__hash__
        if self.cls.__hash__ is None:
            return super().tp_hash()
        if self.cls.__hash__ is by_identity or isinstance(self.obj, torch.nn.Module):
            identity_key(self)
            return self if self.obj is None else self.obj
        mro_entry = attributes.lookup(self.cls, "__hash__")
        generated = getattr(getattr(self.cls.__hash__, "__code__", None), "co_filename", "")
        if mro_entry is None or not attributes.is_python_code(mro_entry[1]):
            if mro_entry is None or not isinstance(mro_entry[1], types.WrapperDescriptorType):
                raise Break("dict-key", f"{self.describe()} as a dict key")
            if self.obj is None and self.base is not None:
                return self.base.tp_hash()
        elif generated != "<string>" and not attributes.is_immutable_module(
            mro_entry[0].__module__
        ):
            return ObjectKey(self)
        elif mro_entry[0].__module__ in COUNTED_HASHES:
            raise Break("dict-key", f"{self.describe()} as a dict key")
        return ObjectKey(self) if self.obj is None else self.obj

    def as_constant(self) -> Any:
        if self.base is not None and issubclass(self.cls, int | float | str | bytes | complex):
            return self.base.as_constant()
        return super().as_constant()

    def data(self, tx: Tracer) -> Any:
        if any(_overrides(base_class) for base_class in self.cls.__mro__):
            raise NotConstant(self.describe())
        return super().data(tx)

    def is_constant(self) -> bool:
        # Operators go by the methods of its class.
        return False

    def graph_arg(self) -> Any:
        asked = isinstance(self.base, ListValue) and any(map(self.has_special, _ASKED))
        return super().graph_arg() if self.base is None or asked else self.base.graph_arg()

    def example(self) -> Any:
        return self.base.example() if self.base is not None else super().example()

    # Attributes.

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        if self.has_special("__getattribute__"):
            return self.special(tx, "__getattribute__").tp_call(tx, [constant(name)], {})
        # A thread's own; the default device is set where a mode, which is guarded, has it as well.
        if issubclass(self.cls, threading.local) and self.obj is not torch._GLOBAL_DEVICE_CONTEXT:
            of_class = attributes.lookup(self.cls, name) is not None or self.attrs
            value = None if of_class else own_of_thread(tx, self.obj, self.source, name)
            if value is None:
                raise Break("c-attribute", f"{self.cls.__name__}.__getattribute__")
            return value
        return attributes.plain_attribute(tx, self, name)

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        if not self._call_override(tx, "__setattr__", constant(name), value):
            self.plain_setattr(tx, name, value)

    def tp_delattro(self, tx: Tracer, name: str) -> None:
        if not self._call_override(tx, "__delattr__", constant(name)):
            self.plain_delattr(tx, name)

    def _call_override(self, tx: Tracer, name: str, *args: Value) -> bool:
        """Call the class's override of a method of `object`, if it has one."""
        if self.has_special(name):
            self.special(tx, name).tp_call(tx, list(args), {})
            return True
        mro_entry = attributes.lookup(self.cls, name)
        if mro_entry is not None and mro_entry[1] not in (
            getattr(object, name),
            _GENERIC.get(name),
        ):
            # Such as `__setattr__ = dict.__setitem__`.
            if getattr(mro_entry[1], "__name__", name) == name:
                raise Break("special-method", f"{self.cls.__name__}.{name}")
            tx.const_object(mro_entry[1]).tp_call(tx, [self, *args], {})
            return True
        return False

    def plain_setattr(self, tx: Tracer, name: str, value: Value) -> None:
        """Do what `object.__setattr__` does."""
        mro_entry = attributes.lookup(self.cls, name)
        if mro_entry is not None and attributes.is_data_descriptor(mro_entry[1]):
            if not _is_slot(mro_entry[1]):
                self._set_by_descriptor(tx, mro_entry[1], name, value)
                return
        elif not self.cls.__dictoffset__:
            try:
                object.__setattr__(object.__new__(self.cls), name, None)
            except AttributeError as error:
                tx.raise_real(error)
            except TypeError:
                pass
        self.store(tx, name, value)

    def _set_by_descriptor(self, tx: Tracer, descriptor: Any, name: str, value: Value) -> None:
        if isinstance(descriptor, property):
            if descriptor.fset is None:
                raise Break("builtin-error", f"setting the property {name} without a setter")
            tx.const_object(descriptor.fset).tp_call(tx, [self, value], {})
            return
        refused = Break("c-attribute", f"setting {name} of {self.describe()}")
        if name == "__class__" and issubclass(value.python_type(), type) and self.obj is None:
            try:
                object.__new__(self.cls).__class__ = value.as_constant()
            except TypeError:
                raise refused from None
            tx.journal.on_rollback(functools.partial(setattr, self, "cls", self.cls))
            self.cls = value.as_constant()
            return
        setter = attributes.lookup(type(descriptor), "__set__")
        if setter is None or not attributes.is_python_code(setter[1]):
            raise refused
        tx.const_object(setter[1]).tp_call(tx, [tx.const_object(descriptor), self, value], {})

    def plain_delattr(self, tx: Tracer, name: str) -> None:
        """Do what `object.__delattr__` does."""
        mro_entry = attributes.lookup(self.cls, name)
        if mro_entry is not None and attributes.is_data_descriptor(mro_entry[1]):
            if isinstance(mro_entry[1], property) and mro_entry[1].fdel is not None:
                tx.const_object(mro_entry[1].fdel).tp_call(tx, [self], {})
                return
            if not _is_slot(mro_entry[1]):
                raise Break("c-attribute", f"deleting {name} of {self.describe()}")
            attributes.bind(tx, mro_entry, name, self, self.cls)  # raises for an unset slot
        elif self.own_attribute(tx, name) is None:
            text = f"'{type_name(self.cls)}' object has no attribute '{name}'"
            tx.raise_(AttributeError, text)
        self.store(tx, name, DELETED)

    def store(self, tx: Tracer, name: str, value: Value) -> None:
        """Write the instance dict, bypassing any `__setattr__`."""
        tx.mutate(self)
        tx.check_namespace(instance := attributes.dict_of(self.obj))
        tx.released_ids.add(id(instance.get(name)))
        self.attrs[name] = value

    def own_attribute(self, tx: Tracer, name: str) -> Value | None:
        """Read the instance dict."""
        written = self.attrs.get(name)
        if written is not None:
            return None if written is DELETED else tx.force(written)
        if self.obj is None:
            return None
        return attributes.real_instance_attribute(tx, self, name)

    def frozen(self, tx: Tracer) -> Any:
        parameters = getattr(self.cls, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen or self.base is not None:
            return None
        instance: Any = object.__new__(self.cls)
        for name in vars(self.cls)["__dataclass_fields__"]:
            object.__setattr__(instance, name, self.tp_getattro(tx, name).as_constant())
        return instance

    # Operations: Python-level special methods, else those of the builtin base.

    def declines(self, name: str, argument: Value) -> bool:
        base = self.base
        plain = base is not None and not base.in_graph and not self.has_special(name)
        return plain and base.declines(name, argument)  # type: ignore[union-attr]

    def forwards(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Call:
        return self.special(tx, "__call__"), args, kwargs

    def special(self, tx: Tracer, name: str) -> Value:
        """Look a special method up on the class, as the interpreter does."""
        mro_entry = attributes.lookup(self.cls, name)
        if mro_entry is None:
            if name not in _WITHOUT:
                raise Break("builtin-error", f"{self.cls.__name__} without {name}")
            tx.raise_(TypeError, error_text(_WITHOUT[name], self.cls))
        return attributes.bind(tx, mro_entry, name, self, self.cls)

    def has_special(self, name: str) -> bool:
        """Say whether the class defines a special method in Python.

        Raises:
            Break: when it is another descriptor.
        """
        mro_entry = attributes.lookup(self.cls, name)
        if mro_entry is None or isinstance(mro_entry[1], attributes.C_METHODS):
            return False
        if not attributes.is_python_code(mro_entry[1]):
            raise Break("special-method", f"{self.cls.__name__}.{name}")
        return True

    def call_method_fallback(
        self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        special = name.startswith("__") and name.endswith("__")
        bound = self.special(tx, name) if special else self.tp_getattro(tx, name)
        if isinstance(bound, MethodOf) and bound.owner is self:
            mro_entry = attributes.lookup(self.cls, name)
            if mro_entry is not None and mro_entry[0] is object and name in OBJECT_METHODS:
                return tx.apply(OBJECT_METHODS[name], [self, *args], kwargs)
            if self.base is None:
                raise Break("c-function", f"{self.cls.__name__}.{name}")
            return self.base_method(tx, name, args, kwargs)
        return bound.tp_call(tx, args, kwargs)

    def base_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        """Call a method of the builtin base; a change of the base is a change of this object."""
        assert self.base is not None
        if name in ("copy", "__copy__") and self.base.python_type().__module__ == "collections":
            raise Break("c-function", f"{self.cls.__name__}.{name}")
        ordered = name == "update" and self.base.python_type() is OrderedDict
        if ordered and self.has_special("__setitem__"):
            return tx.const_object(polyfills.update_items).tp_call(tx, [self, *args], kwargs)
        result = self.base.call_method(tx, name, args, kwargs)
        formats = issubclass(self.cls, str) and name in ("__mod__", "format")  # nothing, perhaps
        if result is self.base and (formats or name in _INPLACE):
            result = self
        if isinstance(result, DictView):
            result.holder = self
        self._note_change(tx)
        return result

    def _note_change(self, tx: Tracer) -> None:
        if isinstance(self.base, MutableValue) and self.base.epoch == tx.journal.epoch:
            tx.mutate(self)
            self.base_changed = True

    def call_base_method(
        self, tx: Tracer, base_class: type, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        return tx.base_method(self, base_class, name).tp_call(tx, args, kwargs)

    def mp_subscript(self, tx: Tracer, key: Value) -> Value:
        if self.has_special("__getitem__") or self.base is None:
            return self.special(tx, "__getitem__").tp_call(tx, [key], {})
        return self.base_item(tx, key)

    def base_item(self, tx: Tracer, key: Value) -> Value:
        """Do what the builtin base's `__getitem__` does."""
        assert self.base is not None
        if isinstance(self.base, DictValue) and self.has_special("__missing__"):
            item = self.base.get(tx, key)
            return self.special(tx, "__missing__").tp_call(tx, [key], {}) if item is None else item
        item = self.base.mp_subscript(tx, key)
        self._note_change(tx)  # a defaultdict makes what it lacks
        return item

    def mp_ass_subscript(self, tx: Tracer, key: Value, value: Value) -> None:
        self.special(tx, "__setitem__").tp_call(tx, [key, value], {})

    def mp_del_subscript(self, tx: Tracer, key: Value) -> None:
        self.special(tx, "__delitem__").tp_call(tx, [key], {})

    def nb_bool(self, tx: Tracer) -> bool:
        if self.has_special("__bool__"):
            result = self.special(tx, "__bool__").tp_call(tx, [], {})
            if result.python_type() is not bool:
                raise Break("builtin-error", f"__bool__ that returns {result.describe()}")
            return result.nb_bool(tx)
        if not hasattr(self.cls, "__bool__") and self.has_special("__len__"):
            return tx.builtin(len, self).nb_bool(tx)
        return self.base.nb_bool(tx) if self.base is not None else super().nb_bool(tx)

    def tp_iter(self, tx: Tracer) -> Value:
        if self.base is not None and not self.has_special("__iter__"):
            return self.base.tp_iter(tx)
        mro_entry = attributes.lookup(self.cls, "__iter__")
        if mro_entry is None and self.has_special("__getitem__"):
            return items_of(tx, self)
        if mro_entry is None or mro_entry[1] is None:
            tx.raise_(TypeError, f"'{type_name(self.cls)}' object is not iterable")
        return self.checked_iterator(tx, self.special(tx, "__iter__").tp_call(tx, [], {}))

    def tp_iternext(self, tx: Tracer) -> Value | None:
        step = self.special(tx, "__next__")
        return next_by_call(tx, self, functools.partial(step.tp_call, tx, [], {}))

    def unpack(self, tx: Tracer) -> list[Value]:
        if self.base is not None and not self.has_special("__iter__"):
            return self.base.unpack(tx)
        return super().unpack(tx)

    def tp_traverse(self) -> Iterable[Value]:
        return (*self.attrs.values(), *([] if self.base is None else [self.base]))

    # Generated code.

    def reconstruct(self, out: Output) -> None:
        base = self.base
        fixed = isinstance(base, SetValue) and base.cls is frozenset
        fills = isinstance(base, MutableValue) and not fixed
        arguments = [] if base is None or fills else [base]
        if isinstance(base, WeakRefValue):
            base.check(base.tx)
            arguments = [base.target, base.callback]
        out.call(new_instance, [class_value(self.cls), *arguments])
        out.remember(self)
        if base is not None and fills:
            out.do(fill_instance, self, base)
        live = {name: value for name, value in self.attrs.items() if value is not DELETED}
        out.fill_attributes(self, live)

    def replay(self, out: Output) -> None:
        if self.base_changed and isinstance(self.base, MutableValue):
            out.later(fill_instance, self, self.base)
        out.replay_attributes(self, self.attrs, object.__setattr__, object.__delattr__)


_WITHOUT: dict[str, Callable[[Any], object]] = {
    "__call__": lambda obj: obj(),
    "__getitem__": lambda obj: obj[0],
}
"""Special method -> the operation whose error names the class of an object without it."""

_INPLACE = tuple(f"__i{name}__" for name in ("add", "and", "mul", "or", "sub", "xor"))


def _overrides(cls: type) -> bool:
    """Say whether a class defines special methods in Python, other than for construction."""
    return any(
        attributes.is_python_code(item) and name.startswith("__") and name not in _MAKING
        for name, item in cls.__dict__.items()
    )


_ASKED = ("__len__", "__getitem__", "__iter__", "__index__")  # by torch, of a sequence
_MAKING = ("__new__", "__init__", "__init_subclass__", "__class_getitem__")


def new_instance(cls: type, *base: object) -> Any:
    """Create an instance without running its class's `__init__` or Python `__new__`."""
    if issubclass(cls, torch.Tensor):
        return as_kind(base[0], cls)
    makers = (base_class.__dict__.get("__new__") for base_class in cls.__mro__)
    make: Any = next(maker for maker in makers if isinstance(maker, types.BuiltinFunctionType))
    return make(cls, *base)


def as_kind(tensor: Any, cls: type = torch.Tensor) -> Any:
    """Return a tensor of a class that shares memory and `grad_fn` with another."""
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        return tensor.as_subclass(cls)


def fill_instance(obj: Any, base: Any) -> None:
    """Fill an instance of a subclass of a builtin container."""
    builtin = type(base)
    if isinstance(base, dict):
        builtin.clear(obj)
        for key, value in base.items():
            builtin.__setitem__(obj, key, value)
    else:
        builtin.__init__(obj, base, *([base.maxlen] if builtin is deque else []))


def _is_slot(descriptor: object) -> bool:
    """Say whether this is a slot of a class in Python; members of C classes may convert values."""
    slot = isinstance(descriptor, types.MemberDescriptorType)
    return slot and "__slots__" in vars(descriptor.__objclass__)  # type: ignore[attr-defined]


_GENERIC = vars(types.SimpleNamespace)  # its methods equal those of `object`


class ModuleValue(UserObject):
    """An nn.Module from outside: parameters, buffers and submodules are read where they live."""

    def forwards(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Call:
        return attributes.module_call(tx, self, args, kwargs)

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        with mark_call(tx, self.cls.__qualname__):
            return super().tp_call(tx, args, kwargs)


class StreamValue(UserObject):
    """A text stream of the standard library, such as `sys.stdout` (`language.messages`)."""


def is_plain_stream(obj: object) -> bool:
    """Say whether a write to this text stream runs no code of the program."""
    if not issubclass(type(obj), io.TextIOBase) or "write" in getattr(obj, "__dict__", ()):
        return False
    names = ("write", "flush", "__getattribute__")
    definers = [next(k for k in type(obj).__mro__ if name in k.__dict__) for name in names]
    return all(definer.__module__ in ("_io", "builtins") for definer in definers)
