"""copy.copy and copy.deepcopy: the library's Python is traced; `__reduce_ex__` has a rule."""

from __future__ import annotations

import copy
import copyreg
import types

from weft_capture import polyfills
from weft_capture.breaks import Break
from weft_capture.functions.table import rule
from weft_capture.model.attributes import lookup
from weft_capture.model.constant import NONE, Constant, is_constant_object
from weft_capture.model.containers import ListValue, SetValue, TupleValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import FunctionValue, ObjectConstant
from weft_capture.model.iterators import DequeValue
from weft_capture.model.objects import OBJECT_METHODS, ModuleValue, UserObject
from weft_capture.model.protocol import Tracer, Value, method
from weft_capture.tensors.tensor import TensorValue

_SHARED = (Constant, FunctionValue, ObjectConstant)
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
    name = "copy" if hasattr(value.python_type(), "copy") else "__copy__"
    return value.call_method(tx, name, [], {})


@rule(copy.deepcopy)
def _deepcopy(tx: Tracer, value: Value, memo: Value = NONE) -> Value:
    value = tx.force(value)
    _check(value)
    if isinstance(value, _SHARED):
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


@method(SetValue, "__reduce_ex__")
def _reduce_set(tx: Tracer, self: SetValue, protocol: Value) -> Value:
    made_of = TupleValue([ListValue(self.unpack(tx))])
    return TupleValue([tx.const_object(self.cls), made_of])


@method(DictValue, "__reduce_ex__")
def _reduce_dict(tx: Tracer, self: DictValue, protocol: Value) -> Value:
    made_of = TupleValue([] if self.default_factory is NONE else [self.default_factory])
    pairs = self.call_method(tx, "items", [], {}).tp_iter(tx)
    return TupleValue([tx.const_object(self.cls), made_of, NONE, NONE, pairs])


@method(DequeValue, "__reduce_ex__")
def _reduce_deque(tx: Tracer, self: DequeValue, protocol: Value) -> Value:
    made_of = TupleValue([TupleValue([]), self.tp_getattro(tx, "maxlen")])
    return TupleValue([tx.type_of(self), made_of, NONE, self.tp_iter(tx)])
