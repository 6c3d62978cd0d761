"""Binding call arguments to a function's parameters: the interpreter itself does it."""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING

from weft_capture.bytecode import Decoded
from weft_capture.values.base import Kwargs, Value
from weft_capture.values.constant import constant
from weft_capture.values.containers import TupleValue
from weft_capture.values.dicts import DictValue

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer
    from weft_capture.values.functions import FunctionValue

_LOCALS = (lambda: locals()).__code__


def bind_arguments(
    tx: Tracer, decoded: Decoded, function: FunctionValue, args: list[Value], kwargs: Kwargs
) -> dict[str, Value]:
    """Return the locals at the start of a call.

    Raises:
        Raised: with CPython's own TypeError, when the arguments do not fit.
    """
    binder = decoded.derived.get("binder")
    if binder is None:
        binder = decoded.derived["binder"] = _binder(function.code)
    stub = types.FunctionType(binder, {}, None, tuple(function.defaults))
    stub.__qualname__ = function.name
    stub.__kwdefaults__ = dict(function.kwdefaults)
    try:
        bound: dict[str, Value] = stub(*args, **kwargs)
    except TypeError as error:
        tx.raise_real(error)
    for name, given in bound.items():
        if isinstance(given, tuple):
            bound[name] = TupleValue(given)
        elif isinstance(given, dict):
            bound[name] = DictValue([(constant(key), value) for key, value in given.items()])
    return bound


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
