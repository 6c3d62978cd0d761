"""functools."""

import functools

import torch

from constructs import case


@functools.lru_cache(maxsize=None)
def cached_square(n):
    return n * n


@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def describe(value):
    return "other"


@describe.register
def _(value: int):
    return "int"


@describe.register(list)
def _(value):
    return "list"


@functools.total_ordering
class Version:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self.n == other.n

    def __lt__(self, other):
        return self.n < other.n


@case
def partial(x):
    add = functools.partial(torch.add, x)
    return add(1), add.func is torch.add, len(add.args)


@case
def partial_keywords(x):
    def f(a, b, c=0, *, d=1):
        return a * b + c * d

    p = functools.partial(functools.partial(f, b=2), c=3)
    return p(x), p(x, d=4), p.keywords


@case
def partial_of_a_partial_over_break(x):
    def f(a, b, c=0):
        return a * b + c

    made = functools.partial(functools.partial(f, b=2), c=int(x.sum()))
    return made(x), made.keywords


@case
def partialmethod(x):
    class C:
        def scale(self, k, y):
            return y * k

        double = functools.partialmethod(scale, 2)

    return C().double(x)


@case
def reduce(x):
    return (
        functools.reduce(lambda a, b: a + b, [x, x, x]),
        functools.reduce(max, [3, 1, 4]), functools.reduce(lambda a, b: a * b, [], 7),
    )  # fmt: skip


@case
def reduce_empty(x):
    try:
        functools.reduce(lambda a, b: a, [])
    except TypeError as error:
        return x + 1, str(error)


@case
def lru_cache_from_outside(x):
    return x + cached_square(3) + cached_square(3)


@case
def recursive_cache(x):
    return x + fibonacci(12)


@case
def lru_cache_made_inside(x):
    calls = []

    @functools.lru_cache(maxsize=None)
    def f(n):
        calls.append(n)
        return n + 1

    return x + f(1) + f(1) + f(2), calls


@case
def cache_of_tensors(x):
    @functools.cache
    def f(n):
        return x * n

    return f(2) + f(2), f(2) is f(2)


@case
def wraps(x):
    def original(y):
        """Original docs."""
        return y

    @functools.wraps(original)
    def wrapper(y):
        return original(y) + 1

    return wrapper(x), wrapper.__name__, wrapper.__doc__


@case
def cmp_to_key(x):
    items = sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a))
    return x + items[0], items


@case
def total_ordering(x):
    return x + 1, Version(1) <= Version(2), Version(3) >= Version(2), Version(1) > Version(1)


@case
def singledispatch(x):
    return x + 1, describe(1), describe([1]), describe("s"), describe(True)


@case
def singledispatchmethod(x):
    class C:
        @functools.singledispatchmethod
        def show(self, v):
            return "other"

        @show.register
        def _(self, v: int):
            return "int"

    return x + 1, C().show(1), C().show("a")


@case
def cached_property_on_argument_class(x):
    class C:
        def __init__(self):
            self.n = 0

        @functools.cached_property
        def value(self):
            self.n += 1
            return self.n

    c = C()
    return x + c.value + c.value, "value" in vars(c)


@case
def partial_as_decorator(x):
    def register(f, name):
        f.registered = name
        return f

    @functools.partial(register, name="n")
    def g(y):
        return y + 1

    return g(x), g.registered


@case
def partial_of_builtin_in_map(x):
    return x + sum(map(functools.partial(pow, 2), [1, 2, 3])), list(
        map(functools.partial(int, base=2), ["10"])
    )


@case
def cmp_to_key_object(x):
    key = functools.cmp_to_key(lambda a, b: a[0] - b[0])
    try:
        made = type(key)()
    except TypeError as error:
        made = str(error)
    least, *_ = sorted([(3, x), (1, x + 1)], key=key)
    return made, type(key).__name__, least, key((1, x)) < key((2, x)), isinstance(key, type)


class OwnPartial(functools.partial):
    """A subclass whose objects have no dict before somebody asks for it."""


@case
def partial_of_own_partial(x):
    inner = OwnPartial(torch.add, x)
    outer = functools.partial(inner, alpha=2)
    return outer.func is torch.add, outer(x), type(inner).__name__
