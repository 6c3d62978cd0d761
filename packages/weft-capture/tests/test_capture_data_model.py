"""Which object CPython asks, in which order, and what a StopIteration holds: as in eager."""

import collections
import functools
import itertools
import operator
import sys

import pytest
import torch
import weft_capture
from capture_check import eager_backend, same

X = torch.tensor([1.0, 1.0, 0.0])
LOG = []
PLAIN = "ab"


class Word(str):
    pass


class Point(collections.namedtuple("Point", "a b")):
    pass


class Reflected(list):
    def __rmul__(self, other):
        return "rmul"

    def __radd__(self, other):
        return "radd"


class List(list):
    pass


class Steps:
    """An iterator that counts on after its end, and can fail or end with a value."""

    def __init__(self, end, error=None):
        self.end, self.at, self.error = end, 0, error

    def __iter__(self):
        return self

    def __next__(self):
        LOG.append(("next", self.at))
        self.at += 1
        if self.at == self.end and self.error is not None:
            raise self.error
        if self.at > self.end:
            raise StopIteration("ended")
        return self.at


class NextAlone(Exception):
    def __next__(self):
        raise StopIteration


class ItemsAlone:
    def __getitem__(self, at):
        return [1, 2][at]


class Sized:
    def __iter__(self):
        LOG.append("iter")
        return iter([3, 4])

    def __len__(self):
        LOG.append("len")
        return 2


class IterIsNone:
    def __iter__(self):
        raise TypeError("not this one")


def noted(items):
    for item in items:
        LOG.append(str(item))
        yield item
    return "returned"


def stops(*args):
    if args[-1] == 1:
        raise StopIteration("by a function")
    return True


def fails(*args):
    if args[-1] == 1:
        raise ValueError("bad")
    return args[-1]


def stepped(iterator, count=6):
    """What `next` gives and raises, also behind the end."""
    iterator, seen = iter(iterator), []
    for _ in range(count):
        try:
            seen.append(str(type(next(iterator))))
        except StopIteration as stop:
            seen.append(("stop", stop.value))
        except ValueError as error:
            seen.append(str(error))
    return seen


def delegated(iterator):
    LOG.append((yield from iterator))


def about(error):
    return error and (type(error).__name__, str(error), about(error.__context__))


def outcome(function, *args):
    """What a call returns, raises and logs."""
    LOG.clear()
    try:
        result = function(*args)
    except Exception as error:
        result = about(error)
    return result, list(LOG)


def check(program, *args):
    """Compare the program in eager and captured, each twice."""

    def function(x, *args):
        return program(*args), x * 2

    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        ours, eager = outcome(captured, X, *args), outcome(function, X, *args)
        assert same(eager, ours), (eager, ours)
        assert repr(type(eager[0][0])) == repr(type(ours[0][0]))


_C_ITERATORS = {
    "map": lambda it: map(lambda *a: a, it),
    "map of two": lambda it: map(lambda *a: a, it, noted([1, 2, 3])),
    "zip": lambda it: zip(it, range(9)),
    "strict zip": lambda it: zip(it, it, strict=True),
    "filter": lambda it: filter(None, it),
    "enumerate": enumerate,
    "chain": lambda it: itertools.chain(it, [7]),
    "from_iterable": lambda it: itertools.chain.from_iterable([it]),
    "islice": lambda it: itertools.islice(it, 9),
    "short islice": lambda it: itertools.islice(it, 1),
    "cycle": lambda it: itertools.islice(itertools.cycle(it), 5),
    "accumulate": lambda it: itertools.accumulate(it, lambda a, b: b),
    "takewhile": lambda it: itertools.takewhile(bool, it),
    "dropwhile": lambda it: itertools.dropwhile(lambda v: v < 2, it),
    "filterfalse": lambda it: itertools.filterfalse(lambda v: v < 2, it),
    "pairwise": itertools.pairwise,
    "compress": lambda it: itertools.compress(it, [1, 0, 1]),
    "starmap": lambda it: itertools.starmap(lambda *a: a, zip(it)),
    "zip_longest": lambda it: itertools.zip_longest(it, [1]),
    "groupby": lambda it: (key for key, _ in itertools.groupby(it)),
    "tee": lambda it: itertools.tee(it)[0],
    "tee twice": lambda it: itertools.chain(*itertools.tee(it)),
    "iter": iter,
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", _C_ITERATORS)
@pytest.mark.parametrize("made", [lambda: noted([1, 2]), lambda: Steps(2)])
@pytest.mark.parametrize("use", [stepped, lambda it: list(delegated(it))])
def test_end_of_an_iterator_in_c(name, made, use):
    check(lambda: use(_C_ITERATORS[name](made())))


_CALLING = {
    "map": lambda f: map(f, range(4)),
    "filter": lambda f: filter(f, range(4)),
    "accumulate": lambda f: itertools.accumulate(range(4), f),
    "takewhile": lambda f: itertools.takewhile(f, range(4)),
    "dropwhile": lambda f: itertools.dropwhile(f, [2, 1, 0, 3]),
    "filterfalse": lambda f: itertools.filterfalse(f, range(4)),
    "starmap": lambda f: itertools.starmap(f, zip(range(4))),
    "groupby": lambda f: (key for key, _ in itertools.groupby(range(4), f)),
    "chain": lambda f: itertools.chain(map(f, range(4)), [7]),
    "zip": lambda f: zip(range(5), map(f, range(4))),
    "list": lambda f: [list(map(f, range(4)))],
    "a loop": lambda f: [[each for each in map(f, range(4))]],
    "sum": lambda f: [sum(map(f, range(4)))],
    "sorted": lambda f: sorted(range(4), key=f),
    "reduce": lambda f: [functools.reduce(f, range(4))],
    "calls": lambda f: iter(functools.partial(lambda it: f(next(it)), iter(range(4))), 3),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", _CALLING)
@pytest.mark.parametrize("function", [stops, fails])
def test_error_of_a_function_that_an_iterator_calls(name, function):
    check(lambda: stepped(_CALLING[name](function)))


PROGRAMS = [
    # The text itself where nothing of a format is replaced.
    *(lambda right=right: Word("ab") % right for right in ({}, (), [1], b"ab", X, range(2))),
    lambda: Word("ab") % 3,
    lambda: Word("a%s") % 3,
    lambda: Word("%%") % {},
    lambda: Word("") % {},
    lambda: Word("ab").format(1),
    lambda: PLAIN % collections.deque([1]),
    # Number slots come before sequence slots.
    lambda: [1] * Reflected(),
    lambda: Point(1, 2) + Reflected(),
    lambda: operator.iadd(Point(1, 2), torch.Size([1])),
    lambda: operator.iadd(List([1]), Reflected()),
    lambda: operator.imul(List([1]), Reflected()),
    lambda: operator.imul(Reflected([1]), 2),
    lambda: operator.imul(bytearray(b"a"), "x"),
    lambda: operator.imod(2.5, (1, 2)),
    # An item is hashed, or looked at, before the next one is asked for.
    *(
        lambda made=made: made(noted([1, [1], 2]))
        for made in (set, frozenset, dict.fromkeys, collections.Counter, {1}.union, {1}.update)
    ),
    lambda: dict(noted([(1, 2), 3, (3, 4)])),
    lambda: dict(noted([(1, 2), X.sum()])),
    lambda: operator.ior({}, X),
    lambda: collections.OrderedDict([X.sum()]),
    *(lambda it=it: functools.reduce(max, it) for it in (3, None, IterIsNone(), X.sum())),
    lambda: list(itertools.starmap(max, [Sized(), [1, 2]])),
    lambda: (operator.mul((1, 2), bytearray(b"a")),),
    # What has `__next__` alone is no iterable.
    *(lambda use=use: use(NextAlone()) for use in (iter, list, set, sum, dict, sorted, zip, next)),
    lambda: type(iter(ItemsAlone())).__name__,
    lambda: functools.reduce(max, ItemsAlone()),
]


@pytest.mark.sampled
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_eager(program):
    check(program)


@pytest.mark.parametrize("symbol", ["imul", "iadd", "ior", "imod", "ilshift"])
def test_operands_from_outside(symbol):
    function = getattr(operator, symbol)
    for operands in ((range(0), Point(1, 2)), (2.5, 2.5), (2.5, 0.5), ("a", 2.5)):
        check(function, *operands)
    captured = weft_capture.capture(lambda x, a, b: (function(a, b), x * 2), eager_backend)
    for number in (0.5, 1.5, 2.5):  # from the second on it varies
        ours, eager = outcome(captured, X, number, 2.0), outcome(function, number, 2.0)
        assert same(ours[0][0] if ours[0][0] == eager[0] else ours[0], eager[0])


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 2**70, 1j, 2.5])
def test_numbers_beside_symbolic_ones(number):
    functions = [getattr(operator, name) for name in ("ge", "lt", "eq", "ne", "add", "mul", "sub")]

    def function(x, a, b):
        pairs = [pair for size in (b, x.shape[0]) for pair in ((a, size), (size, a))]
        return [outcome(f, *pair) for f in functions for pair in pairs], x + 1

    captured = weft_capture.capture(function, eager_backend)
    for size in (2, 3, 4):
        x = torch.ones(size)
        assert repr(captured(x, number, size)) == repr(function(x, number, size))


def _largest(x):
    return functools.reduce(max, x), x


def _both(x):
    first, second = x.sum(), x.prod()
    return max(first, second), first


def _both_reversed(x):
    return _both(x)[::-1]


def _of_rows(x):
    rows = x * 2
    return max(rows[0], rows[1]).view(1), rows


@pytest.mark.parametrize("function", [_largest, _both, _both_reversed, _of_rows])
def test_result_that_is_one_of_several(function):
    captured = weft_capture.capture(function, eager_backend)
    for run in (function, captured, captured):
        one, other = run(X.clone())
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def scaled(x, by=1.5, *more, shift=0.25):
    return x * by + shift


def unread(x, by=1.5, *, shift=0.25):
    return 4


def test_defaults_that_no_code_reads():
    def function(x):
        return x + 1, [outcome(scaled, "b", 2.0), outcome(unread, 4)]

    captured = weft_capture.capture(function, eager_backend)
    states = [((1.5,), {"shift": 0.25}), (None, {"shift": 1}), ((2.0,), None), ((), {"a": 1})]
    try:
        for defaults, keywords in [*states, states[0]]:
            for target in (scaled, unread):
                target.__defaults__, target.__kwdefaults__ = defaults, keywords
            assert captured(X)[1] == function(X)[1]
    finally:
        for target in (scaled, unread):
            target.__defaults__, target.__kwdefaults__ = states[0]


def _context(x):
    try:
        torch._C._log_api_usage_once("a")
        raise KeyError(4)
    except KeyError as error:
        return about(error), x + 1


def _reraised(x):
    try:
        raise
    except Exception as error:
        return about(error), x + 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # handlers that run eagerly
@pytest.mark.parametrize(
    "function", [_context, _reraised, lambda x: (str(sys.exc_info()[1]), sys.exception(), x + 1)]
)
def test_exception_that_a_caller_handles(function):
    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        assert same(captured(X), function(X))
        try:
            raise IndexError("outside")
        except IndexError:
            assert same(captured(X), function(X))


class Mapped(dict):
    def __getitem__(self, key):
        LOG.append(key)
        return super().__getitem__(key)

    def keys(self):
        return ["b"]


def test_mapping_pattern_asks_get():
    def program(subject):
        match subject:
            case {"a": 1, "b": value}:
                return "two", value
            case {"a": value, **rest}:
                return value, rest
        return subject

    for subject in (Mapped(a=2, b=3), {"a": 1, "b": 5}, {"a": 3, "c": 4}, collections.Counter("z")):
        check(lambda subject=subject: program(subject))


class Hidden:
    """A context manager whose attributes are other ones than its class's methods."""

    def __init__(self):
        self.__exit__ = 3

    def __getattribute__(self, name):
        return True

    def __enter__(self):
        LOG.append("enter")

    def __exit__(self, kind, error, trace):
        LOG.append(str(error))
        return True


def test_with_asks_the_class():
    def program():
        with Hidden():
            torch._C._log_api_usage_once("a")
            raise KeyError(3)

    check(program)
