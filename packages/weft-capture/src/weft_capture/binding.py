"""Binding call arguments to a function's parameters, as CPython does."""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, NoReturn

from weft_capture.breaks import Break
from weft_capture.values.base import Kwargs, Value
from weft_capture.values.constant import constant
from weft_capture.values.containers import TupleValue
from weft_capture.values.dicts import DictValue
from weft_capture.values.functions import FunctionValue

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


def bind_arguments(
    tx: Tracer, function: FunctionValue, args: list[Value], kwargs: Kwargs
) -> dict[str, Value]:
    """Return the locals at the start of a call.

    Raises:
        Raised: with TypeError, when the arguments do not fit.
    """
    code = function.code
    positional, keyword_only = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    bound = dict(zip(names[:positional], args, strict=False))
    extra = args[positional:]
    after = positional + keyword_only
    if code.co_flags & inspect.CO_VARARGS:
        bound[names[after]] = TupleValue(extra)
        after += 1
    elif extra:
        _does_not_fit(tx, function, args, kwargs)
    rest: Kwargs = {}
    by_keyword = names[code.co_posonlyargcount : positional + keyword_only]
    for name, value in kwargs.items():
        if name not in by_keyword:
            rest[name] = value
        elif name in bound:
            _does_not_fit(tx, function, args, kwargs)
        else:
            bound[name] = value
    if code.co_flags & inspect.CO_VARKEYWORDS:
        bound[names[after]] = DictValue([(constant(name), value) for name, value in rest.items()])
    elif rest:
        _does_not_fit(tx, function, args, kwargs)
    if not _fill_defaults(function, bound):
        _does_not_fit(tx, function, args, kwargs)
    return bound


def _fill_defaults(function: FunctionValue, bound: dict[str, Value]) -> bool:
    """Add the defaults of what is not given; False when something is missing."""
    code = function.code
    positional = code.co_argcount
    names = code.co_varnames
    first_default = positional - len(function.defaults)
    for index in range(positional):
        name = names[index]
        if name not in bound:
            if index < first_default:
                return False
            bound[name] = function.defaults[index - first_default]
    for name in names[positional : positional + code.co_kwonlyargcount]:
        if name not in bound:
            if name not in function.kwdefaults:
                return False
            bound[name] = function.kwdefaults[name]
    return True


_EMPTY = (lambda: None).__code__


def _does_not_fit(
    tx: Tracer, function: FunctionValue, args: list[Value], kwargs: Kwargs
) -> NoReturn:
    """Raise CPython's own TypeError, by calling an empty function of the same parameters."""
    code = function.code
    empty = code.replace(
        co_code=_EMPTY.co_code,
        co_consts=_EMPTY.co_consts,
        co_exceptiontable=b"",
        co_flags=code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS),
        co_freevars=(),
        co_cellvars=(),
    )
    stub = types.FunctionType(empty, {}, code.co_name, tuple(function.defaults))
    stub.__qualname__ = function.name
    stub.__kwdefaults__ = dict(function.kwdefaults)
    try:
        stub(*args, **kwargs)
    except TypeError as error:
        tx.raise_real(error)
    raise Break("internal", f"arguments of {function.name}")
