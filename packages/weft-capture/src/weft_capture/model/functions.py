"""Callables: Python functions with their cells, bound methods, builtins, partial.

A Python function is inlined. Everything else callable goes through the rule table
(`functions.table`), keyed by the real callable.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from weft_guards.sources import AttrSource, ConstSource, ItemSource, Source

from weft_capture.breaks import Break, NotConstant
from weft_capture.bytecode import decode, docstring_of
from weft_capture.model.constant import NONE, constant, fold, real_call
from weft_capture.model.containers import TupleValue
from weft_capture.model.defaults import guard_defaults, watch_unread
from weft_capture.model.dicts import DictValue, LazyValue
from weft_capture.model.protocol import (
    Call,
    Kwargs,
    MethodOf,
    MutableValue,
    Output,
    Raised,
    Tracer,
    Value,
    identity_key,
)
from weft_capture.python_compat import ANNOTATE


@dataclass(eq=False)
class CellValue(MutableValue):
    """A closure cell; `contents` is None while it is empty."""

    cls = types.CellType

    contents: Value | None = None
    source: Source | None = None
    changing = ("contents",)
    real: types.CellType = field(default_factory=types.CellType)  # the cell of placeholders

    def store(self, tx: Tracer, value: Value | None) -> None:
        """Change the contents, recorded."""
        tx.mutate(self)
        self.contents = value

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        self.store(tx, value)

    def tp_traverse(self) -> Iterable[Value]:
        return () if self.contents is None else (self.contents,)

    def reconstruct_empty(self, out: Output) -> None:
        """Create the `__class__` cell of a class, which the class statement fills."""
        out.call(types.CellType, ())
        out.remember(self)
        out.writer.pop()

    def reconstruct(self, out: Output) -> None:
        writer = out.writer
        if self in getattr(self.contents, "filled", ()):
            assert self.contents is not None
            out.load(self.contents)
            writer.pop()
            out.load(self)
            return
        out.call(types.CellType, ())
        out.remember(self)
        if self.contents is not None:
            out.fill_attributes(self, {"cell_contents": self.contents})

    def replay(self, out: Output) -> None:
        if self.contents is None:
            out.later(delattr, self, constant("cell_contents"))
        else:
            out.later(setattr, self, constant("cell_contents"), self.contents)


CellValue.methods["get:cell_contents"] = lambda tx, self: (
    tx.force(self.contents) if self.contents else tx.raise_(ValueError, "Cell is empty")
)


FUNCTION_FIELDS = frozenset(
    ("__annotations__", "__doc__", "__module__", "__name__", "__qualname__", "__type_params__")
) | frozenset(ANNOTATE)
"""Attributes of a function outside of its `__dict__` that capture sets."""
_KINDS = {"__name__": str, "__qualname__": str, "__type_params__": tuple, "__annotations__": dict}


@dataclass(eq=False)
class FunctionValue(MutableValue):
    """A Python function: an input (`obj`) or created by the program (`obj` is None)."""

    cls = types.FunctionType
    compares_by_value = False
    changing = ("attributes", "code")

    code: types.CodeType
    globals: dict[str, Any]
    name: str
    defaults: list[Value]
    kwdefaults: dict[str, Value]
    cells: tuple[CellValue, ...]
    obj: Any = None
    source: Source | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    is_placeholder: bool = False  # for an object of the library

    def describe(self) -> str:
        return f"function {self.code.co_qualname}"

    def as_constant(self) -> Any:
        if self.obj is None:
            raise NotConstant(self.describe())
        return self.obj

    def tp_hash(self) -> object:
        identity_key(self)
        return self if self.obj is None else self.obj

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        return tx.call_function(self, args, kwargs)

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        if name in self.attributes:
            return tx.force(self.attributes[name])
        if name == "__dict__":
            return tx.instance_dict(self)
        if self.obj is not None:
            return self._real_attribute(tx, self.obj, name)
        if name == "__annotations__":
            annotate = self.attributes.get("__annotate__", NONE)
            empty = annotate is NONE
            self.store(tx, name, DictValue() if empty else annotate.tp_call(tx, [constant(1)], {}))
            return self.attributes[name]
        return super().tp_getattro(tx, name)

    def _real_attribute(self, tx: Tracer, function: types.FunctionType, name: str) -> Value:
        """Read an attribute of the function from outside."""
        source = self.source or ConstSource(function)
        if name == "__get__":
            return MethodOf(self, name)
        if name == "__closure__":
            cells = function_cells(tx, function, source)
            return tx.tuple_of(list(cells)) if cells else NONE
        if not hasattr(function, name):
            tx.raise_(AttributeError, f"'function' object has no attribute '{name}'")
        real = getattr(function, name)
        if isinstance(source, ConstSource) and isinstance(real, dict):
            return tx.const_object(real)
        if isinstance(source, ConstSource) or name in ("__name__", "__qualname__", "__module__"):
            return tx.literal(real)
        return tx.wrap(real, AttrSource(source, name))

    def bind(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> dict[str, Value]:
        """Return the locals at the start of a call; the interpreter itself binds the arguments.

        Raises:
            Raised: with CPython's own TypeError, when they do not fit.
            Break: when its code is a module's, whose variables are the globals.
        """
        if not self.code.co_flags & inspect.CO_OPTIMIZED:
            raise Break("dynamic-code", "a function of module-level code")
        derived = decode(self.code).derived
        binder = derived.get("binder") or derived.setdefault("binder", _binder(self.code))
        stub = types.FunctionType(binder, {}, None, tuple(self.defaults))
        stub.__qualname__, stub.__kwdefaults__ = self.name, dict(self.kwdefaults)
        try:
            bound: dict[str, Value] = real_call(tx, stub, *args, **kwargs)
        except Raised:
            guard_defaults(tx, self)
            raise
        watch_unread(tx, self, bound.values())
        for name, argument in bound.items():
            if isinstance(argument, tuple):
                bound[name] = TupleValue(argument)
            elif isinstance(argument, dict):
                bound[name] = DictValue([(constant(key), value) for key, value in argument.items()])
        return bound

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        if name == "__code__" and self.obj is None:
            cells = tuple(types.CellType() for _ in self.code.co_freevars)
            sample = types.FunctionType(self.code, {}, None, None, cells)
            real_call(tx, setattr, sample, name, value.as_constant())
            tx.mutate(self)
            self.code = value.as_constant()
            return
        if name == "__annotations__" and value is NONE:
            value = DictValue()
        if not issubclass(value.python_type(), _KINDS.get(name, object)):
            real_call(tx, setattr, lambda: None, name, 0)
        if name not in FUNCTION_FIELDS and name in types.FunctionType.__dict__:
            raise Break("c-attribute", f"setting {name} of a function")
        self.store(tx, name, value)

    def store(self, tx: Tracer, name: str, value: Value) -> None:
        """Write the function's dict."""
        tx.mutate(self)
        self.attributes[name] = value

    def tp_delattro(self, tx: Tracer, name: str) -> None:
        if self.obj is not None or name in types.FunctionType.__dict__:
            raise Break("c-attribute", f"deleting {name} of a function")
        if name not in self.attributes:
            tx.raise_(AttributeError, f"'function' object has no attribute '{name}'")
        tx.mutate(self)
        del self.attributes[name]

    def tp_traverse(self) -> Iterable[Value]:
        return (*self.cells, *self.attributes.values())

    def reconstruct(self, out: Output) -> None:
        if self.is_placeholder:
            raise Break("cannot-rebuild", f"{self.describe()} is needed after a graph break")
        own = self.globals is out.tx.function.__globals__  # equal code may run in another dict
        made_of = [
            constant(self.code),
            constant(None if own else self.globals),
            constant(self.name),
        ]
        state = [TupleValue(self.defaults), TupleValue(self.cells)]
        out.call(rebuild_function, [*made_of, *state], self.kwdefaults)
        out.remember(self)
        out.fill_attributes(self, self.attributes)

    def replay(self, out: Output) -> None:
        out.replay_attributes(self, self.attributes)


FunctionValue.methods = {
    "get:__name__": lambda tx, self: constant(sys.intern(self.name.rpartition(".")[2])),
    "get:__qualname__": lambda tx, self: constant(self.name),
    "get:__module__": lambda tx, self: constant(self.globals.get("__name__")),
    "get:__doc__": lambda tx, self: constant(docstring_of(self.code)),
    "get:__code__": lambda tx, self: constant(self.code),
    "get:__globals__": lambda tx, self: ObjectConstant(self.globals),
    "get:__defaults__": lambda tx, self: tx.tuple_of(self.defaults) if self.defaults else NONE,
    "get:__closure__": lambda tx, self: tx.tuple_of(list(self.cells)) if self.cells else NONE,
    "get:__kwdefaults__": lambda tx, self: tx.literal(self.kwdefaults or None),
    "get:__type_params__": lambda tx, self: tx.tuple_of([]),
    **{f"get:{name}": lambda tx, self: NONE for name in ANNOTATE},
}


def function_cells(tx: Tracer, function: Any, source: Source) -> tuple[CellValue, ...]:
    """Return the closure cells of a function from outside."""
    closure = AttrSource(source, "__closure__")
    cells = [
        tx.wrap(cell, ItemSource(closure, i)) for i, cell in enumerate(function.__closure__ or ())
    ]
    return tuple(cell for cell in cells if isinstance(cell, CellValue))


_LOCALS = (lambda: locals()).__code__


def _binder(code: types.CodeType) -> types.CodeType:
    """Return code of the same parameters that returns them by name."""
    variadic = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    count = code.co_argcount + code.co_kwonlyargcount + variadic.bit_count()
    return code.replace(
        co_code=_LOCALS.co_code,
        co_names=_LOCALS.co_names,
        co_consts=_LOCALS.co_consts,
        co_stacksize=_LOCALS.co_stacksize,
        co_linetable=_LOCALS.co_linetable,
        co_exceptiontable=b"",
        co_flags=_LOCALS.co_flags | variadic,
        co_varnames=code.co_varnames[:count],
        co_nlocals=count,
        co_freevars=(),
        co_cellvars=(),
    )


def rebuild_function(
    code: types.CodeType,
    global_dict: dict[str, Any] | None,
    name: str,
    defaults: tuple[object, ...],
    cells: tuple[types.CellType, ...],
    /,
    **kwdefaults: object,
) -> types.FunctionType:
    """Create the function of a MAKE_FUNCTION of the captured frame."""
    global_dict = sys._getframe(1).f_globals if global_dict is None else global_dict
    function = types.FunctionType(code, global_dict, code.co_name, defaults or None, cells or None)
    function.__qualname__ = name
    if kwdefaults:
        function.__kwdefaults__ = kwdefaults
    return function


@dataclass(eq=False)
class BoundMethod(Value):
    """`function` bound to `owner`."""

    cls = types.MethodType

    function: Value
    owner: Value
    source: Source | None = None

    def describe(self) -> str:
        return f"method {self.function.describe()}"

    def as_constant(self) -> Any:
        owner = getattr(self.owner, "obj", None)
        if owner is None:
            raise NotConstant(self.describe())
        return types.MethodType(self.function.as_constant(), owner)

    def tp_hash(self) -> object:
        return (self.function.tp_hash(), self.owner.tp_hash())

    def forwards(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Call:
        return self.function, [self.owner, *args], kwargs

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        if name == "__get__" and name in types.MethodType.__dict__:  # from 3.13
            return MethodOf(self, name)
        special = {"__func__": self.function, "__self__": self.owner}
        return special[name] if name in special else self.function.tp_getattro(tx, name)

    def tp_traverse(self) -> Iterable[Value]:
        return self.function, self.owner

    def reconstruct(self, out: Output) -> None:
        out.call(types.MethodType, [self.function, self.owner])


@dataclass(eq=False)
class ObjectConstant(Value):
    """An opaque real object: builtin and C functions, modules, and others.

    Calls go through the rule table; the object's identity is guarded where it is wrapped.
    """

    obj: Any
    source: Source | None = None

    def python_type(self) -> type:
        return type(self.obj)

    def describe(self) -> str:
        return getattr(self.obj, "__qualname__", None) or repr(type(self.obj))

    def as_constant(self) -> Any:
        return self.obj

    def tp_hash(self) -> object:
        return self.obj

    def same_object(self, other: Value) -> bool:
        return isinstance(other, ObjectConstant) and other.obj is self.obj

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        try:
            return tx.const_object(getattr(self.obj, name))
        except AttributeError as error:
            tx.raise_(AttributeError, *error.args)


class ScriptedFunction(ObjectConstant):
    """A function that `torch.jit.script` compiled; capture inlines its original Python."""

    def forwards(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Call | None:
        python = getattr(self.obj, "_torchdynamo_inline", None)
        scripted = getattr(self.obj, "__name__", "") == "ScriptFunction"  # else traced
        if not scripted or not isinstance(python, types.FunctionType):
            return None
        if "is_scripting" in python.__code__.co_names or not _as_declared(python, args, kwargs):
            return None
        return tx.const_object(python), args, kwargs


def _as_declared(python: types.FunctionType, args: list[Value], kwargs: Kwargs) -> bool:
    """Say whether arguments are of the declared types, so that TorchScript converts none."""
    signature = inspect.signature(python)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return False
    for name, declared in signature.parameters.items():
        arg_type = bound[name].python_type() if name in bound else type(declared.default)
        annotation = torch.Tensor if declared.annotation is declared.empty else declared.annotation
        arg_type = torch.Tensor if arg_type is torch.nn.Parameter else arg_type
        either = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        if arg_type not in (typing.get_args(annotation) if either else (annotation,)):
            return False
    return True


class BuiltinValue(ObjectConstant):
    """A builtin or C function, or any callable that has rules instead of being inlined."""

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        return tx.call_builtin(self.obj, args, kwargs)


def parametrised(tx: Tracer, hint: Value, key: Value) -> Value:
    """Evaluate `hint[key]` of a class or type hint; break for an instance in the key."""
    parameters = key.items if isinstance(key, TupleValue) else [key]
    if any(hasattr(tx.force(parameter), "attrs") for parameter in parameters):
        raise Break("constant-required", f"{hint.describe()} of a {key.describe()}")
    return fold(tx, operator.getitem, [hint, key], {})


class TypeHint(ObjectConstant):
    """`list[int]`, `int | str`, a NewType and similar type hints."""

    def mp_subscript(self, tx: Tracer, key: Value) -> Value:
        return parametrised(tx, self, key)

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        if isinstance(self.obj, typing.NewType):
            return args[0]
        if not getattr(self.obj, "_inst", True):
            tx.raise_real(
                TypeError(
                    f"Type {self.obj._name} cannot be instantiated; use "
                    f"{self.obj.__origin__.__name__}() instead"
                )
            )
        instance = tx.const_object(self.obj.__origin__).tp_call(tx, args, kwargs)
        if instance.python_type().__dictoffset__:
            instance.tp_setattro(tx, "__orig_class__", self)
        return instance


@dataclass(eq=False)
class PartialValue(Value):
    """functools.partial, an input or created by the program."""

    cls = functools.partial

    function: Value
    args: list[Value]
    keywords: Kwargs
    source: Source | None = None
    attributes: dict[str, Value] = field(default_factory=dict)

    def getattr_fallback(self, tx: Tracer, name: str) -> Value:
        return self.attributes.get(name) or super().getattr_fallback(tx, name)

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        if self.source is not None or hasattr(functools.partial, name):
            super().tp_setattro(tx, name, value)
        before = self.attributes
        tx.journal.on_rollback(lambda: setattr(self, "attributes", before))
        self.attributes = {**before, name: value}

    def forwards(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Call:
        return self.function, [*self.args, *args], {**self.keywords, **kwargs}

    def reconstruct(self, out: Output) -> None:
        out.call(functools.partial, [self.function, *self.args], self.keywords)
        out.remember(self)
        out.fill_attributes(self, self.attributes)


PartialValue.methods = {
    "get:func": lambda tx, self: self.function,
    "get:args": lambda tx, self: tx.tuple_of(self.args),
    "get:keywords": lambda tx, self: tx.literal(self.keywords),
}


def function_value(tx: Tracer, obj: types.FunctionType, source: Source) -> FunctionValue:
    """Return the value of a Python function that is inlined even where it has a rule."""
    positional = AttrSource(source, "__defaults__")
    defaults = enumerate(obj.__defaults__ or ())
    kwdefaults: dict[str, Value] = {
        name: LazyValue(item, ItemSource(AttrSource(source, "__kwdefaults__"), name))
        for name, item in (obj.__kwdefaults__ or {}).items()
    }
    return FunctionValue(
        obj.__code__,
        obj.__globals__,
        name=obj.__qualname__,
        defaults=[LazyValue(item, ItemSource(positional, i)) for i, item in defaults],
        kwdefaults=kwdefaults,
        cells=function_cells(tx, obj, source),
        obj=obj,
        source=source,
    )
