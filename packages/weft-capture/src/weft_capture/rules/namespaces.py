"""globals(), locals(), dir, hash, id and the like: what a program asks about itself."""

from __future__ import annotations

import inspect
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

from weft_guards.sources import CallSource, ConstSource

from weft_capture.breaks import Break
from weft_capture.bytecode import decode
from weft_capture.classes import ClassValue
from weft_capture.frames import Frame
from weft_capture.rules.table import rule
from weft_capture.scope import ModuleObject, import_module, load_global, store_global
from weft_capture.values.base import Output, Tracer, Value, method
from weft_capture.values.constant import MADE, NONE, Constant, constant, fold
from weft_capture.values.dicts import DictValue
from weft_capture.values.exceptions import TRACEBACK, handled
from weft_capture.values.functions import FunctionValue
from weft_capture.values.objects import DELETED, UserObject
from weft_capture.values.tensor import TensorValue
from weft_capture.values.wrap import function_value


@dataclass(eq=False)
class GlobalsValue(Value):
    """The globals of a function, read and written one at a time."""

    cls = dict

    function: FunctionValue

    def reconstruct(self, out: Output) -> None:
        out.writer.load_const(self.function.globals)


@rule(__import__)
def _import(tx: Tracer, name: Value) -> Value:
    return import_module(tx, name.as_constant())


@rule(globals)
def _globals(tx: Tracer) -> Value:
    assert tx.frame is not None
    return GlobalsValue(tx.frame.function)


@method(GlobalsValue, "__getitem__")
def _item(tx: Tracer, self: GlobalsValue, key: Value) -> Value:
    name = key.as_constant()
    if name not in self.function.globals and tx.effects.global_value(
        self.function.globals, name
    ) is None:  # fmt: skip
        tx.raise_(KeyError, name)
    return load_global(tx, self.function, name)


@method(GlobalsValue, "get")
def _get(tx: Tracer, self: GlobalsValue, key: Value, default: Value = NONE) -> Value:
    return _item(tx, self, key) if _has(tx, self, key).truth(tx) else default


@method(GlobalsValue, "__contains__")
def _has(tx: Tracer, self: GlobalsValue, key: Value) -> Value:
    if key.as_constant() in self.function.globals:
        return constant(True)
    raise Break("unsupported-value", "a name that is not among the globals")


@method(GlobalsValue, "__setitem__")
def _set(tx: Tracer, self: GlobalsValue, key: Value, value: Value) -> None:
    store_global(tx, self.function, key.as_constant(), value)


def _variables(tx: Tracer) -> dict[str, Value]:
    frame = tx.frame
    assert frame is not None
    if not frame.decoded.flags & inspect.CO_OPTIMIZED:
        raise Break("unknown-call", "locals() in the body of a class")
    found: dict[str, Value] = {}
    names = [*frame.decoded.varnames, *frame.decoded.cellvars, *frame.decoded.freevars]
    for name in dict.fromkeys([*names, *frame.locals]):
        cell = frame.cells.get(name)
        value = frame.locals.get(name) if cell is None else cell.contents
        if value is not None and not name.startswith("."):
            found[name] = value
    return found


@rule(locals)
def _locals(tx: Tracer) -> Value:
    return DictValue([(constant(name), value) for name, value in _variables(tx).items()])


@rule(eval)
def _eval(tx: Tracer, source: Value, *namespaces: Value) -> Value:
    """Trace an expression of the frame's variables as code of its own."""
    frame, text = tx.frame, source.as_constant()
    if namespaces or not isinstance(text, str):
        raise Break("unknown-call", "eval of no text, or with namespaces")
    assert frame is not None
    try:
        code = compile(text.lstrip(" \t"), "<string>", "eval", dont_inherit=True)
    except SyntaxError as error:
        tx.raise_real(error)
    if any(one.opname == "STORE_NAME" for one in decode(code).instrs):
        raise Break("unknown-call", "eval that makes variables")
    made = types.FunctionType(code, frame.function.globals)
    return Frame(tx, function_value(tx, made, ConstSource(made)), _variables(tx), {}).run()


@rule(dir)
def _dir(tx: Tracer, *args: Value) -> Value:
    if not args:
        return tx.literal(sorted(_variables(tx)))
    value = args[0]
    if isinstance(value, ClassValue | ModuleObject | Constant):
        return fold(tx, dir, [value], {})
    if not isinstance(value, UserObject) or value.has_special("__dir__"):
        raise Break("unknown-call", f"dir of {value.describe()}")
    own = {name for name, item in value.attrs.items() if item is not DELETED}
    own |= set(getattr(value.obj, "__dict__", ()))
    if value.obj is not None and value.source is not None:
        tx.instance_dict(value)  # guards the names
    return tx.literal(sorted({*dir(value.cls), *own}))


@dataclass(eq=False)
class RuntimeNumber(Value):
    """A number that only the run knows: an object's id, a thread's. It can be compared."""

    cls = int

    function: Any
    args: list[Value]

    def hash_key(self) -> object:
        return (self.function, *(id(arg) for arg in self.args))

    def same_object(self, other: Value) -> bool:
        return isinstance(other, RuntimeNumber) and self.hash_key() == other.hash_key()

    def call_method(
        self, tx: Tracer, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        other = args[0] if args else None
        if name in ("__eq__", "__ne__") and isinstance(other, RuntimeNumber):
            return constant(self.same_object(other) == (name == "__eq__"))
        raise Break("unsupported-value", f"arithmetic on {self.function.__name__}()")

    def truth(self, tx: Tracer) -> bool:
        return True

    def reconstruct(self, out: Output) -> None:
        out.call(self.function, self.args)


@rule(id)
def _id(tx: Tracer, value: Value) -> Value:
    if isinstance(value, Constant):
        raise Break("unsupported-value", f"id of {value.describe()}")
    return RuntimeNumber(id, [value])


@rule(threading.get_ident)
def _get_ident(tx: Tracer) -> Value:
    return RuntimeNumber(threading.get_ident, [])


@rule(threading.current_thread)
def _current_thread(tx: Tracer) -> Value:
    return tx.wrap(threading.current_thread(), CallSource(threading.current_thread, ()))


@rule(hash)
def _hash(tx: Tracer, value: Value) -> Value:
    if isinstance(value, UserObject) and value.has_special("__hash__"):
        number = value.special(tx, "__hash__").call(tx, [], {})
        fits = number.is_constant() and type(number.as_constant()) is int
        if fits and abs(number.as_constant()) <= sys.maxsize and number.as_constant() != -1:
            return number
        return fold(tx, hash, [number], {})
    if isinstance(value, UserObject | TensorValue | FunctionValue):
        if getattr(value.python_type(), "__hash__", None) is None:
            tx.raise_(TypeError, f"unhashable type: '{value.python_type().__name__}'")
        if value.python_type() in MADE:
            raise Break("unsupported-value", "the hash of an object whose class may still change")
        return RuntimeNumber(hash, [value])
    return fold(tx, hash, [value], {})


@rule(sys.exc_info)
def _exc_info(tx: Tracer) -> Value:
    error = handled(tx)
    if error is None:
        return tx.tuple_of([NONE, NONE, NONE])
    return tx.tuple_of([tx.type_of(error), error, TRACEBACK])


@rule(sys.exception)
def _exception(tx: Tracer) -> Value:
    return handled(tx) or NONE


@rule(types.MethodType)
def _method(tx: Tracer, function: Value, owner: Value) -> Value:
    return tx.bound_method(function, owner)


@rule(types.FunctionType.__get__)
@method(FunctionValue, "__get__")
def _bind(tx: Tracer, self: Value, instance: Value, owner: Value = NONE) -> Value:
    return self if instance is NONE else tx.bound_method(self, instance)
