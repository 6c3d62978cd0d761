"""Making instances during capture, builtin base-class methods, and what must not be inlined."""

from __future__ import annotations

import collections
import enum
import inspect
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from weft_guards.sources import DictSource

from weft_capture import attribute_writes, attributes, current
from weft_capture.breaks import Break
from weft_capture.rules import table
from weft_capture.values.base import Kwargs, MutableValue, Value, method
from weft_capture.values.constant import NONE, TRUE, constant, fold
from weft_capture.values.containers import ListValue, NamedTupleValue, SetValue, TupleValue
from weft_capture.values.deques import DequeValue
from weft_capture.values.dicts import DictValue
from weft_capture.values.exceptions import ExceptionValue
from weft_capture.values.functions import (
    FUNCTION_FIELDS,
    BoundMethod,
    ClassValue,
    FunctionValue,
)
from weft_capture.values.objects import DELETED, ModuleValue, UserObject

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer

_BUILTIN_BASES: tuple[tuple[type, Callable[[type], Value]], ...] = (
    (collections.OrderedDict, lambda cls: DictValue(cls=collections.OrderedDict)),
    (collections.defaultdict, lambda cls: DictValue(cls=collections.defaultdict)),
    (dict, lambda cls: DictValue()),
    (list, lambda cls: ListValue([])),
    (set, lambda cls: SetValue([])),
    (collections.deque, lambda cls: DequeValue([])),
)
_SCALARS = (int, float, str, bytes, frozenset, complex)


def instantiate(tx: Tracer, cls: ClassValue, args: list[Value], kwargs: Kwargs) -> Value:
    """Call a class that has no rule.

    Raises:
        Break: when its instances cannot be made symbolically.
    """
    kind = cls.obj
    meta_call = attributes.lookup(type(kind), "__call__")
    if meta_call is not None and meta_call[1] is dict:  # typing.TypedDict
        return tx.call_builtin(dict, args, kwargs)
    if meta_call is not None and attributes.is_python_code(meta_call[1]):
        if issubclass(kind, enum.Enum):
            return fold(tx, kind, args, kwargs)
        return BoundMethod(tx.const_object(meta_call[1]), cls).call(tx, args, kwargs)
    return construct(tx, cls, args, kwargs)


def construct(tx: Tracer, cls: ClassValue, args: list[Value], kwargs: Kwargs) -> Value:
    """Do what `type.__call__` does: `__new__`, then `__init__`."""
    kind = cls.obj
    if getattr(kind, "__abstractmethods__", None):
        try:
            object.__new__(kind)
        except TypeError as error:
            tx.raise_real(error)
    if issubclass(kind, BaseException):
        instance: Value = ExceptionValue(kind, list(args))
    elif table.is_pure(kind):
        return fold(tx, kind, args, kwargs)
    else:
        instance = _new(tx, cls, args, kwargs)
        if not issubclass(instance.python_type(), kind):
            return instance
    _initialise(tx, kind, instance, args, kwargs)
    return instance


def _initialise(tx: Tracer, kind: type, instance: Value, args: list[Value], kwargs: Kwargs) -> None:
    init = attributes.lookup(kind, "__init__")
    if init is None or init[1] is object.__init__:
        new = attributes.lookup(kind, "__new__")
        if (args or kwargs) and new is not None and new[1] is object.__new__:
            raise Break("unknown-call", f"arguments of {kind.__qualname__}")
    elif attributes.is_python_code(init[1]):
        result = tx.const_object(init[1]).call(tx, [instance, *args], kwargs)
        if result is not NONE:
            text = f"__init__() should return None, not '{result.python_type().__name__}'"
            tx.raise_(TypeError, text)
    elif isinstance(instance, ExceptionValue):
        instance.call_base_method(tx, kind, "__init__", args, kwargs)
    elif not isinstance(init[1], types.WrapperDescriptorType):
        raise Break("unknown-call", f"{kind.__qualname__}.__init__")
    elif isinstance(instance, UserObject):
        BaseMethod(instance, init[0], "__init__").call(tx, args, kwargs)


def _new(tx: Tracer, cls: ClassValue, args: list[Value], kwargs: Kwargs) -> Value:
    kind = cls.obj
    if issubclass(kind, torch.Tensor | torch.autograd.Function):
        raise Break("unknown-call", f"making a {kind.__qualname__}")
    if issubclass(kind, torch.nn.Module) and attributes.global_hooks(tx):
        raise Break("unknown-call", f"making a {kind.__qualname__} while all modules have hooks")
    new = attributes.lookup(kind, "__new__")
    if new is not None and isinstance(new[1], staticmethod):
        return tx.const_object(new[1].__func__).call(tx, [cls, *args], kwargs)
    init = attributes.lookup(kind, "__init__")
    if kwargs and init is not None and not attributes.is_python_code(init[1]):
        if not issubclass(kind, dict | torch.Size) and init[0] is not types.SimpleNamespace:
            raise Break("unknown-call", f"keyword arguments of {kind.__qualname__}")
    return new_object(tx, kind, args)


def new_object(tx: Tracer, kind: type, args: list[Value]) -> Value:
    """Do what the builtin `__new__` of a class does."""
    _check_no_finalizer(kind)
    for base, make in _BUILTIN_BASES:
        if issubclass(kind, base):
            return UserObject(kind, base=make(kind))
    if issubclass(kind, tuple):
        return UserObject(kind, base=TupleValue(args[0].unpack(tx) if args else []))
    for scalar in _SCALARS:
        if issubclass(kind, scalar):
            return UserObject(kind, base=tx.builtin(scalar, *args))
    if kind.__new__ is not object.__new__ and not _plain_new(kind):
        raise Break("unknown-call", f"making a {kind.__module__}.{kind.__qualname__}")
    return _plain_object(kind)


def _plain_object(kind: type) -> UserObject:
    _check_no_finalizer(kind)
    return UserObject(kind)


def _check_no_finalizer(kind: type) -> None:
    if attributes.lookup(kind, "__del__") is not None:
        raise Break("unknown-call", f"making a {kind.__qualname__}, which has a __del__")


def _plain_new(kind: type) -> bool:
    new = attributes.lookup(kind, "__new__")
    return new is None or new[0] is object or new[0].__module__ == "typing"


def subscript_class(tx: Tracer, cls: ClassValue, key: Value) -> Value:
    """Evaluate `cls[key]`: the metaclass's `__getitem__`, else `__class_getitem__`."""
    kind = cls.obj
    found = attributes.lookup(type(kind), "__getitem__")
    by_program = found is not None and not attributes.is_trusted(found[0].__module__)
    if found is not None and by_program and attributes.is_python_code(found[1]):
        return BoundMethod(tx.const_object(found[1]), cls).call(tx, [key], {})
    own = attributes.lookup(kind, "__class_getitem__")
    if own is not None and attributes.is_python_code(own[1]):
        if not attributes.is_trusted(own[0].__module__):
            function = getattr(own[1], "__func__", own[1])
            return tx.const_object(function).call(tx, [cls, key], {})
    return fold(tx, operator.getitem, [cls, key], {})


class BaseMethod(Value):
    """A method of a builtin class bound to an instance of a subclass: `super().__init__`."""

    __slots__ = ("kind", "name", "owner")

    def __init__(self, owner: Value, kind: type, name: str) -> None:
        super().__init__(None)
        self.owner = owner
        self.kind = kind
        self.name = name

    def python_type(self) -> type:
        return types.BuiltinMethodType

    def describe(self) -> str:
        return f"{self.kind.__name__}.{self.name}"

    def call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        owner = self.owner
        if isinstance(owner, ExceptionValue):
            return owner.call_base_method(tx, self.kind, self.name, args, kwargs)
        row = _OBJECT_METHODS.get(self.name)
        if isinstance(owner, UserObject):
            if owner.base is not None and self.kind is not object:
                if self.name == "__init__":
                    return _fill_base(tx, owner, args, kwargs)
                if self.name == "__getitem__":
                    return owner.base_item(tx, args[0])
                return owner.base_method(tx, self.name, args, kwargs)
            if row is not None:
                return row(tx, owner, *args, **kwargs)
        if isinstance(owner, ClassValue) and self.name == "__new__":
            if self.kind is object and not args[1:] and not kwargs:
                return _plain_object(args[0].as_constant())
            if self.kind is object:
                raise Break("unknown-call", "arguments of object.__new__")
            return new_object(tx, args[0].as_constant(), args[1:])
        if isinstance(owner, ClassValue) and self.name == "__call__":
            return construct(tx, owner, args, kwargs)
        if row is not None:
            return row(tx, owner, *args, **kwargs)
        raise Break("unsupported-method", self.describe())


def _fill_base(tx: Tracer, owner: UserObject, args: list[Value], kwargs: Kwargs) -> Value:
    name = {ListValue: "extend"}.get(type(owner.base), "update")  # type: ignore[arg-type]
    if kwargs and not isinstance(owner.base, DictValue):
        raise Break("unknown-call", f"keyword arguments of {owner.cls.__qualname__}")
    if not isinstance(owner.base, MutableValue) or (not args and not kwargs):
        return NONE
    return owner.base_method(tx, name, args, kwargs)


def _object_setattr(tx: Tracer, owner: Value, name: Value, value: Value) -> Value:
    if isinstance(owner, UserObject):
        attribute_writes.plain_set_attribute(tx, owner, name.as_constant(), value)
    else:
        owner.setattr(tx, name.as_constant(), value)
    return NONE


def _object_getattribute(tx: Tracer, owner: Value, name: Value) -> Value:
    if not isinstance(owner, UserObject):
        return owner.getattr(tx, name.as_constant())
    return attributes.plain_attribute(tx, owner, name.as_constant())


def _object_delattr(tx: Tracer, owner: Value, name: Value) -> Value:
    if isinstance(owner, UserObject):
        attribute_writes.plain_delete_attribute(tx, owner, name.as_constant())
    else:
        owner.delattr(tx, name.as_constant())
    return NONE


def _object_eq(tx: Tracer, owner: Value, other: Value) -> Value:
    return TRUE if owner is other else constant(NotImplemented)


def _nothing(tx: Tracer, owner: Value, *args: Value, **kwargs: Value) -> Value:
    return NONE


_OBJECT_METHODS: dict[str, Callable[..., Value]] = {
    "__setattr__": _object_setattr,
    "__getattribute__": _object_getattribute,
    "__delattr__": _object_delattr,
    "__eq__": _object_eq,
    "__init__": lambda *args, **kwargs: _object_init(*args, **kwargs),
    "__init_subclass__": _nothing,
}

table.rule(object.__setattr__)(_object_setattr)
table.rule(object.__getattribute__)(_object_getattribute)
table.rule(object.__delattr__)(_object_delattr)


# As the program's own code: it is not found among the rules.
_SETATTR = types.FunctionType(
    *(
        getattr(torch.nn.Module.__setattr__, f"__{part}__")
        for part in ("code", "globals", "name", "defaults", "closure")
    )
)


_MEMBERS = (torch.nn.Parameter, torch.nn.Module, torch.nn.Buffer)


@table.rule(torch.nn.Module.__setattr__)
def _module_setattr(tx: Tracer, owner: Value, name: Value, value: Value) -> Value:
    text = name.as_constant()
    if isinstance(owner, ModuleValue) and not issubclass(value.python_type(), _MEMBERS):
        if attributes.module_member(tx, owner, text) is None:
            return _object_setattr(tx, owner, name, value)
    return tx.const_object(_SETATTR).call(tx, [owner, name, value], {})


@table.rule("torch._dynamo.mutation_guard.install_generation_tagging_init.<locals>.patched_init")
def _module_init(tx: Tracer, owner: Value, *args: Value, **kwargs: Value) -> Value:
    """Leave out the mark that Dynamo, once loaded, puts on modules for its own use."""
    init = inspect.getclosurevars(torch.nn.Module.__init__).nonlocals["init"]
    return tx.const_object(init).call(tx, [owner, *args], kwargs)


@table.rule(object.__init__)
def _object_init(tx: Tracer, owner: Value, *args: Value, **kwargs: Value) -> Value:
    kind = owner.python_type()
    own = [attributes.lookup(kind, name) for name in ("__init__", "__new__")]
    if (args or kwargs) and (own[0] != (object, object.__init__) or own[1] is None):
        raise Break("unknown-call", f"arguments of object.__init__ for a {kind.__qualname__}")
    return NONE


@table.rule(object.__new__)
def _object_new(tx: Tracer, cls: Value, *args: Value, **kwargs: Value) -> Value:
    if args or kwargs:
        raise Break("unknown-call", "arguments of object.__new__")
    return new_object(tx, cls.as_constant(), [])


@table.rule(tuple.__new__)
def _tuple_new(tx: Tracer, cls: Value, items: Value) -> Value:
    kind = cls.as_constant()
    if kind is tuple:
        return TupleValue(items.unpack(tx))
    if hasattr(kind, "_fields"):
        return NamedTupleValue(kind, items.unpack(tx))
    return new_object(tx, kind, [items])


# ---- an instance's __dict__


class InstanceDict(DictValue):
    """The `__dict__` of an instance or function, read live; only plain writes go through."""

    __slots__ = ("owner",)

    def __init__(self, owner: UserObject | FunctionValue) -> None:
        self.owner = owner
        super().__init__()

    @property
    def entries(self) -> dict[object, tuple[Value, Value]]:
        """The attributes as they are now."""
        members = _members(current.tracer(), self.owner)
        return {name: (constant(name), value) for name, value in members.items()}

    @entries.setter
    def entries(self, entries: dict[object, tuple[Value, Value]]) -> None:
        pass

    def same_object(self, other: Value) -> bool:
        return isinstance(other, InstanceDict) and other.owner is self.owner

    def put(self, key: Value, value: Value) -> None:
        self.owner.store(current.tracer(), key.as_constant(), value)

    def copy(self) -> DictValue:
        return DictValue(list(self.entries.values()))

    def reconstruct(self, out: Output) -> None:
        out.load(self.owner)
        out.writer.load_attr("__dict__")


def instance_dict(tx: Tracer, owner: Value) -> Value:
    """Return the `__dict__` of an instance or function."""
    if not isinstance(owner, UserObject | FunctionValue):
        raise Break("unsupported-value", f"__dict__ of {owner.describe()}")
    if owner.obj is not None and owner.source is not None:
        tx.guard_keys(DictSource(owner.source), owner.obj.__dict__)
    return InstanceDict(owner)


def _members(tx: Tracer, owner: UserObject | FunctionValue) -> dict[str, Value]:
    members: dict[str, Value] = {}
    function = isinstance(owner, FunctionValue)
    read = owner.getattr if isinstance(owner, FunctionValue) else owner.own_attribute
    for name in owner.obj.__dict__ if owner.obj is not None else ():
        found = read(tx, name)
        if found is not None:
            members[name] = found
    written = owner.attributes if isinstance(owner, FunctionValue) else owner.attrs
    for name, value in written.items():
        if value is not DELETED and not (function and name in FUNCTION_FIELDS):
            members[name] = value
    return members


@method(InstanceDict, "pop")
def _pop(tx: Tracer, self: InstanceDict, key: Value, *default: Value) -> Value:
    if key.as_constant() in self.entries or not default:
        _other_writes(tx, self)
    return default[0]


@method(InstanceDict, "popitem", "clear", "setdefault", "__delitem__", "__ior__")
def _other_writes(tx: Tracer, self: InstanceDict, *args: Value) -> Value:
    raise Break("unsupported-method", "removing from an instance's __dict__")


# ---- what must not be inlined

_NEVER = (
    "weft_", "torch._dynamo", "torch._inductor", "torch.fx", "logging", "warnings",
)  # fmt: skip


def check_inlinable(function: types.FunctionType) -> None:
    """Refuse to inline what the user disabled, and what makes no sense inside a graph.

    Raises:
        Break: with code disabled or unknown-call.
    """
    namespace = function.__dict__
    if namespace.get("_weft_disable") or namespace.get("_torchdynamo_disable"):
        raise Break("disabled", function.__qualname__)
    if function.__code__.co_filename == torch._compile.__file__:
        # torch's own marker: its wrapper would import torch's compiler.
        raise Break("disabled", function.__qualname__)
    module = function.__module__ or ""
    if module.startswith(_NEVER) and not namespace.get("_weft_inline"):
        raise Break("unknown-call", f"{module}.{function.__qualname__}")
