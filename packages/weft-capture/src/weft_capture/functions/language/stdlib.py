"""The standard library: functools, itertools, math, collections, copy, typing and small things.

Library functions written in Python without C state are inlined and need no rule here.
"""

from __future__ import annotations

import ast
import contextvars
import copy
import copyreg
import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import operator
import os
import pathlib
import pprint
import re
import struct
import sys
import threading
import traceback
import types
import typing
import weakref
import zlib
from typing import Any

import torch
from weft_guards import WeakIdentity
from weft_guards.sources import CallSource, ConstSource, ProgramSource, Source

from weft_capture import polyfills
from weft_capture.breaks import Break
from weft_capture.functions.table import code_rule, pure, pure_or_traced, rule, rule_of_each
from weft_capture.functions.wrap import EXACT
from weft_capture.model import attributes
from weft_capture.model.attributes import lookup
from weft_capture.model.constant import (
    CONSTANT_TYPES,
    FRAME_CLASSES,
    NONE,
    VARYING_TYPES,
    Constant,
    Varying,
    fold,
    is_constant_object,
    real_call,
)
from weft_capture.model.containers import ListValue, SequenceValue, SetValue, TupleValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.exceptions import TRACEBACK
from weft_capture.model.functions import BoundMethod, FunctionValue, ObjectConstant, PartialValue
from weft_capture.model.iterators import CombinedIterator, ListedIterator
from weft_capture.model.objects import OBJECT_METHODS, ModuleValue, UserObject
from weft_capture.model.protocol import (
    Kwargs,
    MutableValue,
    Tracer,
    Value,
    method,
)
from weft_capture.model.proxy import Proxy
from weft_capture.model.slots import combined, steps
from weft_capture.model.thread_locals import ContextVariable, ThreadLocal
from weft_capture.model.weakrefs import make_ref
from weft_capture.python_compat import TUPLE_ASKS_LENGTH
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.tensor import SymValue, TensorValue

_ZERO = Constant(0)

pure(re.compile, re.match, re.search, re.fullmatch, re.findall, re.split)
pure(os.path.join, polyfills.matches, vars(re)["_compile"])
pure(importlib.metadata.version, importlib.util.find_spec)
pure(operator.index, sys.intern, os.fspath)


@rule(traceback.clear_frames)
def _clear_frames(tx: Tracer, where: Value) -> None:
    """Do nothing: inlined frames release their variables when they end."""
    if where is not TRACEBACK:
        raise Break("exception-state", "clear_frames of a traceback from outside")


@rule_of_each(inspect.signature, inspect.getfullargspec)
def _signature(signature_function: Any, tx: Tracer, of: Value, **options: Value) -> Value:
    """Guard the attributes that the signature depends on, except those of libraries."""
    function = of.function if isinstance(of, BoundMethod) else of
    if function in tx.effects.changed:
        raise Break("pending-mutation", "the signature of a changed function")
    obj, source = getattr(function, "obj", None), getattr(function, "source", None)
    if isinstance(obj, type):
        mro_entries = [
            attributes.lookup(obj, name) for name in ("__init__", "__new__", "__signature__")
        ]
        obj, source = mro_entries[0] and mro_entries[0][1], None
    if isinstance(obj, types.FunctionType) and not attributes.is_immutable_module(obj.__module__):
        if source is None or isinstance(source, ConstSource):
            source = ProgramSource(WeakIdentity(obj))
        tx.guard_same(_has_signature_parts, source, _signature_parts(obj))
    return fold(tx, signature_function, [of], options)


def _signature_parts(function: types.FunctionType) -> list[object]:
    """Return the objects that the signature of a function, and of its wrapped one, depends on."""
    tables = (function.__kwdefaults__, function.__annotations__, function.__dict__)
    pairs = [obj for variables in tables for pair in (variables or {}).items() for obj in pair]
    wrapped = function.__dict__.get("__wrapped__")
    inner = _signature_parts(wrapped) if isinstance(wrapped, types.FunctionType) else []
    return [function.__code__, *(function.__defaults__ or ()), *pairs, *inner]


def _has_signature_parts(function: types.FunctionType, objects: list[object]) -> bool:
    now = _signature_parts(function)
    return len(now) == len(objects) and all(map(operator.is_, now, objects))


# functools


@rule(functools.partial)
def _partial(tx: Tracer, function: Value, /, *args: Value, **kwargs: Value) -> Value:
    if isinstance(function, PartialValue):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.function
    elif issubclass(function.python_type(), functools.partial):
        raise Break("object-creation", "functools.partial of an instance of a subclass of partial")
    elif not tx.builtin(callable, function).nb_bool(tx):
        raise Break("builtin-error", "functools.partial of an object that is not callable")
    return PartialValue(function, list(args), kwargs)


def _dispatch(
    tx: Tracer, function: FunctionValue, args: list[Value], kwargs: Kwargs
) -> Value | None:
    """`dispatch` of a single-dispatch function, traced where a class was created in the frame."""
    cls = args[0].as_constant() if len(args) == 1 else None
    if function.obj is None or not isinstance(cls, type) or cls in FRAME_CLASSES or tx.effects:
        return None
    cache = inspect.getclosurevars(function.obj).nonlocals["dispatch_cache"]
    if type(cache) is not weakref.WeakKeyDictionary:
        raise Break("unsupported-arguments", "singledispatch with a replaced cache")
    owner = function.source or ConstSource(function.obj)
    return tx.wrap(function.obj(cls), CallSource(operator.call, (owner, ConstSource(cls))))


code_rule(functools.singledispatch(len).dispatch.__code__)(_dispatch)


# re


@method(Constant, "sub")
def _pattern_sub(
    tx: Tracer, self: Constant, repl: Value, string: Value, count: Value = _ZERO
) -> Value:
    if isinstance(repl, Constant) or not isinstance(self.value, re.Pattern):
        return fold(tx, getattr(self.value, "sub"), [repl, string, count], {})  # noqa: B009
    return tx.const_object(polyfills.substitute).tp_call(tx, [self, repl, string, count], {})


# math, on symbolic numbers

_SYMBOLIC_MATH: dict[Any, Any] = {math.ceil: math.ceil, math.floor: math.floor}
for _name in ("sqrt", "cos", "sin"):
    _SYMBOLIC_MATH[getattr(math, _name)] = getattr(torch, f"_sym_{_name}")


@rule_of_each(*(f for f in vars(math).values() if callable(f)))
def _math(function: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    in_graph = _SYMBOLIC_MATH.get(function)
    if in_graph is not None and args:
        number = symbolic_scalars.symbol(tx, args[0])
        if isinstance(number, SymValue):
            return tx.graph.emit("call_function", in_graph, [number], {})
    if args and isinstance(args[0], TensorValue):
        raise Break("data-dependent-value", f"math.{function.__name__} of a tensor")
    special = f"__{function.__name__}__"
    if args and isinstance(args[0], UserObject) and args[0].has_special(special):
        return args[0].special(tx, special).tp_call(tx, [], {})
    constant_args = kwargs or all(arg.is_constant() for arg in args)
    result = None if constant_args else symbolic_scalars.by_python(tx, function, list(args))
    return fold(tx, function, list(args), kwargs) if result is None else result


@rule(math.prod)
def _prod(tx: Tracer, items: Value, *, start: Value = Constant(1)) -> Value:  # noqa: B008
    return combined(tx, "*", start, items)


# itertools


@rule_of_each(
    itertools.product,
    itertools.permutations,
    itertools.combinations,
    itertools.combinations_with_replacement,
)
def _finite(function: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    """Functions of itertools over finite iterables: the items are listed at once."""
    real = [
        [Proxy(tx, item) for item in steps(tx, arg, TUPLE_ASKS_LENGTH)]
        if not arg.is_constant() or _listed(arg)
        else arg.as_constant()
        for arg in args
    ]
    options = {name: value.as_constant() for name, value in kwargs.items()}
    rows = [tx.literal(row) for row in function(*real, **options)]
    return ListedIterator(rows, function)


def _listed(value: Value) -> bool:
    return isinstance(value, SequenceValue) or value.python_type() in (range, str)


@rule(itertools.repeat)
def _repeat(tx: Tracer, object: Value, times: Value | None = None) -> Value:
    count = None if times is None else real_call(tx, operator.index, times.as_constant())
    return CombinedIterator(
        itertools.repeat, [], [object], lambda at: [] if count is None else [max(count - at, 0)]
    )


@rule(itertools.count)
def _count(tx: Tracer, start: Value = Constant(0), step: Value = Constant(1)) -> Value:  # noqa: B008
    first, stride = start.as_constant(), step.as_constant()
    if type(first) is not int or type(stride) is not int:
        raise Break("unsupported-arguments", "itertools.count of numbers other than ints")
    return CombinedIterator(
        itertools.count, [], (), lambda position: [first + stride * position, stride]
    )


# ---- small immutable things: computed while capturing when all is known


_MADE = (
    datetime.date,
    datetime.time,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    struct.Struct,
)
CONSTANT_TYPES.update((*_MADE, re.Pattern, re.Match))
VARYING_TYPES.update(_MADE)
pure(*_MADE, ast.literal_eval)
for _kind in (datetime.date, datetime.datetime):
    pure(_kind.fromisoformat, _kind.fromordinal, datetime.datetime.strptime)
for _name in ("binascii", "unicodedata", "_string", "_json"):
    pure(*filter(inspect.isbuiltin, vars(importlib.import_module(_name)).values()))
pure(struct.pack, struct.unpack, struct.unpack_from, struct.iter_unpack, struct.calcsize)
pure(zlib.adler32, zlib.crc32, bytes.fromhex)
pure_or_traced(json.dumps, json.loads, re.sub, pprint.pformat, typing.get_origin)


@rule(typing.get_type_hints)
def _type_hints(tx: Tracer, of: Value, *more: Value, **options: Value) -> Value:
    try:
        args = [value.as_constant() for value in (of, *more)]
        keywords = {name: value.as_constant() for name, value in options.items()}
    except Break:  # a function or class of the frame
        return tx.trace_body(typing.get_type_hints, [of, *more], options)
    hints = real_call(tx, typing.get_type_hints, *args, **keywords)
    same = functools.partial(_has_hints, rest=(args[1:], keywords))
    tx.guard_same(same, of.source or ConstSource(args[0]), hints)
    return tx.literal(hints)


def _has_hints(of: Any, hints: dict[str, Any], rest: Any) -> bool:
    return typing.get_type_hints(of, *rest[0], **rest[1]) == hints


rule(threading.local)(lambda tx: ThreadLocal())


def _wrap_variable(tx: Tracer, obj: Any, source: Source) -> Value:
    tx.guard(source, "TYPE", contextvars.ContextVar)
    return ContextVariable(obj, source)


EXACT[contextvars.ContextVar] = _wrap_variable
rule(weakref.ref)(make_ref)


@rule(types.SimpleNamespace)
def _namespace(tx: Tracer, **members: Value) -> Value:
    namespace = UserObject(types.SimpleNamespace)
    namespace.attrs.update(members)
    return namespace


# ---- copy.copy and copy.deepcopy: the library's Python is traced; `__reduce_ex__` has a rule


_SHARED = (Constant, FunctionValue, ObjectConstant, Varying)
_KNOWN_BASES = {object, list, dict, int, float, str, bytes, complex}


def _check(value: Value) -> None:
    """Break for modules, state dicts, and constants whose class may customise copies."""
    odd = isinstance(value, Constant) and not is_constant_object(value.value)
    if odd or isinstance(value, ModuleValue) or getattr(value, "metadata", None) is not None:
        raise Break("object-creation", f"a copy of {value.describe()}")


@rule(copy.copy)
def _copy(tx: Tracer, value: Value) -> Value:
    _check(value)
    if isinstance(value, (*_SHARED, TupleValue)):
        return value
    if isinstance(value, UserObject):
        return tx.trace_body(copy.copy, [value], {})
    changes = isinstance(value, MutableValue) and hasattr(value.python_type(), "copy")
    name = "copy" if changes else "__copy__"
    return value.call_method(tx, name, [], {})


@rule(copy.deepcopy)
def _deepcopy(tx: Tracer, value: Value, memo: Value = NONE) -> Value:
    value = tx.force(value)
    _check(value)
    if isinstance(value, _SHARED) or value.python_type() is torch.Size:
        return value
    if type(value) is TensorValue and not value.fake.requires_grad:
        done = memo if isinstance(memo, DictValue) else DictValue()
        number = tx.builtin(id, value)
        copied = done.get(tx, number) or tx.graph.emit("call_method", "clone", [value], {})
        done.mp_ass_subscript(tx, number, copied)
        return copied
    if isinstance(value, TupleValue | ListValue | DictValue | SetValue | UserObject):
        return tx.trace_body(copy.deepcopy, [value, memo], {})
    if value.is_constant():
        return value
    raise Break("object-creation", f"deepcopy of {value.describe()}")


# ---- what objects are made of


@rule(object.__reduce_ex__)
def _reduce(tx: Tracer, value: Value, protocol: Value) -> Value:
    bases = value.python_type().__mro__
    new = types.BuiltinFunctionType  # the type of `__new__` of a class in C
    in_c = {k for k in bases if not k.__flags__ & 1 << 9 or type(vars(k).get("__new__")) is new}
    supported = isinstance(value, UserObject) and in_c <= _KNOWN_BASES
    with_words = lookup(bases[0], "__getnewargs_ex__") is not None
    if not supported or with_words or isinstance(value, ModuleValue) or protocol.as_constant() < 2:
        raise Break("object-creation", f"a copy of {value.describe()}")
    return tx.trace_body(polyfills.reduce_object, [value], {})


@rule(getattr(object, "__getstate__"))  # noqa: B009
def _get_state(tx: Tracer, value: Value) -> Value:
    names = vars(copyreg)["_slotnames"](value.python_type())
    return tx.trace_body(polyfills.get_state, [value, tx.literal(names)], {})


OBJECT_METHODS["__reduce_ex__"], OBJECT_METHODS["__getstate__"] = _reduce, _get_state
