"""Binding call arguments to a function's parameters, as CPython does."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

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
        text = (
            f"{function.name}() takes {positional} positional arguments but {len(args)} were given"
        )
        tx.raise_(TypeError, text)
    rest: Kwargs = {}
    by_keyword = names[code.co_posonlyargcount : positional + keyword_only]
    for name, value in kwargs.items():
        if name not in by_keyword:
            rest[name] = value
        elif name in bound:
            tx.raise_(TypeError, f"{function.name}() got multiple values for argument '{name}'")
        else:
            bound[name] = value
    if code.co_flags & inspect.CO_VARKEYWORDS:
        bound[names[after]] = DictValue([(constant(name), value) for name, value in rest.items()])
    elif rest:
        name = next(iter(rest))
        tx.raise_(TypeError, f"{function.name}() got an unexpected keyword argument '{name}'")
    _fill_defaults(tx, function, bound)
    return bound


def _fill_defaults(tx: Tracer, function: FunctionValue, bound: dict[str, Value]) -> None:
    code = function.code
    positional = code.co_argcount
    names = code.co_varnames
    first_default = positional - len(function.defaults)
    for index in range(positional):
        name = names[index]
        if name in bound:
            continue
        if index < first_default:
            tx.raise_(TypeError, f"{function.name}() missing required argument: '{name}'")
        bound[name] = function.defaults[index - first_default]
    for name in names[positional : positional + code.co_kwonlyargcount]:
        if name in bound:
            continue
        if name not in function.kwdefaults:
            tx.raise_(TypeError, f"{function.name}() missing required keyword argument: '{name}'")
        bound[name] = function.kwdefaults[name]
