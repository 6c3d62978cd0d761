"""Methods of set and frozenset: those of a real set of the elements' hash keys."""

from __future__ import annotations

from weft_capture.rules.dicts import missing_key
from weft_capture.values.base import Tracer, Value, method
from weft_capture.values.constant import NONE, constant, real_call
from weft_capture.values.containers import SetValue

_OF_ONE = ("add", "discard", "remove")
_GROWING = ("add", "update", "__ior__")
_ALGEBRA = ("intersection", "difference", "symmetric_difference")
_CHANGING = frozenset(
    (*_OF_ONE, "pop", "clear", "update", "__init__", "__ior__", "__iand__", "__isub__", "__ixor__")
    + tuple(f"{name}_update" for name in _ALGEBRA)
)
_ASKING = (*_ALGEBRA, "union", "issubset", "issuperset", "isdisjoint")


def call_set(tx: Tracer, self: SetValue, name: str, *args: Value) -> Value:
    """Call a method of a set, an operator's included; operands of an operator are sets."""
    if not hasattr(self.cls, name):
        text = f"'{self.cls.__name__}' object has no attribute '{name}'"
        tx.raise_(AttributeError, text)
    known: dict[object, Value] = {}
    real: list[object] = []
    for arg in args:
        items = [arg] if name in _OF_ONE else arg.unpack(tx)
        keys = [item.hash_key() for item in items]
        known |= zip(keys, items, strict=True)
        whole = arg.order if isinstance(arg, SetValue) else keys
        real.append(keys[0] if name in _OF_ONE else whole)
    if name == "remove" and not known.keys() <= self.entries.keys():
        missing_key(tx, args[0])
    known |= self.entries
    if name in _CHANGING and hasattr(self.cls, "add"):
        tx.mutate(self)
    result = real_call(tx, getattr(self.order, name), *real)
    if name in _CHANGING:
        _update_entries(self, name, known)
    if result is self.order:
        return self
    if isinstance(result, set):
        made = SetValue([], cls=self.cls)
        made.order, made.entries = result, {key: known[key] for key in result}
        return made
    return known[result] if name == "pop" else constant(result)


def _update_entries(self: SetValue, name: str, known: dict[object, Value]) -> None:
    """Make the entries those of the keys again; equal elements keep the first."""
    if name in _GROWING:
        self.entries |= known
    else:
        self.entries = {key: known[key] for key in self.order}
        self.removals += 1


def _set_method(name: str) -> None:
    @method(SetValue, name)
    def call(tx: Tracer, self: SetValue, *args: Value) -> Value:
        if name == "__init__" and self.cls is frozenset:
            return NONE
        return call_set(tx, self, name, *args)


for _name in (*_CHANGING, *_ASKING):
    if not _name.startswith("__i") or _name == "__init__":
        _set_method(_name)


@method(SetValue, "copy", "__copy__")
def _copy(tx: Tracer, self: SetValue) -> Value:
    return self if self.cls is frozenset else call_set(tx, self, "copy")
