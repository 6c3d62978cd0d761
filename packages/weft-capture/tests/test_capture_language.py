"""Python constructs, each run in eager and captured; results, types and side effects must agree.

`ONE_GRAPH` constructs must be captured whole, the others may break.
"""

import collections
import dataclasses
import enum
import functools
import math
import unicodedata
import zlib

import pytest
import torch
from capture_check import Manager, Pair, X, check


class Point:
    scale = 2

    def __init__(self, x, y=1):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __eq__(self, other):
        return self.x is other.x and self.y == other.y

    def __getitem__(self, i):
        return (self.x, self.y)[i]

    def __len__(self):
        return 2

    def __call__(self, z):
        return self.x * z

    @property
    def total(self):
        return self.x + self.y

    @classmethod
    def make(cls, x):
        return cls(x, 5)

    @staticmethod
    def twice(x):
        return x * 2


class Child(Point):
    def __init__(self, x):
        super().__init__(x, 7)
        self.extra = x - 1

    def __getattr__(self, name):
        if name.startswith("dyn_"):
            return len(name)
        raise AttributeError(name)


@dataclasses.dataclass
class Box:
    x: torch.Tensor
    n: int = 3
    items: list = dataclasses.field(default_factory=list)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Record(collections.OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def arithmetic(x):
    return -x + 2 * x - x / 3 + x**2 + x // 2 + x % 3 + (x @ x.T).sum()


def comparisons(x):
    return (x > 1) & (x <= 4) | (x == 0) ^ (x != 2)


def containers(x):
    a = [x, x + 1]
    a.append(x * 2)
    a += [x.sin()]
    a.insert(0, x.cos())
    b = a.pop()
    first, *rest = a
    d = {"a": first, **{"b": b}}
    d["c"] = tuple(rest)
    d.setdefault("e", []).append(1)
    return d, a[::-1], a[1:3], len(a), {1, 2} | {3}, (*a, 1)


def comprehensions(x):
    squares = [i * x for i in range(3) if i != 1]
    table = {str(i): x + i for i in range(2)}
    unique = {i % 2 for i in range(5)}
    total = sum(i * x for i in range(3))
    return squares, table, unique, total, list(map(lambda t: t + 1, squares))


def loops(x):
    out = []
    for i, (a, b) in enumerate(zip([x, x + 1], (2, 3), strict=True)):
        if i == 5:
            break
        out.append(a * b + i)
    else:
        out.append("else")
    n = 0
    while n < 3:
        n += 1
        if n == 2:
            continue
        x = x + n
    return out, x, n


def star_args(x):
    def f(a, b=2, *args, c, d=4, **kwargs):
        return a * b + c + d + sum(args) + kwargs["e"]

    return f(x, 3, 1, 2, c=5, e=6), f(*[x], **{"c": 1, "e": 2})


def closures(x):
    count = 0

    def add(y):
        nonlocal count
        count += 1
        return x + y + count

    fs = [lambda t, k=k: t * k for k in range(2)]
    return add(1), add(2), count, [f(x) for f in fs]


def returns_closure(x):
    y = x + 1

    def inner():
        return y * 2

    return inner()


def exceptions(x):
    log = []
    try:
        try:
            raise ValueError("no")
        except KeyError:
            log.append("key")
        finally:
            log.append("finally")
    except ValueError as error:
        log.append(str(error))
    else:
        log.append("else")
    try:
        {}["missing"]
    except LookupError:
        x = x + 1
    try:
        int("x")
    except (TypeError, ValueError):
        x = x * 2
    return x, log


def nested_exceptions(x):
    def fail(n):
        if n == 0:
            raise RuntimeError("deep")
        return fail(n - 1)

    try:
        fail(3)
    except RuntimeError as error:
        return x + len(error.args[0])


def with_blocks(x):
    log = []
    with Manager(log) as m, torch.no_grad():
        y = x * 2
        log.append(torch.is_grad_enabled())
        assert m.log is log
    with Manager(log):
        raise ValueError("swallowed")
    return y, log


def objects(x):
    p = Point(x) + Point(x + 1, y=2)
    c = Child(x)
    p.z = 3
    return (p.x, p.y, p.total, p[0], len(p), p(2), Point.make(x).y, Point.twice(x), c.extra, c.y,
            c.dyn_a, p.scale, hasattr(c, "nope"), getattr(c, "nope", 9), isinstance(c, Point),
            type(c).__name__)  # fmt: skip


def returns_objects(x):
    c = Child(x)
    c.friend = Point(x + 1)
    return c, Box(x, items=[1]), Pair(x, b=2), Colour.RED, Record(a=x)


def dataclass_use(x):
    b = Box(x * 2)
    b.items.append(b.n)
    c = dataclasses.replace(b, n=10) if False else Box(b.x + 1, n=10)
    return b.x + c.n, b.items, b.n


def enums(x):
    colour = Colour.RED if x.shape[0] == 2 else Colour.BLUE
    return {Colour.RED: x, Colour.BLUE: -x}[colour], colour.name, colour.value, Colour(2) is colour


def generators(x):
    def numbers(n):
        for i in range(n):
            got = yield x + i
            assert got is None
        return "done"

    def outer():
        result = yield from numbers(2)
        yield result

    g = numbers(3)
    first = next(g)
    return first, list(g), list(outer()), sum(t.sum() for t in numbers(2))


def strings(x):
    percents = "%d" % 3, "%s" % collections.Counter("ab")  # noqa: UP031
    return f"{x.shape[0]}-{3:>4}-{'a'!r}", "a,b".split(","), "-".join(["x", "y"]), percents, x


def matching(x):
    out = []
    for value in (1, (2, 3), {"k": 4}, "s", None):
        match value:
            case 1:
                out.append(x)
            case (a, b):
                out.append(x + a + b)
            case {"k": k}:
                out.append(x * k)
            case str():
                out.append(x - 1)
            case _:
                out.append("other")
    return out


def functional(x):
    f = functools.partial(torch.add, alpha=2)
    return functools.reduce(lambda a, b: a + b, [x, x, x]), f(x, x), math.sqrt(4) * x


def builtins_(x):
    return (sorted([3, 1, 2], key=lambda v: -v), any([0, 1]), all([]), max(1, 2), min([3, 4]),
            abs(-3), list(reversed([1, 2])), divmod(7, 2), callable(len),
            isinstance(x, torch.Tensor), dict(a=1),
            list(filter(None, [0, 1])), round(2.567, 1), x)  # fmt: skip


def inplace(x):
    y = x.clone()
    z = y
    y += 1
    y.mul_(2)
    y[0] = 5
    y[:, 1] -= 1
    return y, z is y, z


def input_mutation(x):
    x.add_(1)
    return x * 2


def tensor_attributes(x):
    b, c = x.shape
    return (
        x.view(c, b),
        x.size(0),
        x.dim(),
        x.dtype,
        x.T,
        x.numel(),
        x.device,
        x.new_zeros(2),
        len(x),
    )


def multiple_outputs(x):
    values, indices = x.max(dim=1)
    top = torch.topk(x, 2)
    return values, indices, top.values, x.split(1), [row for row in x]


def list_argument(x, items):
    items.append(x + 1)
    items[0] = x
    return items


def dict_argument(d):
    d["new"] = d["x"] + 1
    del d["gone"]
    return {k: v for k, v in d.items()}


def object_argument(p):
    p.x = p.x + 1
    p.count = getattr(p, "count", 0) + 1
    return p.x * p.y


def swap_attributes(p):
    p.x, p.y = p.y, p.x
    return p.x


ONE_GRAPH = [
    (arithmetic, X), (comparisons, X), (containers, X), (comprehensions, X), (loops, X),
    (star_args, X), (closures, X), (returns_closure, X), (exceptions, X), (nested_exceptions, X),
    (with_blocks, X), (objects, X), (returns_objects, X), (dataclass_use, X), (enums, X),
    (generators, X), (strings, X), (matching, X), (functional, X), (builtins_, X), (inplace, X),
    (input_mutation, X), (tensor_attributes, X), (multiple_outputs, X), (list_argument, X, [1, 2]),
    (dict_argument, {"x": X, "gone": 1}), (object_argument, Point(X)), (swap_attributes, Point(X)),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("case", ONE_GRAPH, ids=lambda case: case[0].__name__)
def test_captured_whole(case):
    state = check(*case)
    assert not state.breaks
    assert len(state.graphs) <= 1


PURE_CALLS = {
    "zlib.crc32": lambda x: x + zlib.crc32(b"layer.0") % 7,
    "zlib.adler32": lambda x: x + zlib.adler32(b"layer.0", 3) % 7,
    "bytes.fromhex": lambda x: x * bytes.fromhex("0a 0b")[1],
    "unicodedata.normalize": lambda x: x * len(unicodedata.normalize("NFD", "\u00e9")),
    "unicodedata.category": lambda x: (x, unicodedata.category("A"), unicodedata.name("a")),
}


@pytest.mark.parametrize("name", PURE_CALLS)
def test_pure_functions_of_constants_run_while_capturing(name):
    check(PURE_CALLS[name], X)


def test_the_errors_of_a_pure_function_are_eagers():
    def f(x):
        try:
            return x * len(bytes.fromhex("0g"))
        except ValueError as error:
            return x, str(error)

    check(f, X)
