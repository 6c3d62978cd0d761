"""C functions of the standard library, in Python: capture traces through these in their place.

Written after the documentation; `rules.polyfilled` says which function stands for which. They work
one item at a time, as the originals do, so effects of what they call keep their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_MISSING = object()

# ---- itertools


def takewhile(predicate: Callable[[Any], Any], iterable: Iterable[Any]) -> Iterator[Any]:
    """Give items while the predicate holds."""
    for item in iterable:
        if not predicate(item):
            return
        yield item


def dropwhile(predicate: Callable[[Any], Any], iterable: Iterable[Any]) -> Iterator[Any]:
    """Give items from the first for which the predicate does not hold."""
    iterator = iter(iterable)
    for item in iterator:
        if not predicate(item):
            yield item
            break
    yield from iterator


def filterfalse(predicate: Callable[[Any], Any] | None, iterable: Iterable[Any]) -> Iterator[Any]:
    """Give items for which the predicate does not hold."""
    for item in iterable:
        if not (item if predicate is None else predicate(item)):
            yield item


def compress(data: Iterable[Any], selectors: Iterable[Any]) -> Iterator[Any]:
    """Give items whose selector is true."""
    for item, chosen in zip(data, selectors, strict=False):
        if chosen:
            yield item


def cycle(iterable: Iterable[Any]) -> Iterator[Any]:
    """Give items again and again."""
    saved = []
    for item in iterable:
        yield item
        saved.append(item)
    while saved:
        yield from saved


def islice(iterable: Iterable[Any], *bounds: int | None) -> Iterator[Any]:
    """Give the items that a slice selects."""
    limits = slice(*bounds)
    start, step = limits.start or 0, limits.step or 1
    if start < 0 or step < 1 or (limits.stop is not None and limits.stop < 0):
        raise ValueError("Indices for islice() must be None or an integer: 0 <= x <= sys.maxsize.")
    return _islice(iter(iterable), start, limits.stop, step)


def _islice(iterator: Iterator[Any], start: int, stop: int | None, step: int) -> Iterator[Any]:
    position, wanted = 0, start
    while stop is None or position < stop:
        item = next(iterator, _MISSING)
        if item is _MISSING:
            return
        if position == wanted:
            wanted += step
            yield item
        position += 1


def accumulate(
    iterable: Iterable[Any], func: Callable[[Any, Any], Any] | None = None, *, initial: Any = None
) -> Iterator[Any]:
    """Give running totals."""
    iterator = iter(iterable)
    total = next(iterator, _MISSING) if initial is None else initial
    if total is _MISSING:
        return
    yield total
    for item in iterator:
        total = total + item if func is None else func(total, item)
        yield total


def groupby(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """Give runs of items with equal keys."""
    label, members = _MISSING, []
    for item in iterable:
        mine = item if key is None else key(item)
        if label is not _MISSING and label == mine:
            members.append(item)
            continue
        if label is not _MISSING:
            yield label, iter(members)
        label, members = mine, [item]
    if label is not _MISSING:
        yield label, iter(members)


def tee(iterable: Iterable[Any], n: int = 2) -> tuple[Iterator[Any], ...]:
    """Make several iterators of one."""
    iterator = iter(iterable)
    waiting: list[list[Any]] = [[] for _ in range(n)]

    def branch(mine: list[Any]) -> Iterator[Any]:
        while True:
            if not mine:
                item = next(iterator, _MISSING)
                if item is _MISSING:
                    return
                for one in waiting:
                    one.append(item)
            yield mine.pop(0)

    return tuple(branch(mine) for mine in waiting)


def zip_longest(*iterables: Iterable[Any], fillvalue: Any = None) -> Iterator[Any]:
    """Like zip, but as long as the longest."""
    iterators = [iter(one) for one in iterables]
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


def call_until(function: Callable[[], Any], sentinel: Any) -> Iterator[Any]:
    """Do what `iter(function, sentinel)` does."""
    while (item := function()) != sentinel:
        yield item


# ---- heapq: the invariant is a[k] <= a[2k+1] and a[k] <= a[2k+2]


def _sift_down(heap: list[Any], start: int, at: int) -> None:
    item = heap[at]
    while at > start:
        parent = (at - 1) >> 1
        if not item < heap[parent]:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = item


def _sift_up(heap: list[Any], at: int) -> None:
    end, start, item = len(heap), at, heap[at]
    child = 2 * at + 1
    while child < end:
        right = child + 1
        if right < end and not heap[child] < heap[right]:
            child = right
        heap[at] = heap[child]
        at = child
        child = 2 * at + 1
    heap[at] = item
    _sift_down(heap, start, at)


def heappush(heap: list[Any], item: Any) -> None:
    """Add an item."""
    heap.append(item)
    _sift_down(heap, 0, len(heap) - 1)


def heappop(heap: list[Any]) -> Any:
    """Take the smallest item."""
    last = heap.pop()
    return heapreplace(heap, last) if heap else last


def heapreplace(heap: list[Any], item: Any) -> Any:
    """Take the smallest item, then add one."""
    smallest = heap[0]
    heap[0] = item
    _sift_up(heap, 0)
    return smallest


def heappushpop(heap: list[Any], item: Any) -> Any:
    """Add an item, then take the smallest."""
    if heap and heap[0] < item:
        item, heap[0] = heap[0], item
        _sift_up(heap, 0)
    return item


def heapify(heap: list[Any]) -> None:
    """Order a list as a heap."""
    for at in reversed(range(len(heap) // 2)):
        _sift_up(heap, at)


class _Reversed:
    """An item of a heap with the largest first."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item

    def __lt__(self, other: _Reversed) -> bool:
        return bool(other.item < self.item)


def _as_min_heap(operation: Callable[..., Any], heap: list[Any], *args: Any) -> Any:
    turned = [_Reversed(item) for item in heap]
    result = operation(turned, *(_Reversed(arg) for arg in args))
    heap[:] = [one.item for one in turned]
    return None if result is None else result.item


def heapify_max(heap: list[Any]) -> None:
    """Order a list as a heap with the largest first."""
    _as_min_heap(heapify, heap)


def heapreplace_max(heap: list[Any], item: Any) -> Any:
    """Take the largest item, then add one."""
    return _as_min_heap(heapreplace, heap, item)


def heappop_max(heap: list[Any]) -> Any:
    """Take the largest item."""
    return _as_min_heap(heappop, heap)


# ---- bisect


def bisect_left(
    a: Sequence[Any], x: Any, lo: int = 0, hi: int | None = None, *, key: Any = None
) -> int:
    """Return where to insert x, before equal items."""
    if lo < 0:
        raise ValueError("lo must be non-negative")
    high = len(a) if hi is None else hi
    while lo < high:
        middle = (lo + high) // 2
        if (a[middle] if key is None else key(a[middle])) < x:
            lo = middle + 1
        else:
            high = middle
    return lo


def bisect_right(
    a: Sequence[Any], x: Any, lo: int = 0, hi: int | None = None, *, key: Any = None
) -> int:
    """Return where to insert x, behind equal items."""
    if lo < 0:
        raise ValueError("lo must be non-negative")
    high = len(a) if hi is None else hi
    while lo < high:
        middle = (lo + high) // 2
        if x < (a[middle] if key is None else key(a[middle])):
            high = middle
        else:
            lo = middle + 1
    return lo


def insort_left(
    a: list[Any], x: Any, lo: int = 0, hi: int | None = None, *, key: Any = None
) -> None:
    """Insert x, before equal items."""
    a.insert(bisect_left(a, x if key is None else key(x), lo, hi, key=key), x)


def insort_right(
    a: list[Any], x: Any, lo: int = 0, hi: int | None = None, *, key: Any = None
) -> None:
    """Insert x, behind equal items."""
    a.insert(bisect_right(a, x if key is None else key(x), lo, hi, key=key), x)


# ---- functools, collections, operator


def cmp_to_key(mycmp: Callable[[Any, Any], Any]) -> Any:
    """Make a key of a comparison."""

    class K:
        __slots__ = ("obj",)

        def __init__(self, obj: Any) -> None:
            self.obj = obj

        def __lt__(self, other: K) -> bool:
            return bool(mycmp(self.obj, other.obj) < 0)

        def __gt__(self, other: K) -> bool:
            return bool(mycmp(self.obj, other.obj) > 0)

        def __eq__(self, other: object) -> bool:
            return bool(mycmp(self.obj, other.obj) == 0)  # type: ignore[attr-defined]

    return K


def lru_cache_wrapper(function: Any, maxsize: int | None, typed: bool, info: Any) -> Any:
    """Make the function with a cache that `functools.lru_cache` makes."""
    cache: dict[Any, Any] = {}
    counts = [0, 0]

    def cached(*args: Any, **kwargs: Any) -> Any:
        kinds = tuple(type(arg) for arg in args) if typed else ()
        key = (args, tuple(kwargs.items()), kinds)
        found = cache.pop(key, _MISSING)
        if found is _MISSING:
            counts[1] += 1
            found = function(*args, **kwargs)
            if maxsize is not None and 0 <= maxsize <= len(cache) and cache:
                del cache[next(iter(cache))]
        else:
            counts[0] += 1
        if maxsize != 0:
            cache[key] = found
        return found

    def cache_info() -> Any:
        return info(counts[0], counts[1], maxsize, len(cache))

    def cache_clear() -> None:
        cache.clear()
        counts[:] = [0, 0]

    cached.cache_info = cache_info  # type: ignore[attr-defined]
    cached.cache_clear = cache_clear  # type: ignore[attr-defined]
    return cached


def count_elements(mapping: Any, iterable: Iterable[Any]) -> None:
    """Count items into a mapping."""
    for item in iterable:
        mapping[item] = mapping.get(item, 0) + 1


def count_of(a: Iterable[Any], b: Any) -> int:
    """Count items equal to b."""
    return sum(1 for item in a if item is b or item == b)


def index_of(a: Iterable[Any], b: Any) -> int:
    """Return the position of the first item equal to b."""
    for position, item in enumerate(a):
        if item is b or item == b:
            return position
    raise ValueError("sequence.index(x): x not in sequence")


def delitem(a: Any, b: Any) -> None:
    """Execute `del a[b]`."""
    del a[b]


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


def concat(a: Any, b: Any) -> Any:
    """Add two sequences."""
    return a + b


def call(obj: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call an object."""
    return obj(*args, **kwargs)


def itemgetter(*keys: Any) -> Callable[[Any], Any]:
    """Make what `operator.itemgetter` makes."""
    if len(keys) == 1:
        return lambda obj: obj[keys[0]]
    return lambda obj: tuple(obj[key] for key in keys)


def attrgetter(*names: str) -> Callable[[Any], Any]:
    """Make what `operator.attrgetter` makes."""

    def read(obj: Any, name: str) -> Any:
        for part in name.split("."):
            obj = getattr(obj, part)
        return obj

    if len(names) == 1:
        return lambda obj: read(obj, names[0])
    return lambda obj: tuple(read(obj, name) for name in names)


def methodcaller(name: str, /, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Make what `operator.methodcaller` makes."""
    return lambda obj: getattr(obj, name)(*args, **kwargs)
