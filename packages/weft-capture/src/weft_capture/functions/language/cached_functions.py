"""Functions under functools.lru_cache or functools.cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from weft_guards import WeakIdentity
from weft_guards.sources import Builder, CallSource, ConstSource, ProgramSource, RootSource, Source

from weft_capture.breaks import Break, NotConstant
from weft_capture.model.attributes import is_immutable_module
from weft_capture.model.constant import Constant, constant, is_constant_object
from weft_capture.model.containers import ListValue, SizeValue, TupleValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import ObjectConstant
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Kwargs, MutableValue, Output, Tracer, Value
from weft_capture.tensors.tensor import SymValue


@dataclass(eq=False)
class CachedFunction(ObjectConstant, MutableValue):
    """A function under functools.lru_cache or functools.cache.

    With constants, or objects compared by identity, the real function is called, so that its
    body runs once in the process as in eager; a function of the program must be pure, one of an
    installed library may warn. A constant result is used while the cache holds it; otherwise the
    wrapped function is traced, since a cache does not change the result of a pure function. For a
    function of the program, other results are the objects in the cache. With symbolic sizes a pure
    function is traced, and its results may only be read. Calls count in each run.
    """

    calls: list[tuple[object, list[Value], Kwargs]] = field(default_factory=list)
    changing = ("calls",)

    def replay(self, out: Output) -> None:
        for key, args, kwargs in self.calls:
            keywords = DictValue([(constant(name), value) for name, value in kwargs.items()])
            out.later(_RepeatedCall(key is not None), self, TupleValue(args), keywords)

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        from weft_capture.effects.checks import has_checks  # noqa: PLC0415 - import cycle

        if tx.rehearsed is not None:
            return self._call_once(tx, tx.rehearsed, args, kwargs)
        handled = tx.transforms or tx.overrides.modes or has_checks(tx.graph)
        call = self._trace if _vary([*args, *kwargs.values()]) else self._call_real
        result = None if handled else call(tx, args, kwargs)
        if result is None and not is_immutable_module(self.obj.__module__):
            raise Break("cached-function", f"{self.describe()}, which returns objects of a cache")
        return result or tx.const_object(self.obj.__wrapped__).tp_call(tx, args, kwargs)

    def _call_once(
        self, tx: Tracer, results: dict[object, Value], args: list[Value], kwargs: Kwargs
    ) -> Value:
        """Trace the function, once for the same arguments."""
        function = tx.const_object(self.obj.__wrapped__)
        if kwargs or not all(arg.is_constant() for arg in args):
            return function.tp_call(tx, args, kwargs)
        key = self.obj, *(arg.tp_hash() for arg in args)
        if key not in results:
            results[key] = function.tp_call(tx, args, kwargs)
        return results[key]

    def _call_real(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value | None:
        try:
            real = [_real(tx, arg) for arg in args]
            keywords = {name: _real(tx, value) for name, value in kwargs.items()}
            cache_key = functools._make_key(tuple(real), keywords, True)
            key = (self.obj, cache_key, [previous for previous, *_ in self.calls].count(cache_key))
            if key not in tx.answers:
                immutable = is_immutable_module(self.obj.__module__)
                if not (immutable or _is_installed(self.obj.__wrapped__)):
                    self._rehearse(tx, args, kwargs)
                with unset_fake_temporarily():
                    tx.answers[key] = self.obj(*real, **keywords)
            result = tx.answers[key]
        except Exception:  # traced instead, so that it raises in the program
            return None
        plain = all(map(is_constant_object, result if type(result) is tuple else [result]))
        if not is_immutable_module(self.obj.__module__):
            owner = self.source or ProgramSource(WeakIdentity(self.obj))
            misses = ConstSource(self.obj.cache_info().misses)
            tx.guard(CallSource(_still_has_entries, (owner, misses)), "CONST", True)
            tx.mutate(self)
            self.calls.append((cache_key, args, kwargs))
            return tx.literal(result) if plain else tx.wrap(result, _object_source(result))
        return tx.literal(result) if plain else None

    def _rehearse(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> None:
        """Break where the function does more than compute: its effects have their place."""
        from weft_capture.effects.rehearsals import rehearsal  # noqa: PLC0415 - import cycle

        before, tx.rehearsed = tx.rehearsed, {}
        try:
            with rehearsal(tx, self.describe(), []):
                tx.const_object(self.obj.__wrapped__).tp_call(tx, args, kwargs)
        finally:
            tx.rehearsed = before

    def _trace(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value | None:
        from weft_capture.effects.rehearsals import isolated  # noqa: PLC0415 - import cycle

        # A library that caches by the identity of its objects takes them for unchanging; an object
        # of the program may have changed since.
        by_identity = _is_installed(self.obj.__wrapped__) and not kwargs
        fixed = all(
            type(arg) in _FIXED or (by_identity and _is_by_identity(arg))
            for arg in map(tx.force, args)
        )
        if is_immutable_module(self.obj.__module__) or not fixed:
            return None
        with isolated(tx, self.describe()) as nodes:
            result = tx.const_object(self.obj.__wrapped__).tp_call(tx, args, kwargs)
        if not all(isinstance(node.meta["example_value"], _NUMBERS) for node in nodes):
            return None
        for item in list(result.items) if type(result) is TupleValue else [result]:
            mutable = isinstance(item, ListValue | DictValue)
            leaves = item.unpack(tx) if mutable else [item]
            if not all(type(leaf) in (Constant, SymValue) for leaf in leaves):
                return None
            if mutable and item.source is None:
                item.source = _InCache(tx.steps.now)
        tx.mutate(self)
        self.calls.append((None, args, kwargs))
        return result


_NUMBERS = (int, torch.SymInt, torch.SymBool)
_FIXED = (Constant, SymValue, TupleValue, SizeValue)
_LIBRARIES = {"site-packages", "dist-packages"}


def _is_installed(function: Any) -> bool:
    """Say whether a function is of an installed library, whose caches hold values or warnings."""
    code = getattr(function, "__code__", None)
    return code is not None and not _LIBRARIES.isdisjoint(Path(code.co_filename).parts)


def _vary(values: Sequence[Value]) -> bool:
    return any(
        _vary(value.items) if isinstance(value, TupleValue) else isinstance(value, SymValue)
        for value in values
    )


@dataclass(frozen=True, eq=False)
class _InCache(RootSource):
    """The source of a mutable object in a cache, which other callers share: it may not change."""

    step_of_node: int

    text = "a cache"

    def emit(self, builder: Builder) -> None:
        raise Break(
            "cached-function", "an object of a cache is changed or returned", self.step_of_node
        )


def _object_source(result: object) -> Source:
    try:
        return CallSource(WeakIdentity(result).get, ())
    except TypeError:  # it takes no weak reference
        return ConstSource(result)


class _RepeatedCall:
    """Calls a cached function, except the first time where capture has called it."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def __call__(self, function: Any, args: Any, kwargs: Any) -> None:
        if not self.done:
            function(*args, **kwargs)
        self.done = False


def _still_has_entries(function: Any, misses: int) -> bool:
    """Say whether a cache still has the entries it had at this number of misses."""
    now = function.cache_info()
    full = now.maxsize is not None and now.currsize >= now.maxsize
    return bool(now.misses == misses or (now.misses > misses and not full))


def _is_by_identity(value: Value) -> bool:
    """Say whether a value is an unchanged object from outside that is hashed by its identity."""
    outside = isinstance(value, UserObject) and value.obj is not None
    by_identity: Any = object.__hash__
    return outside and not value.attrs and value.cls.__hash__ is by_identity  # type: ignore[attr-defined]


def _real(tx: Tracer, value: Value) -> Any:
    """Return a constant, or an unchanged object that the cache compares by identity."""
    value = tx.force(value)
    if not isinstance(value, UserObject) or value.obj is None or value.attrs or value.base_changed:
        return value.as_constant()
    if not _is_by_identity(value):
        raise NotConstant(value.describe())
    tx.guard_identity(value.source or ConstSource(value.obj), value.obj)
    return value.obj
