"""Functions under functools.lru_cache or functools.cache.

Called with constants, or objects it knows by identity, the real function is called: its body, a
warning that is given once, say, runs once in the process as in eager. A constant result is taken;
with any other result or argument the function behind it is traced, since a cache changes no
result of a pure function.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily
from weft_capture.breaks import NotConstant
from weft_capture.values.base import Kwargs, Tracer, Value
from weft_capture.values.constant import is_constant_object
from weft_capture.values.functions import ObjectConstant
from weft_capture.values.objects import UserObject
from weft_guards.sources import ConstSource


class CachedFunction(ObjectConstant):
    """A `functools._lru_cache_wrapper`."""

    def call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        known, result = self._call_real(tx, args, kwargs)
        if known:
            return tx.literal(result)
        return tx.const_object(self.obj.__wrapped__).call(tx, args, kwargs)

    def _call_real(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> tuple[bool, Any]:
        if tx.transforms or tx.overrides.modes:
            return False, None
        try:
            real = [_real(tx, arg) for arg in args]
            named = {name: _real(tx, value) for name, value in kwargs.items()}
        except NotConstant:
            return False, None
        try:
            with unset_fake_temporarily():
                result = self.obj(*real, **named)
        except Exception:  # traced below, to raise in the program where it should
            return False, None
        return _is_plain(result), result


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


def _is_plain(result: Any) -> bool:
    if type(result) is tuple:
        return all(map(_is_plain, result))
    return is_constant_object(result)
