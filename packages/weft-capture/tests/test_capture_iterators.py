"""Iterators of the program inside of lazy builtins; contexts as decorators; odd classes."""

import collections
import ctypes
import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
import weft_capture
from capture_check import eager_backend, same
from torch.nn.attention import SDPBackend, sdpa_kernel

X = torch.tensor([1.0, 2.0, 3.0])


class Restarting:
    """An iterator that begins again when it is asked for `iter`, and notes its calls."""

    def __init__(self):
        self.position, self.calls = 0, []

    def __iter__(self):
        self.calls.append("iter")
        self.position = 0
        return self

    def __next__(self):
        self.calls.append("next")
        self.position += 1
        if self.position > 5:
            raise StopIteration
        return self.position


LAZY = [
    enumerate,
    lambda it: zip(it, range(5)),
    lambda it: zip(range(2), it),
    lambda it: zip(it, it),
    lambda it: enumerate(zip(it, it), 3),
    lambda it: map(lambda a: a + 1, it),
    lambda it: map(abs, map(abs, it)),
    lambda it: filter(lambda a: a % 2, it),
    lambda it: itertools.filterfalse(lambda a: a % 2, it),
    lambda it: itertools.accumulate(it),
    lambda it: itertools.pairwise(it),
    lambda it: itertools.starmap(divmod, zip(it, it)),
    lambda it: itertools.chain(it, [1]),
    lambda it: itertools.chain.from_iterable([it, [1]]),
    lambda it: itertools.cycle(it),
    lambda it: itertools.compress(it, [1, 0, 1]),
    lambda it: itertools.takewhile(lambda a: a < 3, it),
    lambda it: itertools.dropwhile(lambda a: a < 3, it),
    lambda it: itertools.zip_longest(it, range(7)),
    lambda it: itertools.groupby(it, lambda a: a // 2),
    lambda it: itertools.islice(it, 3),
    lambda it: [functools.reduce(lambda a, b: a + b, it)],
]


@pytest.mark.sampled
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("lazy", LAZY, ids=range(len(LAZY)))
def test_iter_is_asked_once(lazy, breaks):
    def function(x):
        it, items = Restarting(), []
        for item in itertools.islice(lazy(it), 9):
            items.append((x * 2, repr(item)[:7]))
            if breaks and len(items) == 1:
                weft_capture.graph_break()
        return items, it.calls

    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        assert same(function(X), captured(X))


class Pair(collections.namedtuple("Pair", "a b")):
    pass


def set_on_named(x, pair):
    new = Pair(x, 2)
    new.c = pair.d = x * 3
    return hasattr(new, "c"), vars(new), new.a + new.c, hasattr(pair, "d"), tuple(pair)


def storages(x):
    kinds = torch.FloatStorage, torch.BoolStorage, torch.LongStorage, torch.TypedStorage
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stores = [x.storage(), x.bool().storage()]
    return [isinstance(store, kind) for store in stores for kind in kinds], x * 2


class Queue(collections.deque):
    pass


class Items(list):
    pass


def extended_by_itself(x):
    plain, items, added = [1, x], Items([1, x]), Items([2])
    queue = Queue([1, x])
    queue.extend(queue)
    plain.extend(plain)
    items.extend(items)
    added += added
    return plain, list(items), len(items), list(added), list(queue)


def with_ctypes(x):
    return x * LIBRARY.abs(-3)


LIBRARY = ctypes.CDLL(None)


@pytest.mark.slow
@pytest.mark.parametrize("function", [set_on_named, storages, extended_by_itself, with_ctypes])
def test_odd_classes(function):
    args = [X, Pair(X, 1)][: function.__code__.co_argcount]
    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        assert same(function(*args), captured(*args))


CONTEXTS = [
    lambda: sdpa_kernel(SDPBackend.MATH),
    lambda: torch.fx.traceback.annotate({"a": 1}),
    lambda: torch.profiler.record_function("name"),
    lambda: torch.autograd.graph.disable_saved_tensors_hooks("message"),
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["on", "below", "inside", "in_cell"])
@pytest.mark.parametrize("context", CONTEXTS, ids=range(len(CONTEXTS)))
def test_contexts_as_decorators(context, where):
    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    decorated = context()(attend)

    def below(q):
        return decorated(q) + 1

    def inside(q):
        return context()(attend)(q) + 1

    def in_cell(q):
        # The graph's end makes the decorated function again: a cell holds it.
        kept = context()(attend)
        return (lambda: kept(q) + 1)()

    function = {"on": decorated, "below": below, "inside": inside, "in_cell": in_cell}[where]
    q = torch.arange(24.0).view(1, 2, 3, 4).sin()
    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        assert torch.equal(function(q), captured(q))


OUTSIDE = [
    lambda: [1, 2],
    lambda: collections.deque([1, 2]),
    lambda: {1: 0, 2: 0}.copy(),
]


@pytest.mark.sampled
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("make", OUTSIDE, ids=["list", "deque", "dict"])
def test_break_after_an_iterator_met_what_was_added(make, steps, backwards):
    def function(x, kept):
        kept.update({3: 0, 4: 0}) if isinstance(kept, dict) else kept.extend([3, 4])
        items = reversed(kept) if backwards else iter(kept)
        taken = [item for item, _ in zip(items, range(steps), strict=False)]
        weft_capture.graph_break()
        return taken, list(items), x + 1

    theirs, ours = make(), make()
    expected = function(X, theirs)
    captured = weft_capture.capture(function, eager_backend)(X, ours)
    assert expected[:2] == captured[:2]
    assert theirs == ours


@pytest.mark.parametrize("items", ["ab", b"ab", (1, 2), [1, 2], range(2), {1: 2}])
def test_an_iterator_at_its_end_crosses_a_break(items):
    def function(x):
        iterator = iter(items)
        seen = list(iterator)
        weft_capture.graph_break()
        return x + 1, seen, list(iterator)

    x = torch.ones(2)
    assert same(weft_capture.capture(function, eager_backend)(x), function(x))
