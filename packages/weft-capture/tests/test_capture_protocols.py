"""Iteration, errors and effects of objects of the program's classes, in eager's order and words."""

import collections
import functools
import itertools
import operator
import types
from typing import NamedTuple

import pytest
import torch
import weft_capture
from capture_check import eager_backend

X = torch.tensor([1.0, -2.0, 3.0])
LOG = []
TWO = "%s %s"
PLAIN = "ab"


class Plain:
    def __init__(self, v=1):
        self.v = v


class Steps:
    """An iterator that begins again whenever it is asked for `iter`."""

    def __init__(self, end=3):
        self.end, self.at = end, 0

    def __iter__(self):
        LOG.append("iter")
        self.at = 0
        return self

    def __next__(self):
        LOG.append("next")
        self.at += 1
        if self.at > self.end:
            raise StopIteration
        return self.at


class Items:
    def __init__(self, *items):
        self.items = items

    def __getitem__(self, at):
        LOG.append(("item", at))
        return self.items[at]

    def __length_hint__(self):
        LOG.append("hint")
        return 2


class Tuple(tuple):
    pass


class Three(int):
    pass


class List(list):
    pass


class Reflected:
    def __radd__(self, other):
        return "radd", other


class Pair(NamedTuple):
    v: int
    w: object = None


class Float(float):
    pass


class Text(str):
    pass


class Default(collections.defaultdict):
    def __init__(self, v):
        super().__init__(v)


class Looked(dict):
    def __getattribute__(self, name):
        LOG.append(name)
        return super().__getattribute__(name)


class Keyed(dict):
    def keys(self):
        return ["other"]

    def __getitem__(self, key):
        return 5


class Asked:
    def __getattr__(self, name):
        LOG.append(name)
        raise AttributeError(name)

    def __iter__(self):
        return iter([(1, 2)])


def helper(*args, **kwargs):
    return args, kwargs


def star_unpacked(*values):
    found = []
    for value in values:
        a, *b = value
        found.append((a, b))
    return found


def slice_assigned(items):
    values = [1, 2]
    values[0:1] = items
    return values


@functools.cache
def cached(n):
    LOG.append(n)
    return n * 2


def cached_between():
    cached.cache_clear()
    LOG.append("before")
    return cached(1), LOG.append("between"), cached(1), cached(2)


def group_is_derived():
    try:
        try:
            raise ExceptionGroup("g", [ValueError(1), KeyError(2)])
        except* TypeError:
            pass
    except Exception as error:
        return error.__suppress_context__, len(error.exceptions)


def noting():
    try:
        yield 1
        yield 2
    finally:
        LOG.append("closed")


def dropped_zip():
    z = zip([1], noting())
    found = next(z)
    torch._C._log_api_usage_once("break")
    del z
    LOG.append("behind")
    return found


def unpacked(value):
    a, b = value
    return a, b


PROGRAMS = [
    lambda: star_unpacked(Steps(), Items(1, 2, 3), "abc", {1: 2, 3: 4}, (k for k in range(3))),
    lambda: slice_assigned(Steps()),
    lambda: "-".join(map(str, Steps())),
    lambda: list(itertools.product(range(2), itertools.dropwhile(bool, Steps()))),
    lambda: list(itertools.combinations(Items(1, 2, 3), 2)),
    lambda: list(itertools.tee(Steps())[0]),
    lambda: helper(*Items(1, 2)),
    lambda: (max(Items(1, 2)), dict([Steps(2)]), dict.fromkeys(Items("a")), set(Items(1))),
    lambda: ({1}.isdisjoint(Steps()), {1}.intersection(Steps()), {1, 9}.difference(Steps())),
    lambda: ({1} & {True}, {1, 2} & {True}, {1} | {True}, {1}.intersection([True])),
    lambda: Looked(a=1).missing,
    lambda: (repr(Pair(4, X)), TWO % Pair(1, 2), TWO % Tuple((1, X)), TWO[:2] % X.shape),
    lambda: "{0.v} {0.v!r:>5}".format(Plain(2)),
    dropped_zip,
    lambda: (dict(Keyed(a=1, b=2)), {**Keyed(a=1)}, dict(Asked())),
    cached_between,
    group_is_derived,
    # errors, in the interpreter's words
    lambda: functools.reduce(max, []),
    lambda: vars(Tuple),
    lambda: vars(1),
    lambda: types.SimpleNamespace(a=1).q,
    lambda: [3] * Tuple((1, 2)),
    lambda: list(Float(2)),
    lambda: [1][Text("a")],
    lambda: Plain()[1:2],
    lambda: operator.setitem(Plain(), 1, 2),
    lambda: operator.delitem(Plain(), 1),
    lambda: +Plain(),
    lambda: Text("a") < (1, 2),
    lambda: Plain() ** (1, 2),
    lambda: 1 in Plain(),
    lambda: [*Plain(), 1],
    lambda: helper(*Plain()),
    lambda: helper(**Plain()),
    lambda: helper(**{1: 2}),
    lambda: helper(a=1, **{"a": 2}),
    lambda: unpacked(Plain()),
    lambda: "".join(Plain()),
    lambda: [1].index(Pair(4, 2)),
    lambda: "{0.v} {0:x}".format(Plain()),
    lambda: iter(Plain(), 3),
    lambda: functools.reduce(max, [1], 2, 3),
    lambda: Plain().__setattr__("a"),
    lambda: super(Plain, Plain()).__getattribute__(),
    lambda: Default(3),
    # Operators of sequences, and their errors.
    lambda: "" * Tuple((1, 2)),
    lambda: [1, 2] * 2**70,
    lambda: 1.5 * [1],
    lambda: (1,) + torch.Size([2]),
    lambda: collections.defaultdict([1]),
    lambda: operator.iadd([], Reflected()),
    lambda: slice(1, 2) < (1, 2),
    lambda: int | Plain(),
    lambda: PLAIN % collections.Counter("ab"),
    lambda: PLAIN % [1],
    lambda: (sum(range(10**6)), max(range(10**6)), min(range(3, 10**6)), sum(range(0), 2)),
    lambda: max(range(0)),
    lambda: sum(range(3), "a"),
    lambda: operator.imul(Three(3), [1]),
    lambda: operator.iadd(List([]), Reflected()),
    lambda: (1,) + X.size(),
]


def seen(function):
    """Return what a call gives or raises, and what it logs."""
    LOG.clear()
    try:
        result = repr(function(X)[0])
    except Exception as error:
        result = type(error), str(error), repr(error.__context__)
    return result, list(LOG)


@pytest.mark.sampled
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_eager(program):
    def function(x):
        return program(), x * 2

    def caught(x):
        try:
            return program(), x * 2
        except Exception as error:
            return (type(error), str(error)), x

    for one in (function, caught):
        captured = weft_capture.capture(one, eager_backend)
        expected = seen(one)
        assert seen(captured) == expected
        assert seen(captured) == expected


def test_texts_of_a_dict_that_loses_them():
    def function(d, x):
        a, k = d["l"]
        del d["l"]
        d["q"] = k
        d["l"] = (k, a)
        return x * 2

    captured = weft_capture.capture(function, eager_backend)
    ours, eager = ({"l": ("b", "a"), "q": 1} for _ in range(2))
    for _ in range(3):
        captured(ours, X)
        function(eager, X)
        assert ours == eager
