"""Which C functions are traced through a version of theirs in Python (see `polyfills`)."""

from __future__ import annotations

import bisect
import functools
import heapq
import importlib
import itertools
import operator
import types
from typing import TYPE_CHECKING, Any

from weft_capture import polyfills
from weft_capture.frames import GeneratorValue
from weft_capture.rules.table import RULES, rule
from weft_capture.values.base import Kwargs, Value
from weft_capture.values.functions import FunctionValue

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer

_heapq = importlib.import_module("_heapq")
_collections = importlib.import_module("_collections")
_MODULES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (itertools, ("takewhile", "dropwhile", "filterfalse", "compress", "cycle", "islice")),
    (itertools, ("accumulate", "groupby", "tee", "zip_longest", "batched")),
    (heapq, ("heappush", "heappop", "heapreplace", "heappushpop", "heapify")),
    (bisect, ("bisect_left", "bisect_right", "insort_left", "insort_right")),
    (operator, ("delitem", "concat", "call")),
)
_RENAMED: tuple[tuple[Any, str, Any], ...] = (
    (functools, "cmp_to_key", polyfills.cmp_to_key),
    (functools, "_lru_cache_wrapper", polyfills.lru_cache_wrapper),
    (_collections, "_count_elements", polyfills.count_elements),
    (_heapq, "_heapify_max", polyfills.heapify_max),
    (_heapq, "_heapreplace_max", polyfills.heapreplace_max),
    (_heapq, "_heappop_max", polyfills.heappop_max),
    (operator, "countOf", polyfills.count_of),
    (operator, "indexOf", polyfills.index_of),
)


def polyfill(original: Any, version: types.FunctionType) -> None:
    """Trace calls of `original` through `version`."""

    def run(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
        result = tx.const_object(version).call(tx, list(args), kwargs)
        if isinstance(result, GeneratorValue) and isinstance(original, type):
            result.original = original
        if isinstance(result, FunctionValue):
            result.made_at = tx.steps.now
        return result

    RULES[original] = run


for _function in vars(polyfills).values():
    if isinstance(_function, types.FunctionType):
        _function.__dict__["_weft_inline"] = True
for _method in (polyfills._Reversed.__init__, polyfills._Reversed.__lt__):
    _method.__dict__["_weft_inline"] = True
for _module, _names in _MODULES:
    for _name in _names:
        if hasattr(_module, _name):
            polyfill(getattr(_module, _name), getattr(polyfills, _name))
for _module, _name, _version in _RENAMED:
    if hasattr(_module, _name):
        polyfill(getattr(_module, _name), _version)


class GetterValue(Value):
    """operator.itemgetter, attrgetter or methodcaller.

    Args:
        factory: which of them.
        function: what does its work.
    """

    __slots__ = ("args", "factory", "function", "kwargs")

    def __init__(self, factory: type, function: Value, args: list[Value], kwargs: Kwargs) -> None:
        super().__init__(None)
        self.factory = factory
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def python_type(self) -> type:
        return self.factory

    def call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        return self.function.call(tx, args, kwargs)

    def reconstruct(self, out: Output) -> None:
        out.call(self.factory, self.args, self.kwargs)


def _getter(factory: Any, version: Any) -> None:
    @rule(factory)
    def make(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
        function = tx.const_object(version).call(tx, list(args), kwargs)
        return GetterValue(factory, function, list(args), kwargs)


_getter(operator.itemgetter, polyfills.itemgetter)
_getter(operator.attrgetter, polyfills.attrgetter)
_getter(operator.methodcaller, polyfills.methodcaller)
