"""Leaving guards out at the user's own risk: what a guard filter is shown.

A filter is passed as `options={"guard_filter_fn": f}`. It gets a list of `GuardEntry` and returns
a boolean for each: whether to keep that guard. torch.compiler has ready-made ones.
UNSAFE: without a guard, compiled code also runs where it is wrong. It may return wrong values, and
on tensors of other sizes or dtypes it may read and write memory that is not theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from weft_core.errors import InvalidOption

from weft_guards.check import read_sources
from weft_guards.guards import Guard
from weft_guards.sources import GlobalSource, GlobalsSource, Source

# What torch.compile calls a guard of each kind, for filters that were written for it.
_TORCH_NAMES = {
    "TYPE": "TYPE_MATCH",
    "ID": "ID_MATCH",
    "NONE": "CONSTANT_MATCH",
    "CONST": "EQUALS_MATCH",
    "TENSOR": "TENSOR_MATCH",
    "LEN": "SEQUENCE_LENGTH",
    "DICT_KEYS": "DICT_KEYS_MATCH",
    "ATTR_ABSENT": "NOT_PRESENT_IN_GENERIC_DICT",
    "KEY_ABSENT": "DICT_CONTAINS",
    "ALIAS": "DUPLICATE_INPUT",
    "SHAPE": "SHAPE_ENV",
    "GRAD_MODE": "GLOBAL_STATE",
}


@dataclass(frozen=True)
class GuardOrigin:
    """The guard behind an entry, with what torch.compiler's filters ask of `origin.source`.

    Args:
        guard: the guard: `kind`, `source`, `payload`.
        modules: the classes of the nn.Modules that its value is read through, outermost first.
    """

    guard: Guard
    modules: tuple[type, ...]

    @property
    def source(self) -> GuardOrigin:
        """Return this."""
        return self

    def is_unspecialized_nn_module(self) -> bool:
        """Say whether the value is read through a module."""
        return bool(self.modules)

    def is_unspecialized_builtin_nn_module(self) -> bool:
        """Say whether the value is of one of torch's own modules."""
        return any(cls.__module__.startswith("torch.") for cls in self.modules[-1:])


@dataclass(frozen=True)
class GuardEntry:
    """What a filter is told of one guard; torch.compile shows its filters the same.

    Args:
        name: where the value comes from, as `L['x']`.
        guard_type: torch.compile's name for such a guard, or weft's where it has none.
        has_value: whether the value could be read.
        value: the value; None where it could not.
        is_global: whether it is read from the globals of the function.
        orig_guard: the guard itself.
    """

    name: str
    guard_type: str
    has_value: bool
    value: object
    is_global: bool
    orig_guard: GuardOrigin
    derived_guard_types: tuple[str, ...] = ()


GuardFilter = Callable[[list[GuardEntry]], Sequence[bool]]


def apply_filter(
    keep: GuardFilter, guards: Sequence[Guard], func: FunctionType, flat_locals: Sequence[Any]
) -> list[Guard]:
    """Return the guards that a filter keeps.

    Args:
        keep: the filter.
        guards: those of one entry.
        func: the function called.
        flat_locals: its arguments, as for `CodeCache.lookup`.

    Raises:
        InvalidOption: when the filter raises, or does not answer for each guard.
    """

    @functools.cache
    def value(source: Source) -> tuple[bool, object]:
        try:
            return True, read_sources([source], func, flat_locals)[0]
        except Exception:
            return False, None

    try:
        answers = list(keep([_entry(guard, value) for guard in guards]))
    except Exception as error:
        detail = f"guard_filter_fn raised {type(error).__name__}: {error}"
        raise InvalidOption("guard_filter_fn", detail=detail) from error
    if len(answers) != len(guards):
        detail = f"guard_filter_fn gave {len(answers)} answers for {len(guards)} guards."
        raise InvalidOption("guard_filter_fn", detail=detail)
    return [guard for guard, kept in zip(guards, answers) if kept]


def _entry(guard: Guard, value: Callable[[Source], tuple[bool, object]]) -> GuardEntry:
    """Describe one guard; `value` says whether a source can be read, and what it gives."""
    chain = list(guard.source.chain())
    objects = [value(source)[1] for source in reversed(chain)]
    classes = [one if isinstance(one, type) else type(one) for one in objects]
    return GuardEntry(
        guard.source.expr(),
        _TORCH_NAMES.get(guard.kind, guard.kind),
        *value(guard.source),
        any(isinstance(source, GlobalSource | GlobalsSource) for source in chain),
        GuardOrigin(guard, tuple(cls for cls in classes if issubclass(cls, torch.nn.Module))),
    )
