"""Functions under functools.lru_cache or functools.cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily
from weft_capture.attributes import is_trusted
from weft_capture.breaks import Break, NotConstant
from weft_capture.values.base import Kwargs, MutableValue, Output, Tracer, Value
from weft_capture.values.constant import constant, is_constant_object
from weft_capture.values.containers import TupleValue
from weft_capture.values.dicts import DictValue
from weft_capture.values.functions import ObjectConstant
from weft_capture.values.objects import UserObject
from weft_guards import Held
from weft_guards.sources import CallSource, ConstSource, ProgramSource


@dataclass(eq=False)
class CachedFunction(ObjectConstant, MutableValue):
    """A function under functools.lru_cache or functools.cache.

    Called with constants, or objects it knows by identity, the real function is called: its body, a
    warning that is given once, say, runs once in the process as in eager. A constant result is
    taken while the cache has it; else the function behind it is traced, since a cache changes no
    result of a pure function; one of the program's breaks there. Calls count in each run.
    """

    calls: list[tuple[object, list[Value], Kwargs]] = field(default_factory=list)
    changing = ("calls",)

    def replay(self, out: Output) -> None:
        for _, args, kwargs in self.calls:
            named = DictValue([(constant(name), value) for name, value in kwargs.items()])
            out.later(_Again(), self, TupleValue(args), named)

    def call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        from weft_capture.rules.checks import has_checks  # noqa: PLC0415 - import cycle

        handled = tx.transforms or tx.overrides.modes or has_checks(tx.graph)
        found = None if handled else self._call_real(tx, args, kwargs)
        if found is None and not is_trusted(self.obj.__module__):
            raise Break("unknown-call", f"{self.describe()}, which gives objects out of a cache")
        return found or tx.const_object(self.obj.__wrapped__).call(tx, args, kwargs)

    def _call_real(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value | None:
        try:
            real = [_real(tx, arg) for arg in args]
            named = {name: _real(tx, value) for name, value in kwargs.items()}
            asked = functools._make_key(tuple(real), named, True)
            key = (self.obj, asked, [one for one, *_ in self.calls].count(asked))
            if key not in tx.answers:
                with unset_fake_temporarily():
                    tx.answers[key] = self.obj(*real, **named)
            result = tx.answers[key]
        except Exception:  # traced then, to raise in the program where it should
            return None
        if not all(map(is_constant_object, result if type(result) is tuple else [result])):
            return None
        if not is_trusted(self.obj.__module__):
            owner = self.source or ProgramSource(Held(self.obj))
            known = ConstSource(self.obj.cache_info().misses)
            tx.guard(CallSource(_still_knows, (owner, known)), "CONST", True)
            tx.mutate(self)
            self.calls.append((asked, args, kwargs))
        return tx.literal(result)


class _Again:
    """Calls a cached function, but not the first time: capture did."""

    done = True

    def __call__(self, function: Any, args: Any, kwargs: Any) -> None:
        if not self.done:
            function(*args, **kwargs)
        self.done = False


def _still_knows(function: Any, misses: int) -> bool:
    """Say whether a cache still has what it had after so many misses."""
    now = function.cache_info()
    full = now.maxsize is not None and now.currsize >= now.maxsize
    return bool(now.misses == misses or (now.misses > misses and not full))


def _real(tx: Tracer, value: Value) -> Any:
    """Return a constant, or an unchanged object that the cache recognises by identity."""
    value = tx.force(value)
    if not isinstance(value, UserObject) or value.obj is None or value.attrs or value.base_changed:
        return value.as_constant()
    by_identity: Any = object.__hash__
    if value.cls.__hash__ is not by_identity:
        raise NotConstant(value.describe())
    tx.guard_identity(value.source or ConstSource(value.obj), value.obj)
    return value.obj
