"""Guards on the defaults of functions, which may be replaced, where no code reads them."""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from weft_guards.sources import AttrSource, ConstSource

from weft_capture.model.dicts import LazyValue
from weft_capture.model.protocol import Tracer

FunctionValue = Any  # of `model.functions`, which imports this module


def _replaceable(function: FunctionValue) -> types.FunctionType | None:
    """Return the function from outside whose defaults may be replaced, None for another one."""
    fixed = function.source is None or isinstance(function.source, ConstSource)
    return None if fixed else function.obj


def guard_defaults(tx: Tracer, function: FunctionValue) -> None:
    """Guard how many defaults there are, and their names: they do not fit a call."""
    obj, source = _replaceable(function), function.source
    if obj is None or source is None:
        return
    given, named = obj.__defaults__, obj.__kwdefaults__
    fact = ("LEN", len(given)) if given else ("CONST", given)
    tx.guard(AttrSource(source, "__defaults__"), *fact)
    if obj.__code__.co_kwonlyargcount and named != {}:
        tx.guard(AttrSource(source, "__kwdefaults__"), "DICT_KEYS" if named else "CONST", named)


def watch_unread(tx: Tracer, function: FunctionValue, bound: Iterable[object]) -> None:
    """Guard, at the end of the capture, that the defaults exist which a call took and never read.

    Without them the call raises.
    """
    if _replaceable(function) is None:
        return
    defaults = {*map(id, function.defaults), *map(id, function.kwdefaults.values())}
    used = [v for v in bound if isinstance(v, LazyValue) and id(v) in defaults]
    if unread := [value for value in used if value.forced is None]:
        tx.watch(_UnreadDefaults(function, unread))


@dataclass(eq=False)
class _UnreadDefaults:
    """Defaults that no code had read when the call began."""

    function: FunctionValue
    values: list[LazyValue]

    def check(self, tx: Tracer, out: object) -> None:
        """Guard those that are still unread."""
        assert self.function.obj is not None
        for value in self.values:
            source: Any = value.source
            if value.forced is None and isinstance(source.key, int):
                tx.guard(source.base, "LEN", len(self.function.obj.__defaults__ or ()))
            elif value.forced is None:
                tx.guard(source.base, "DICT_KEYS", self.function.obj.__kwdefaults__)
