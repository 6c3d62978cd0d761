"""Classes of the program over builtin ones: which method goes first, theirs or the builtin one."""

import collections
import functools

import pytest
import torch
import weft_capture
from capture_check import eager_backend, same

X = torch.tensor([1.0, 1.0, 0.0])
LOG = []


def outcome(function, *args):
    """What a call returns, raises and logs."""
    LOG.clear()
    try:
        result = function(*args)
    except Exception as error:
        result = type(error), str(error)
    return result, list(LOG)


class Odd:
    """Subclassed with a builtin type: what has a truth, a text or a dict of its own already."""

    def __len__(self):
        LOG.append("len")
        return 0

    def __str__(self):
        LOG.append("str")
        return "own"

    def __setattr__(self, name, value):
        LOG.append(("setattr", name))
        object.__setattr__(self, name, value)

    @functools.cached_property
    def once(self):
        LOG.append("once")
        return 3


class Items:
    def __len__(self):
        LOG.append("len")
        return 2

    def __getitem__(self, key):
        LOG.append(key)
        return "abc"[key]


class Failing(Exception):
    """An error that is an iterator, and whose `__iter__` is another one."""

    def __iter__(self):
        LOG.append("iter")
        yield 1

    def __next__(self):
        LOG.append("next")
        self.at = getattr(self, "at", 0) + 1
        return self.at


class OddInt(Odd, int):
    pass


class OddText(Odd, bytes):
    pass


class Tupled(Exception):
    def __setattr__(self, name, value):
        object.__setattr__(self, name, (value,))


class Claiming:
    def __getattribute__(self, name):
        return True


def _claims(classes):
    try:
        return isinstance(Claiming(), classes)
    except TypeError as error:
        return str(error)


def _attribute_of_error():
    error = Tupled(1)
    error.v = 2
    found = error.v
    plain = AssertionError()
    object.__setattr__(plain, "v", 3)
    kept = plain.v
    object.__delattr__(plain, "v")
    return found, kept, hasattr(plain, "v")


def _with_slice():
    items = [1, 2, 3]
    items[1:2] = Items()
    return items


@pytest.mark.parametrize(
    "program",
    [
        lambda: "full" if OddInt(1) else "empty",
        lambda: "full" if Odd() else "empty",
        lambda: (OddInt() or 2, not OddInt(3)),
        lambda: str(AssertionError(OddText(b"a"))),
        lambda: str(KeyError(OddText(b"a"))),
        lambda: repr(ValueError(OddText(b"a"), 2)),
        lambda: (str(ValueError("a", 2)), str(KeyError("a")), str(KeyError()), repr(KeyError([1]))),
        lambda: [item := Odd(), item.once, item.once, vars(item)][1:],
        lambda: ",".join(Items()),
        lambda: list(iter(Items())),
        _with_slice,
        _attribute_of_error,
        lambda: (_claims(collections.abc.Sized), _claims(list), _claims(Claiming)),
        lambda: (list(Failing()), next(iter(Failing()))),
    ],
)
def test_builtin_bases_go_first(program):
    def function(x):
        return program(), x * 2

    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        ours, eager = outcome(captured, X), outcome(function, X)
        assert same(eager, ours), (eager, ours)


class Missing(collections.defaultdict):
    pass


class Half(float):
    def __rmul__(self, other):
        return "own"


class Indexed(int):
    def __index__(self):
        LOG.append("index")
        return 1


class Ordered(collections.OrderedDict):
    def __setitem__(self, key, value):
        LOG.append(key)
        super().__setitem__(key, value)


class Keyed(collections.OrderedDict):
    def keys(self):
        LOG.append("keys")
        return ["a"]

    def __getitem__(self, key):
        LOG.append(key)
        return 7


class Places(list):
    def __len__(self):
        LOG.append("len")
        return super().__len__()

    def __getitem__(self, key):
        LOG.append(("getitem", key))
        return super().__getitem__(key)

    def __index__(self):
        LOG.append("index")
        return 1


def _missed(made):
    made[3].append(1)
    return made["k"], dict(made), len(made), made.default_factory


@pytest.mark.parametrize(
    ("program", "make"),
    [
        (_missed, lambda: Missing(list)),
        (lambda made: (made[1], dict(made)), lambda: Missing(None, {1: 2})),
        (lambda made: X * made, lambda: Half(2)),
        (lambda made: X.expand(made), lambda: Missing(int)),
        (lambda made: [type(n) for n in (made % 2**70, made | 0, made + 0)], lambda: Indexed(2)),
        (lambda made: (range(5)[made], [4, 5, 6, 7][made], "abcd"[made:]), lambda: Indexed(2)),
        (lambda made: (list(Ordered(a=1)), made.update(b=2)), lambda: Ordered(c=3)),
        (lambda made: (Ordered([("a", 1)], b=2), made.update({"d": 4})), lambda: Ordered(c=3)),
        (lambda made: made.extend(Items()), collections.deque),
        (lambda made: ({**made}, dict(made), (lambda **k: k)(**made)), lambda: Keyed(b=1)),
        (lambda made: X.view(3, 1)[made], lambda: Places([2, 0])),
        (lambda made: X[made] + torch.tensor(made).sum(), lambda: Places([2, 0, 1])),
        (lambda made: (torch.zeros(made), X.new_ones(made)), lambda: Places([2, 3])),
        (lambda made: sorted([3, 1], reverse=made), lambda: True),
        (lambda made: sorted([3, 1], reverse=made), list),
    ],
)
def test_arguments_of_subclassed_builtins(program, make):
    logs = []
    captured = weft_capture.capture(lambda x, made: (program(made), x * 2), eager_backend)
    for function in (lambda x, made: (program(made), x * 2), captured):
        for _ in range(2):
            made = make()
            logs.append((outcome(function, X, made), made))
    assert same(logs[0], logs[2]), logs
    assert same(logs[1], logs[3]), logs


class AttributeDict(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


def test_attributes_that_are_the_items_of_a_dict():
    def function(x, given):
        given.last = x + 1
        del given.old
        made = AttributeDict(scale=2)
        made.result = x * made.scale
        try:
            del made.missing
        except KeyError:
            made.scale += 1
        return dict(made), vars(made), made.result + given.last, [*given], type(made)

    captured = weft_capture.capture(function, eager_backend, fullgraph=True)
    for _ in range(2):
        one, other = AttributeDict(old=1, kept=2), AttributeDict(old=1, kept=2)
        assert same(captured(X, one), function(X, other))
        assert same(dict(one), dict(other))
        assert not vars(one)
