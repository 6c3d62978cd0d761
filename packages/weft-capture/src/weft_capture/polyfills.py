"""Polyfills: C functions of the standard library in Python, which capture traces instead.

These have no Python version in the standard library, and follow the documentation. The others are
loaded by `functions.language.polyfilled`, which has the table. They work item by item, as the
originals do, so side effects of the functions that they call keep their order.
"""

from __future__ import annotations

import copyreg
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_MISSING = object()
_Steps = Generator[Any, None, Any]


def stop_value(iterator: Iterator[Any]) -> Any:
    """Return the value of the StopIteration with which an iterator just ended.

    Iterators in C that take the item of another one hand its StopIteration on; those that call
    PyIter_Next for it do not. Capture has a rule for this (`functions.language.polyfilled`).
    """
    raise NotImplementedError(iterator)


_copyreg: Any = copyreg

# ---- itertools


def takewhile(predicate: Callable[[Any], Any], iterable: Iterable[Any], /) -> _Steps:
    """Give items while the predicate holds."""
    iterator = iter(iterable)
    for item in iterator:
        if not predicate(item):
            return None
        yield item
    return stop_value(iterator)


def dropwhile(predicate: Callable[[Any], Any], iterable: Iterable[Any], /) -> _Steps:
    """Give items from the first for which the predicate does not hold."""
    iterator = iter(iterable)
    for item in iterator:
        if not predicate(item):
            yield item
            return (yield from iterator)
    return stop_value(iterator)


def cycle(iterable: Iterable[Any], /) -> Iterator[Any]:
    """Give items again and again."""
    saved = []
    for item in iterable:
        yield item
        saved.append(item)
    while saved:
        yield from saved


def islice(iterable: Iterable[Any], /, *bounds: int | None) -> Iterator[Any]:
    """Give the items that a slice selects."""
    limits = slice(*bounds)
    start, step = limits.start or 0, limits.step or 1
    numbers = [bound for bound in bounds if bound is not None]
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or step < 1:
        raise ValueError(bounds)  # the original's message differs
    return _islice(iter(iterable), start, limits.stop, step)


def _islice(iterator: Iterator[Any], start: int, stop: int | None, step: int) -> _Steps:
    position, next_index = 0, start
    while stop is None or position < stop:
        item = next(iterator, _MISSING)
        if item is _MISSING:
            return stop_value(iterator)
        if position == next_index:
            next_index += step
            yield item
        position += 1
    return None


def accumulate(
    iterable: Iterable[Any], func: Callable[[Any, Any], Any] | None = None, *, initial: Any = None
) -> _Steps:
    """Give running totals."""
    iterator = iter(iterable)
    total = next(iterator, _MISSING) if initial is None else initial
    if total is _MISSING:
        return stop_value(iterator)
    yield total
    for item in iterator:
        total = total + item if func is None else func(total, item)
        yield total
    return stop_value(iterator)


def reduce(function: Callable[[Any, Any], Any], iterable: Iterable[Any], /, *initial: Any) -> Any:
    """Combine items with a function."""
    iterator = iter(iterable)
    total = initial[0] if initial else next(iterator, _MISSING)
    if total is _MISSING:
        raise TypeError("reduce() of empty iterable with no initial value")
    for item in iterator:
        total = function(total, item)
    return total


def groupby(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """Give runs of items with equal keys; a run ends when the next one is asked for."""
    iterator = iter(iterable)
    item = label = current = _MISSING
    number = 0

    def step() -> bool:
        nonlocal item, label
        item = next(iterator, _MISSING)
        if item is not _MISSING:
            label = item if key is None else key(item)
        return item is not _MISSING

    def run(group: int, group_key: Any) -> Iterator[Any]:
        nonlocal item
        while number == group and (item is not _MISSING or step()) and [group_key] == [label]:
            next_item, item = item, _MISSING
            yield next_item

    while True:
        number += 1
        while label is _MISSING or (current is not _MISSING and [current] == [label]):
            if not step():
                return
        current = label
        yield label, run(number, current)


def tee(iterable: Iterable[Any], n: int = 2, /) -> tuple[Iterator[Any], ...]:
    """Make several iterators of one."""
    iterator = iter(iter(iterable))  # (CPython: tee_fromiterable)
    waiting: list[list[Any]] = [[] for _ in range(n)]

    def branch(items: list[Any]) -> Iterator[Any]:
        while True:
            if not items:
                item = next(iterator, _MISSING)
                if item is _MISSING:
                    return
                for queue in waiting:
                    queue.append(item)
            yield items.pop(0)

    return tuple(branch(queue) for queue in waiting)


def zip_longest(*iterables: Iterable[Any], fillvalue: Any = None) -> Iterator[Any]:
    """Like zip, but as long as the longest."""
    iterators = [iter(iterable) for iterable in iterables]
    done = [False] * len(iterators)
    while iterators:
        row = []
        for number, iterator in enumerate(iterators):
            item = _MISSING if done[number] else next(iterator, _MISSING)
            if item is _MISSING:
                done[number] = True
                item = fillvalue
            row.append(item)
        if all(done):
            return
        yield tuple(row)


def batched(iterable: Iterable[Any], n: int, *, strict: bool = False) -> Iterator[Any]:
    """Give tuples of n items."""
    if n < 1:
        raise ValueError("n must be at least one")
    iterator = iter(iterable)
    while batch := tuple(islice(iterator, n)):
        if strict and len(batch) != n:
            raise ValueError("batched(): incomplete batch")
        yield batch


def pairwise(iterable: Iterable[Any], /) -> _Steps:
    """Give each item with the one before it."""
    iterator = iter(iterable)
    before = next(iterator, _MISSING)
    while before is not _MISSING and (item := next(iterator, _MISSING)) is not _MISSING:
        yield before, item
        before = item
    return stop_value(iterator)


def chain(*iterables: Iterable[Any]) -> Iterator[Any]:
    """Give the items of all parts."""
    for iterable in iterables:
        yield from iterable


def from_iterable(iterables: Iterable[Any]) -> Iterator[Any]:
    """Do what `itertools.chain.from_iterable` does."""
    for iterable in iterables:
        yield from iterable


def items_of(sequence: Any) -> Iterator[Any]:
    """Do what `iter` does to an object that has `__getitem__` alone."""
    for position in itertools.count():
        try:
            item = sequence[position]
        except (IndexError, StopIteration):
            return
        yield item


def backwards(sequence: Any, left: int) -> Iterator[Any]:
    """Do what `reversed` does to an object that has a length and items."""
    while left:
        left -= 1
        try:
            item = sequence[left]
        except (IndexError, StopIteration):
            return
        yield item


def calls(function: Callable[[], Any], sentinel: Any) -> Iterator[Any]:
    """Do what `iter(function, sentinel)` does."""
    while True:
        try:
            item = function()
        except StopIteration:
            return
        if [sentinel] == [item]:
            return
        yield item


# ---- torch


def next_handle() -> int:
    """Return the number of a new handle of a hook, which runs for real (`polyfilled`)."""
    RemovableHandle.next_id += 1
    return RemovableHandle.next_id - 1


def make_handle(self: Any, hooks_dict: Any, *, extra_dict: Any = None) -> None:
    """Do what `RemovableHandle.__init__` does."""
    self.hooks_dict_ref = weakref.ref(hooks_dict)
    self.id = next_handle()
    extra = [extra_dict] if isinstance(extra_dict, dict) else extra_dict
    self.extra_dict_ref = tuple(map(weakref.ref, extra)) if isinstance(extra, list) else ()


# ---- torch.distributions.constraints: the checks, without a branch on a tensor


def is_symmetric(self: Any, value: Any) -> Any:
    """Do what `_Symmetric.check` does."""
    if value.shape[-2] != value.shape[-1]:
        return torch.full(value.shape[:-2], False, device=value.device)
    return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)


def is_positive_semidefinite(self: Any, value: Any) -> Any:
    """Do what `_PositiveSemidefinite.check` does."""
    symmetric = is_symmetric(self, value)
    if value.shape[-2] != value.shape[-1]:
        return symmetric
    kept = torch.where(symmetric.all(), value, 0)  # of NaN there are no eigenvalues
    return torch.where(symmetric.all(), torch.linalg.eigvalsh(kept).ge(0).all(-1), symmetric)


def is_positive_definite(self: Any, value: Any) -> Any:
    """Do what `_PositiveDefinite.check` does."""
    symmetric = is_symmetric(self, value)
    if value.shape[-2] != value.shape[-1]:
        return symmetric
    return torch.where(symmetric.all(), torch.linalg.cholesky_ex(value).info.eq(0), symmetric)


MATRIX_CHECKS = {
    "_Symmetric": is_symmetric,
    "_PositiveSemidefinite": is_positive_semidefinite,
    "_PositiveDefinite": is_positive_definite,
}


# ---- sorting


# ---- object, for copy


def reduce_object(self: Any) -> Any:
    """Do what `object.__reduce_ex__` does from protocol 2 on."""
    cls: Any = type(self)
    if cls.__reduce__ is not object.__reduce__:
        return self.__reduce__()
    args: Any = self.__getnewargs__() if hasattr(cls, "__getnewargs__") else ()
    if not isinstance(args, tuple):
        raise TypeError(f"__getnewargs__ should return a tuple, not '{type(args).__name__}'")
    state = self.__getstate__()
    items = iter(self) if isinstance(self, list) else None
    pairs = iter(self.items()) if isinstance(self, dict) else None
    return _copyreg.__newobj__, (cls, *args), state, items, pairs


def get_state(self: Any, names: list[str]) -> Any:
    """Do what `object.__getstate__` does of an object whose class has slots of these names."""
    state = getattr(self, "__dict__", None) or None
    slots = {name: getattr(self, name) for name in names if hasattr(self, name)}
    return (state, slots) if slots else state


# ---- re


def matches(pattern: Any, string: Any, count: int) -> tuple[Any, ...]:
    """Return what `pattern.sub` finds; it depends on nothing else, and is computed at once."""
    return tuple(itertools.islice(pattern.finditer(string), count or None))


def substitute(pattern: Any, function: Callable[[Any], Any], string: Any, count: int) -> Any:
    """Do what `pattern.sub(function, string, count)` does."""
    pieces, end = [], 0
    for match in matches(pattern, string, count):
        pieces.append(string[end : match.start()])
        piece = function(match)
        if piece is not None:
            pieces.append(piece)
        end = match.end()
    pieces.append(string[end:])
    return string[:0].join(pieces)


# ---- collections


def update_items(mapping: Any, other: Any = (), /, **more: Any) -> None:
    """Do what `OrderedDict.update` does, which stores by `__setitem__` (mutablemapping_update)."""
    if hasattr(other, "keys"):
        for key in other.keys():  # noqa: SIM118  (as CPython does)
            mapping[key] = other[key]
    else:
        for key, value in other:
            mapping[key] = value
    for key, value in more.items():
        mapping[key] = value
