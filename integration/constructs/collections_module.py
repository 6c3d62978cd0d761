"""collections."""

import collections
import operator
import types
import typing

import torch

from constructs import case

Pair = collections.namedtuple("Pair", "a b", defaults=[5])


@case
def namedtuple(x):
    p = Pair(x, 2)
    q = p._replace(b=4)
    return p.a + q.b, p._fields, q._asdict()["b"], Pair(1), p[1], Pair._make([1, 2])


@case
def namedtuple_unpack_and_compare(x):
    a, b = Pair(x, 3)
    return (
        a + b,
        Pair(1, 2) == (1, 2),
        Pair(1, 2) < Pair(1, 3),
        repr(Pair(1, 2)),
        isinstance(Pair(1), tuple),
    )


@case
def namedtuple_made_inside(x):
    Point = collections.namedtuple("Point", ["u", "v"])
    p = Point(v=1, u=x)
    return p.u + p.v, type(p).__name__


@case
def counter(x):
    c = collections.Counter("aabbb")
    c["z"] += 2
    return (
        x + c["b"] + c["missing"],
        c.most_common(2),
        dict(c),
        sum(c.values()),
        c == {"a": 2, "b": 3, "z": 2},
    )


@case
def counter_arithmetic(x):
    a, b = collections.Counter(a=3, b=1), collections.Counter(a=1, c=2)
    a.update(["a", "q"])
    a.subtract({"q": 1})
    return x + 1, dict(a + b), dict(a - b), dict(a & b), dict(a | b), sorted(a.elements())


@case
def defaultdict(x):
    d = collections.defaultdict(list)
    d["a"].append(x)
    d["b"].append(1)
    n = collections.defaultdict(int, k=3)
    n["k"] += 1
    n["new"] += 1
    return d["a"][0] + 1, dict(n), "zz" in d, d.get("zz"), len(d), d.default_factory is list


@case
def defaultdict_with_lambda(x):
    d = collections.defaultdict(lambda: x * 2)
    return d["q"] + 1, list(d)


class Filled(collections.defaultdict):
    def __init__(self):
        self.default_factory = list


@case
def defaultdict_named_in_its_text(x):
    return x + 1, repr(Filled()), str(Filled())


@case
def ordered_dict(x):
    d = collections.OrderedDict(a=1, b=x)
    d["c"] = 3
    d.move_to_end("a")
    first = d.popitem(last=False)
    return (
        first[1] + 1,
        list(d),
        d == collections.OrderedDict([("c", 3), ("a", 1)]),
        list(reversed(d)),
    )


@case
def deque(x):
    q = collections.deque([1, 2, 3], maxlen=4)
    q.append(x)
    q.append(5)
    q.appendleft(6)
    q.rotate(1)
    left, right = q.popleft(), q.pop()
    q.extend([8, 9])
    q.extendleft([7])
    return x + len(q), left, right, list(q)[:2], q.maxlen, 8 in q, q[0]


@case
def deque_as_queue(x):
    q = collections.deque()
    for i in range(3):
        q.append(x * i)
    total = 0
    while q:
        total = total + q.popleft()
    return total


@case
def deque_methods(x):
    q = collections.deque("abca")
    q.remove("b")
    q.reverse()
    q[1] = "z"
    q.insert(1, "i")
    return (
        x + q.count("a"),
        "".join(q),
        q.index("z"),
        collections.deque([1]) == collections.deque([1]),
        q.copy() is q,
    )


@case
def chain_map(x):
    m = collections.ChainMap({"a": 1}, {"a": 2, "b": x})
    m["c"] = 3
    child = m.new_child({"a": 9})
    return m["b"] + child["a"], m["a"], sorted(m), m.maps[0], "b" in m, len(m)


@case
def user_dict_and_list(x):
    class D(collections.UserDict):
        def __setitem__(self, key, value):
            super().__setitem__(key.upper(), value)

    d = D(a=1)
    d["b"] = 2
    items = collections.UserList([1, 2])
    items.append(3)
    return x + d["B"], sorted(d), len(items), items[0]


@case
def simple_namespace(x):
    ns = types.SimpleNamespace(a=x, b=2)
    ns.c = ns.b + 1
    return ns.a * ns.c, sorted(vars(ns))


@case
def mapping_proxy(x):
    proxy = types.MappingProxyType({"a": 1})
    try:
        proxy["b"] = 2
    except TypeError as error:
        return x + proxy["a"], type(error).__name__, dict(proxy)


@case
def abc_isinstance(x):
    abcs = collections.abc
    return (
        x + 1, isinstance([], abcs.Sequence), isinstance({}, abcs.Mapping), isinstance((), abcs.Hashable),
        isinstance([], abcs.Hashable), isinstance(len, abcs.Callable), isinstance({1}, abcs.Set),
    )  # fmt: skip


@case(
    inputs=lambda: (
        *[__import__("torch").ones(2)],
        collections.deque([1, 2]),
        collections.Counter("ab"),
    )
)
def collections_as_arguments(x, q, c):
    q.append(3)
    c["a"] += 1
    return x + len(q) + c["a"]


@case
def named_tuple_class(x):
    import typing

    class P(typing.NamedTuple):
        u: object
        v: int = 3

        def total(self):
            return self.u + self.v

    return P(x).total(), P(1, 2).v


class Tags(set):
    pass


@case(inputs=lambda: (torch.ones(2), {1, "a", len, (1, 2)}, Tags((1, 2))))
def sets_as_arguments(x, mixed, tags):
    tags |= {3}
    return x + len(mixed), len in mixed, (1, 2) in mixed, sorted(tags), type(tags | {4}).__name__


@case
def set_operators_and_other_operands(x):
    texts = []
    for other in ([1], {1: 2}, (1,), "a", len):
        for operate in (operator.sub, operator.or_, operator.iand, operator.ixor):
            try:
                operate({1, 2}, other)
            except TypeError as error:
                texts.append(str(error))
    return x + 1, texts, {1, 2}.__and__([1]), {1, 2}.__rsub__({2, 3})


@case
def set_subclass_operators(x):
    tags = Tags((1, 2, 3))
    same = tags
    same -= {1}
    inside = {1} in {frozenset([1])}, Tags((1,)) in {frozenset([1])}
    return x + 1, same is tags, sorted(tags), sorted({9} | tags), tags <= {1, 2, 3}, inside


@case
def builtin_new(x):
    class Ordered(dict):
        def __new__(cls, *args):
            self = dict.__new__(cls)
            self.order = [1]
            return self

    class Next(int):
        def __new__(cls, number):
            return int.__new__(cls, number + 1)

    try:
        int.__new__(str, 3)
    except TypeError as error:
        text = str(error)
    one = Ordered([(1, 2)])
    return x + one.order[0], one, Next(3) + 1, type(Next(3)).__name__, str.__new__(str, 5), text


@case
def deque_index_errors(x):
    d, texts = collections.deque([1, 2, 3]), []
    for find in (lambda k: d[k], lambda k: d.__getitem__(k)):
        try:
            find("a")
        except TypeError as error:
            texts.append(str(error))
    return x + 1, texts


@case
def defaultdict_filled_again(x):
    d = collections.defaultdict(list, {1: [2]})
    d.__init__()
    return x + 1, d, d.default_factory


@case
def methods_of_containers_that_are_alike(x):
    made = ([1], collections.deque([1]), {1: 2}, collections.OrderedDict(), {1}, frozenset([1]))
    names = ("sort", "rotate", "move_to_end", "add", "update", "__ior__", "__copy__")
    try:
        made[5].add(x)
    except AttributeError as error:
        return x + 1, str(error), [[hasattr(one, name) for name in names] for one in made]


class Point(typing.NamedTuple):
    a: float
    b: float

    def __add__(self, other):
        return Point(self.a + other.a, self.b + other.b)

    def __bool__(self):
        return self.a > 0


@case(inputs=lambda: (torch.ones(3), Point(1.0, 2.0)))
def named_tuple_with_operators(x, point):
    total = point + Point(-3.0, 4.0)
    return x * total.b, total, bool(total), 1 if point else 2, total._replace(a=5.0), [*total]
