"""Leaving guards out at the user's own risk: what a guard filter is shown, and ready-made filters.

A filter is passed as `options={"guard_filter_fn": f}`. It gets a list of `GuardEntry` and returns
a boolean for each: whether to keep that guard. UNSAFE: without a guard, compiled code also runs
where it is wrong. It may return wrong values, and a graph that is run on tensors of other sizes
or dtypes than it was compiled for may read and write memory that is not theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from weft_core.errors import InvalidOption

from weft_guards.check import read_source
from weft_guards.guards import Guard
from weft_guards.sources import CallSource, GlobalSource, GlobalsSource, Source

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
}


@dataclass(frozen=True)
class GuardEntry:
    """What a filter is told of one guard.

    Args:
        name: where the value comes from, as `L['x']`.
        guard_type: torch.compile's name for such a guard, or weft's where it has none.
        has_value: whether the value could be read.
        value: the value; None where it could not.
        is_global: whether it is read from the globals of the function.
        modules: the nn.Modules that the value is read through, outermost first; of what a class
            must have, the class where it is one of modules.
        orig_guard: the guard itself, with weft's `kind`, `source` and `payload`.
    """

    name: str
    guard_type: str
    has_value: bool
    value: object
    is_global: bool
    modules: tuple[type, ...]
    orig_guard: Guard
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
    read = _Reader(func, flat_locals)
    try:
        answers = list(keep([read.entry(guard) for guard in guards]))
    except Exception as error:
        detail = f"guard_filter_fn raised {type(error).__name__}: {error}"
        raise InvalidOption("guard_filter_fn", detail=detail) from error
    if len(answers) != len(guards):
        detail = f"guard_filter_fn gave {len(answers)} answers for {len(guards)} guards."
        raise InvalidOption("guard_filter_fn", detail=detail)
    return [guard for guard, kept in zip(guards, answers) if kept]


class _Reader:
    """Describes guards by what their sources give in one call."""

    def __init__(self, func: FunctionType, flat_locals: Sequence[Any]) -> None:
        self.func = func
        self.flat_locals = flat_locals
        self.known: dict[Source, tuple[bool, object]] = {}

    def value(self, source: Source) -> tuple[bool, object]:
        """Return whether a source can be read, and what it gives."""
        if source not in self.known:
            try:
                self.known[source] = True, read_source(source, self.func, self.flat_locals)
            except Exception:
                self.known[source] = False, None
        return self.known[source]

    def entry(self, guard: Guard) -> GuardEntry:
        """Describe one guard."""
        chain = list(_chain(guard.source))
        objects = [self.value(source)[1] for source in reversed(chain)]
        classes = [one if isinstance(one, type) else type(one) for one in objects]
        return GuardEntry(
            guard.source.expr(),
            _TORCH_NAMES.get(guard.kind, guard.kind),
            *self.value(guard.source),
            any(isinstance(source, GlobalSource | GlobalsSource) for source in chain),
            tuple(cls for cls in classes if issubclass(cls, torch.nn.Module)),
            guard,
        )


def _chain(source: Source) -> Iterator[Source]:
    """Yield a source and those it is read from."""
    yield source
    for base in source.arguments if isinstance(source, CallSource) else (source.base,):
        if base is not None:
            yield from _chain(base)


# ---- ready-made filters, by torch.compiler's names

_PROCESS = ("GRAD_MODE", "GLOBAL_STATE")


def keep_portable_guards_unsafe(entries: Iterable[GuardEntry]) -> list[bool]:
    """Keep what does not depend on Python objects: tensors, sizes and torch's own state."""
    kept = ("TENSOR_MATCH", "SHAPE_ENV", *_PROCESS)
    return [entry.guard_type in kept for entry in entries]


def keep_tensor_guards_unsafe(
    entries: Iterable[GuardEntry], keep_parameters: bool = False
) -> list[bool]:
    """Keep what tells about tensors alone; about parameters only where asked."""
    return [
        entry.guard_type == "TENSOR_MATCH"
        and (keep_parameters or not isinstance(entry.value, torch.nn.Parameter))
        for entry in entries
    ]


def skip_guard_on_inbuilt_nn_modules_unsafe(entries: Iterable[GuardEntry]) -> list[bool]:
    """Leave out what is of torch's own modules: they are taken to stay as they are."""
    return [
        not any(cls.__module__.startswith(("torch.nn.", "torch.ao.")) for cls in entry.modules[-1:])
        for entry in entries
    ]


def skip_guard_on_all_nn_modules_unsafe(entries: Iterable[GuardEntry]) -> list[bool]:
    """Leave out what is read through any module: none of them is taken to change."""
    return [not entry.modules for entry in entries]


def skip_guard_on_globals_unsafe(entries: Iterable[GuardEntry]) -> list[bool]:
    """Leave out what is read from globals of the function."""
    return [not entry.is_global for entry in entries]


def skip_all_guards_unsafe(entries: Iterable[GuardEntry]) -> list[bool]:
    """Leave out everything: the first compiled code runs in every later call."""
    return [False for _ in entries]
