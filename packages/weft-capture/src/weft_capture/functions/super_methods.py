"""`super()`, and methods of builtin classes on instances of their subclasses."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft_capture.breaks import Break
from weft_capture.functions import table
from weft_capture.functions.classes import BUILTIN_BASES, ClassValue, new_object, plain_object
from weft_capture.model import attributes
from weft_capture.model.constant import (
    NONE,
    TRUE,
    class_value,
    constant,
    real_call,
)
from weft_capture.model.containers import ListValue, SetValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.exceptions import ExceptionValue
from weft_capture.model.objects import OBJECT_METHODS, ModuleValue, UserObject
from weft_capture.model.protocol import Kwargs, MethodOf, MutableValue, Output, Tracer, Value
from weft_capture.model.weakrefs import WeakRefValue


class SuperValue(Value):
    """`super(start, owner)`."""

    cls = super

    def __init__(self, start: type, owner: Value) -> None:
        self.start = start
        self.owner = owner
        bound = isinstance(owner, ClassValue) and issubclass(owner.obj, start)
        self.through: type = owner.obj if bound else owner.python_type()  # type: ignore[attr-defined]
        if not issubclass(self.through, start):
            raise Break("builtin-error", f"super({start.__name__}, ...) of {owner.describe()}")

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        if name == "__class__":
            return class_value(super)
        owner, cls = self.owner, self.through
        of_class = isinstance(owner, ClassValue) and owner.obj is cls
        for base_class in cls.__mro__[cls.__mro__.index(self.start) + 1 :]:
            written = tx.effects.global_value(base_class, name)
            if written is not None:
                return written
            if attributes.lookup(base_class, name) is None or name not in base_class.__dict__:
                continue
            attribute = base_class.__dict__[name]
            unbound = of_class and isinstance(attribute, types.FunctionType | property)
            if unbound or attribute is torch._C._disabled_torch_function_impl:
                return tx.const_object(attribute)
            if isinstance(attribute, attributes.C_METHODS):
                return BaseMethod(owner, base_class, name)
            return attributes.bind(tx, (base_class, attribute), name, owner, cls)
        if isinstance(owner, ModuleValue):  # its members are outside of its dict
            member = attributes.module_member(tx, owner, name)
            if member is not None:
                return member
        tx.raise_(AttributeError, f"'super' object has no attribute '{name}'")

    def reconstruct(self, out: Output) -> None:
        out.call(super, [class_value(self.start), self.owner])


@dataclass(eq=False)
class BaseMethod(Value):
    """A method of a builtin class bound to an instance of a subclass: `super().__init__`."""

    cls = types.BuiltinMethodType

    owner: Value
    base_class: type
    name: str

    def python_type(self) -> type:
        return MethodOf.bound.get(type(vars(self.base_class)[self.name]), self.cls)

    def describe(self) -> str:
        return f"{self.base_class.__name__}.{self.name}"

    def reconstruct(self, out: Output) -> None:
        member = vars(self.base_class)[self.name]
        if isinstance(member, types.BuiltinFunctionType):  # `__new__`, which is bound to no one
            constant(member).reconstruct(out)
        else:
            out.call(type(member).__get__, [constant(member), self.owner])

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        owner = self.owner
        if isinstance(owner, ExceptionValue | ClassValue):
            return owner.call_base_method(tx, self.base_class, self.name, args, kwargs)
        generic = self.base_class is object or self.name in _GENERIC
        if isinstance(owner, UserObject) and owner.base is not None and not generic:
            if self.name == "__init__":
                return _fill_base(tx, owner, args, kwargs)
            if self.name == "__getitem__":
                return owner.base_item(tx, args[0])
            base, of_dict = owner.base, self.base_class is dict
            names_class = self.name == "__repr__" and isinstance(base, SetValue)
            other = of_dict and isinstance(base, DictValue) and base.cls is not dict
            if names_class or other:
                raise Break("c-function", f"{self.describe()} of {owner.describe()}")
            return owner.base_method(tx, self.name, args, kwargs)
        row = OBJECT_METHODS.get(self.name)
        if row is not None:
            return tx.apply(row, [owner, *args], kwargs)
        raise Break("c-function", self.describe())


_GENERIC = ("__getattribute__", "__setattr__", "__delattr__")
"""Methods of builtin classes that equal those of `object`."""


def _fill_base(tx: Tracer, owner: UserObject, args: list[Value], kwargs: Kwargs) -> Value:
    if isinstance(owner.base, WeakRefValue):  # `__new__` did it
        return NONE
    if isinstance(owner.base, DictValue) and owner.base.cls is collections.defaultdict:
        raise Break("c-function", f"defaultdict.__init__ of {owner.describe()}")
    name = "extend" if isinstance(owner.base, ListValue) else "update"
    if (kwargs or len(args) > 1) and not isinstance(owner.base, DictValue):
        raise Break("unsupported-arguments", f"keyword arguments of {owner.cls.__qualname__}")
    if not isinstance(owner.base, MutableValue) or (not args and not kwargs):
        return NONE
    return owner.base_method(tx, name, args, kwargs)


def _plainly(name: str) -> Callable[..., Value]:
    """Return the handler of `object.__setattr__` or `object.__delattr__`."""

    def run(tx: Tracer, owner: Value, attribute: Value, *value: Value) -> Value:
        if isinstance(owner, ClassValue) or len(value) != (name == "setattr"):
            raise Break("c-attribute", f"object.__{name}__ of {owner.describe()}")
        plain = f"plain_{name}" if isinstance(owner, UserObject) else f"tp_{name}o"
        getattr(owner, plain)(tx, attribute.as_constant(), *value)
        return NONE

    return table.rule(getattr(object, f"__{name}__"))(run)


_object_setattr, _object_delattr = _plainly("setattr"), _plainly("delattr")


@table.rule(object.__getattribute__)
def _object_getattribute(tx: Tracer, owner: Value, name: Value) -> Value:
    if not isinstance(owner, UserObject):
        return owner.tp_getattro(tx, name.as_constant())
    return attributes.plain_attribute(tx, owner, name.as_constant())


@table.rule(object.__init__)
def _object_init(tx: Tracer, owner: Value, *args: Value, **kwargs: Value) -> Value:
    cls = owner.python_type()
    init, new = (attributes.lookup(cls, name) for name in ("__init__", "__new__"))
    custom_init = init is not None and init[1] is not object.__init__
    if (args or kwargs) and (custom_init or (new is not None and new[1] is object.__new__)):
        raise Break("builtin-error", f"arguments of object.__init__ for a {cls.__qualname__}")
    return NONE


OBJECT_METHODS |= {
    "__setattr__": _object_setattr,
    "__getattribute__": _object_getattribute,
    "__delattr__": _object_delattr,
    "__eq__": lambda tx, owner, other: TRUE if owner is other else constant(NotImplemented),
    "__init__": _object_init,
    "__init_subclass__": lambda tx, owner, *args, **kwargs: NONE,
}


@table.rule(object.__new__)
def _object_new(tx: Tracer, cls: Value, *args: Value, **kwargs: Value) -> Value:
    if args or kwargs:
        raise Break("builtin-error", "arguments of object.__new__")
    return plain_object(tx, cls.as_constant())


def _base_new(base: type) -> None:
    @table.rule(base.__new__)
    def new(tx: Tracer, cls: Value, *args: Value) -> Value:
        real_class = cls.as_constant()
        if not issubclass(real_class, base):
            name, other = base.__name__, real_class.__name__
            tx.raise_(TypeError, f"{name}.__new__({other}): {other} is not a subtype of {name}")
        in_c = not real_class.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
        if in_c and real_class is not base:
            real_call(tx, base.__new__, real_class)  # may raise
        if real_class is not base:
            return new_object(tx, real_class, list(args))
        return BUILTIN_BASES[base](tx, list(args))


for _base in BUILTIN_BASES.keys() - {tuple, collections.OrderedDict, collections.defaultdict}:
    _base_new(_base)
