"""Introspection: getattr and the like, globals, locals, dir, hash, id."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

from weft_guards.sources import CallSource, ConstSource

from weft_capture.breaks import Break
from weft_capture.functions.classes import ClassValue
from weft_capture.functions.table import decline, rule
from weft_capture.model.constant import (
    FRAME_CLASSES,
    NONE,
    NULL,
    Constant,
    Varying,
    constant,
    fold,
    real_call,
)
from weft_capture.model.containers import TupleValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.exceptions import TRACEBACK, check_outside_handlers, handled
from weft_capture.model.functions import BoundMethod, FunctionValue, function_value
from weft_capture.model.objects import DELETED, UserObject
from weft_capture.model.protocol import AT_RUN, Output, Tracer, Value, method
from weft_capture.model.scope import ModuleObject, import_module
from weft_capture.model.slots import optional_attribute
from weft_capture.python_compat import FRAME_KEEPS_LOCALS, unhashable
from weft_capture.tensors.tensor import TensorValue


def _name_for(tx: Tracer, function: Any, name: Value) -> str:
    """Return the name of an attribute; raise the function's error for another type."""
    text = name.as_constant()
    if not isinstance(text, str):
        real_call(tx, function, None, text, *[None] * (function is setattr))
    return str.__str__(text)


def _read(tx: Tracer, function: Any, value: Value, name: Value, default: Value | None) -> Value:
    text = _name_for(tx, function, name)
    if default is None:
        return value.tp_getattro(tx, text)
    return optional_attribute(tx, value, text) or default


rule(getattr)(lambda tx, value, name, default=None: _read(tx, getattr, value, name, default))
rule(hasattr)(lambda tx, value, name: constant(_read(tx, hasattr, value, name, NULL) is not NULL))


@rule(setattr)
def _setattr(tx: Tracer, value: Value, name: Value, item: Value) -> None:
    if isinstance(name, Varying) and not tx.fullgraph:  # there each name is a graph
        raise Break("symbolic-number", "setattr with a symbolic name")
    value.tp_setattro(tx, _name_for(tx, setattr, name), item)


@rule(delattr)
def _delattr(tx: Tracer, value: Value, name: Value) -> None:
    value.tp_delattro(tx, _name_for(tx, delattr, name))


rule(__import__)(lambda tx, name: import_module(tx, name.as_constant()))


def _variables(tx: Tracer) -> dict[str, Value]:
    frame = tx.frame
    assert frame is not None
    if not frame.decoded.flags & inspect.CO_OPTIMIZED:
        raise Break("namespace-dict", "locals() in the body of a class")
    variables: dict[str, Value] = {}
    names = [*frame.decoded.varnames, *frame.decoded.cellvars, *frame.decoded.freevars]
    for name in dict.fromkeys([*names, *frame.locals]):
        cell = frame.cells.get(name)
        value = frame.locals.get(name) if cell is None else cell.contents
        if value is not None and not name.startswith("."):
            variables[name] = value
    return variables


def _run_as_it_is(tx: Tracer, detail: str) -> NoReturn:
    """Break so that the frame runs eagerly as a whole."""
    error = Break("frame-access", detail)
    error.eager_frame = tx.frame
    raise error


def _check_locals_read_once(tx: Tracer) -> None:
    """Run a frame eagerly when its dict of locals may be read twice.

    Up to CPython 3.12 a frame has one such dict, which keeps added entries.
    """
    assert tx.frame is not None
    instrs = tx.frame.decoded.instrs
    asks = [i for i in instrs if i.opname == "LOAD_GLOBAL" and i.argval in _SEES_NAMES]
    loops = any(i.target is not None and i.target < at for at, i in enumerate(instrs))
    if FRAME_KEEPS_LOCALS and (len(asks) > 1 or loops):
        _run_as_it_is(tx, "a frame's dict of variables that may be seen again")


@rule(locals)
def _locals(tx: Tracer) -> Value:
    _check_locals_read_once(tx)
    return DictValue([(constant(name), value) for name, value in _variables(tx).items()])


_SEES_NAMES = frozenset(("globals", "locals", "vars", "dir", "eval", "exec", "_getframe"))


@rule(eval)
def _eval(tx: Tracer, source: Value, *scopes: Value) -> Value:
    """Trace the text of an expression in the variables of the frame."""
    frame, text = tx.frame, source.as_constant()
    assert frame is not None
    if scopes or not isinstance(text, str) or ":=" in text:
        raise Break("dynamic-code", "eval that assigns, of code, or with a dict of variables")
    code = real_call(tx, compile, text.lstrip(" \t"), "<string>", "eval", dont_inherit=True)
    function = types.FunctionType(code, frame.function.globals)
    expression = function_value(tx, function, ConstSource(function))
    return tx.run_code(expression, _variables(tx))


@rule(exec)
def _exec(tx: Tracer, source: Value, *scopes: Value, **more: Value) -> NoReturn:
    if not scopes:
        _check_locals_read_once(tx)
    raise Break("dynamic-code", "exec")


decline("dynamic-code", "compile", compile)
decline("namespace-dict", "globals", globals)


@rule(dir)
def _dir(tx: Tracer, value: Value | None = None) -> Value:
    if value is None:
        return tx.literal(sorted(_variables(tx)))
    if isinstance(value, ClassValue | ModuleObject | Constant):
        return fold(tx, dir, [value], {})
    if not isinstance(value, UserObject) or value.has_special("__dir__"):
        raise Break("namespace-dict", f"dir of {value.describe()}")
    names = {name for name, item in value.attrs.items() if item is not DELETED}
    names |= set(getattr(value.obj, "__dict__", ()))
    if value.obj is not None and value.source is not None:
        tx.instance_dict(value)  # guards the names
    return tx.literal(sorted({*dir(value.cls), *names}))


@dataclass(eq=False)
class RuntimeNumber(Value):
    """A number known only at run time: the id of an object or a thread. It can be compared."""

    cls = int

    function: Any
    args: list[Value]

    def tp_hash(self) -> object:
        return (AT_RUN, self.function, *(id(arg) for arg in self.args))

    def same_object(self, other: Value) -> bool:
        return isinstance(other, RuntimeNumber) and self.tp_hash() == other.tp_hash()

    def call_method(
        self, tx: Tracer, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        other = args[0] if args else None
        if name in ("__eq__", "__ne__") and isinstance(other, RuntimeNumber):
            return constant(self.same_object(other) == (name == "__eq__"))
        raise Break("object-identity", f"arithmetic on {self.function.__name__}()")

    def nb_bool(self, tx: Tracer) -> bool:
        return True

    def reconstruct(self, out: Output) -> None:
        out.call(self.function, self.args)


@rule(id)
def _id(tx: Tracer, value: Value) -> Value:
    if isinstance(value, Constant):
        raise Break("object-identity", f"id of {value.describe()}")
    return RuntimeNumber(id, [value])


rule(threading.get_ident)(lambda tx: RuntimeNumber(threading.get_ident, []))
rule(threading.current_thread)(
    lambda tx: tx.wrap(threading.current_thread(), CallSource(threading.current_thread, ()))
)


@rule(hash)
def _hash(tx: Tracer, value: Value) -> Value:
    if isinstance(value, UserObject) and value.has_special("__hash__"):
        number = value.special(tx, "__hash__").tp_call(tx, [], {})
        fits = number.is_constant() and type(number.as_constant()) is int
        if fits and abs(number.as_constant()) <= sys.maxsize and number.as_constant() != -1:
            return number
        if not issubclass(number.python_type(), int):
            tx.raise_(TypeError, "__hash__ method should return an integer")
        return fold(tx, hash, [number], {})
    if issubclass(value.python_type(), weakref.ref):
        raise Break("weak-reference", "hash of a weak reference, whose object may be dead")
    base = value.base if isinstance(value, UserObject) else None
    if base is not None and base.python_type() not in (float, complex):  # NaN hashes by address
        return _hash(tx, base)
    if isinstance(value, UserObject | TensorValue | FunctionValue):
        if getattr(value.python_type(), "__hash__", None) is None:
            tx.raise_(TypeError, unhashable(value.python_type()))
        if value.python_type() in FRAME_CLASSES:
            raise Break("class-definition", "the hash of an object whose class may change")
        return RuntimeNumber(hash, [value])
    if type(value) is TupleValue and not value.is_constant():
        hashes = [_hash(tx, tx.force(item)) for item in value.items]
        if all(item_hash.is_constant() for item_hash in hashes):
            tx.process_bound = "a hash"
            return constant(hash(tuple(_Hashed(item_hash.as_constant()) for item_hash in hashes)))
    return fold(tx, hash, [value], {})


@dataclass
class _Hashed:
    """Stands for an object in the hash of a tuple."""

    number: int

    def __hash__(self) -> int:
        return self.number


def _handled(tx: Tracer) -> Value:
    error = handled(tx)
    if error is None:
        check_outside_handlers(tx)
    return error or NONE


@rule(sys.exc_info)
def _exc_info(tx: Tracer) -> Value:
    error = _handled(tx)
    if error is NONE:
        return tx.tuple_of([NONE, NONE, NONE])
    return tx.tuple_of([tx.type_of(error), error, TRACEBACK])


rule(sys.exception)(_handled)
rule(types.MethodType)(lambda tx, function, owner: tx.bound_method(function, owner))
method(FunctionValue, "__get__")(
    lambda tx, self, instance, owner=NONE: (
        self if instance is NONE else tx.bound_method(self, instance)
    )
)
rule(types.FunctionType.__get__)(FunctionValue.methods["__get__"])
method(BoundMethod, "__get__")(lambda tx, self, *args: self)


for _name in ("_getframe", "gettrace", "settrace", "getprofile", "setprofile"):
    decline("frame-access", f"sys.{_name}", getattr(sys, _name))


@rule(gc.get_objects, gc.get_referrers)
def _all_objects(tx: Tracer, *args: Value, **kwargs: Value) -> NoReturn:
    """Run the frame eagerly: some of the objects are incomplete tuples."""
    _run_as_it_is(tx, "all objects that there are")


@rule(vars)
def _vars(tx: Tracer, value: Value | None = None) -> Value:
    if value is None:
        return tx.builtin(locals)
    variables = optional_attribute(tx, value, "__dict__")
    return variables or tx.raise_(TypeError, "vars() argument must have __dict__ attribute")
