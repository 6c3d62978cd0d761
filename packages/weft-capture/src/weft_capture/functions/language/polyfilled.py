"""The table of C functions that are traced through a version in Python (see `polyfills`)."""

from __future__ import annotations

import bisect
import builtins
import collections
import functools
import heapq
import importlib
import importlib.util
import itertools
import json
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from weft_core.inlinable import inlinable

from weft_capture import polyfills
from weft_capture.breaks import Break
from weft_capture.functions.generators import TEE, GeneratorValue
from weft_capture.functions.table import find, rule
from weft_capture.model.constant import NONE, constant, real_call
from weft_capture.model.functions import FunctionValue
from weft_capture.model.iterators import iterated
from weft_capture.model.protocol import Kwargs, Output, Raised, Tracer, Value
from weft_capture.tensors.runtime_values import HandleNumber
from weft_capture.tensors.tensor import SymValue

_scanner: Any = importlib.import_module("json.scanner")
_ITERTOOLS = (
    "takewhile", "dropwhile", "cycle", "islice", "accumulate", "groupby", "tee", "zip_longest",
    "batched", "pairwise", "chain",
)  # fmt: skip
_ITERATED = {
    **dict.fromkeys(
        ("cycle", "accumulate", "groupby", "batched", "pairwise", "from_iterable", "islice"),
        slice(1),
    ),
    **dict.fromkeys(("takewhile", "dropwhile", "reduce"), slice(1, 2)),
    **dict.fromkeys(("zip_longest",), slice(None)),
}
"""Arguments that are iterated over when a generator is made, not when it starts."""
_RESUMING = ("takewhile", "dropwhile", "accumulate", "groupby")
"""Those that ask their iterator again when it has ended, as `tee` does; others let go of it."""
_IN_LIBRARY: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (heapq, ("heappush", "heappop", "heapreplace", "heappushpop", "heapify")),
    (heapq, ("_heapify_max", "_heapreplace_max", "_heappop_max")),
    (bisect, ("bisect_left", "bisect_right", "insort_left", "insort_right")),
    (operator, ("delitem", "concat", "call", "countOf", "indexOf", "length_hint")),
    (functools, ("_lru_cache_wrapper",)),
    (collections, ("_count_elements",)),
)
"""C functions of which the standard library has a Python version."""
_GETTERS = {
    operator: ("itemgetter", "attrgetter", "methodcaller"),
    functools: ("cmp_to_key",),
}


def without_c(name: str) -> dict[str, Any]:
    """Return the definitions of a library module without its C accelerator."""

    def find(module_name: str, *args: Any) -> Any:
        if module_name == f"_{name.partition('.')[0]}":
            raise ImportError(module_name)
        return builtins.__import__(module_name, *args)

    loader: Any = importlib.util.find_spec(name).loader  # type: ignore[union-attr]
    namespace = {"__name__": name, "__builtins__": {**vars(builtins), "__import__": find}}
    exec(loader.get_code(name), namespace)
    return namespace


def polyfill(original: Any, version: Any) -> None:
    """Trace calls of `original` through `version`."""

    name = getattr(original, "__name__", "")
    owner = original if isinstance(original, type) else getattr(original, "__self__", None)
    iterated_args = _ITERATED.get(name, slice(0))
    worded = name in ("tee", "_count_elements")
    worded |= getattr(original, "__module__", "") == "_operator"
    callee_errors: Any = (TypeError,) if worded else ()  # errors not raised by a callee

    def run(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
        arguments = list(args)
        if name == "reduce" and not 1 < len(arguments) < 4:
            raise Break("builtin-error", "arguments of reduce")
        try:
            arguments[iterated_args] = [iterated(tx, arg) for arg in arguments[iterated_args]]
        except Raised as raised:  # CPython: functools_reduce
            if name == "reduce" and issubclass(raised.value.python_type(), TypeError):
                tx.raise_(TypeError, "reduce() arg 2 must support iteration")
            raise
        try:
            result = tx.const_object(version).tp_call(tx, arguments, kwargs)
        except Raised as raised:  # its message may differ, too
            error_types = (TypeError, ValueError) if isinstance(original, type) else callee_errors
            by_capture = getattr(raised.value, "stated_in", None) is not None
            if by_capture or issubclass(raised.value.python_type(), error_types):
                raise Break("builtin-error", f"an error of {name}") from None
            raise
        if isinstance(result, GeneratorValue) and isinstance(owner, type):
            result.cls, result.created_by = owner, original
            result.resumes = arguments if name in _RESUMING else ()
        for branch in result.unpack(tx) if original is itertools.tee else ():
            if isinstance(branch, GeneratorValue):
                branch.cls, branch.resumes = TEE, arguments
        if isinstance(result, FunctionValue):
            result.is_placeholder = True
        return result

    rule(original)(run)


for _function in vars(polyfills).values():
    if isinstance(_function, types.FunctionType):
        inlinable(_function)
for _name in _ITERTOOLS:
    if hasattr(itertools, _name):
        polyfill(getattr(itertools, _name), getattr(polyfills, _name))
polyfill(functools.reduce, polyfills.reduce)
polyfill(itertools.chain.from_iterable, polyfills.from_iterable)
polyfill(_scanner.c_make_scanner, _scanner.py_make_scanner)
polyfill(json.JSONEncoder.iterencode, without_c("json.encoder")["JSONEncoder"].iterencode)
polyfill(RemovableHandle.__init__, polyfills.make_handle)
for _name, _check in polyfills.MATRIX_CHECKS.items():
    polyfill(getattr(torch.distributions.constraints, _name).check, _check)


rule(polyfills.stop_value)(lambda tx, iterator: iterator.returned or NONE)
rule(polyfills.next_handle)(
    lambda tx: HandleNumber(0, tx.calls.add(polyfills.next_handle, early=True))
)


@dataclass(eq=False)
class GetterValue(Value):
    """operator.itemgetter, attrgetter or methodcaller; what cmp_to_key returns.

    Args:
        factory: the original callable.
        function: the Python version.
    """

    cls: type
    factory: Callable[..., Any]
    function: Value
    args: list[Value]
    kwargs: Kwargs

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        if len(args) != 1 or kwargs:
            raise Break("builtin-error", f"arguments of the result of {self.cls.__name__}")
        return self.function.tp_call(tx, args, kwargs)

    def reconstruct(self, out: Output) -> None:
        out.call(self.factory, self.args, self.kwargs)


def _getter(factory: Any, version: Any) -> None:
    cls = factory if isinstance(factory, type) else type(factory(len))

    @rule(factory)
    def make(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
        try:
            function = tx.const_object(version).tp_call(tx, list(args), kwargs)
        except Raised:
            raise Break("builtin-error", f"an error of {factory.__name__}") from None
        return GetterValue(cls, factory, function, list(args), kwargs)


for _module in (heapq, bisect, operator, functools, collections):
    _versions = without_c(_module.__name__)
    for _name in {name for o, names in _IN_LIBRARY if o is _module for name in names}:
        polyfill(getattr(_module, _name), _versions[_name])
    for _name in _GETTERS.get(_module, ()):
        _getter(getattr(_module, _name), _versions[_name])

_hint: Any = find(operator.length_hint)


@rule(operator.length_hint)
def _length_hint(tx: Tracer, *args: Value) -> Value:
    hint: Value = _hint(tx, *args)
    for default in args[1:]:  # evaluated first
        real_call(tx, operator.length_hint, None, default.as_constant())
    if isinstance(hint, SymValue):
        return hint
    return constant(real_call(tx, operator.length_hint, None, hint.as_constant()))
