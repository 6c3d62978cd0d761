"""The operator module."""

import collections
import operator
import sys

from constructs import case


@case
def arithmetic_functions(x):
    return (
        operator.add(x, 1),
        operator.mul(x, 2),
        operator.truediv(6, 4),
        operator.neg(x),
        operator.pow(2, 3),
    )


@case
def itemgetter(x):
    rows = [{"k": 2, "v": x}, {"k": 1, "v": x + 1}]
    rows.sort(key=operator.itemgetter("k"))
    return operator.itemgetter("v")(rows[0]), operator.itemgetter(0, 2)([1, 2, 3])


@case
def attrgetter(x):
    class C:
        def __init__(self, a):
            self.a = a

    return operator.attrgetter("a")(C(x)) + 1, operator.attrgetter("a.a", "a")(C(C(2)))[0]


@case
def methodcaller(x):
    return operator.methodcaller("sum", dim=0)(x), operator.methodcaller("upper")("ab")


@case
def comparisons(x):
    return (
        x + 1,
        operator.lt(1, 2),
        operator.eq("a", "a"),
        operator.is_(None, None),
        operator.ge(2, 3),
    )


@case
def containers(x):
    items = [1, 2]
    operator.setitem(items, 0, 9)
    operator.delitem(items, 1)
    return x + operator.getitem(items, 0), operator.contains(items, 9), operator.countOf([1, 1], 1)


@case
def in_place(x):
    items = [1]
    same = operator.iadd(items, [2])
    return operator.iadd(x, 1), same is items, operator.ior({1}, {2})


@case
def reduce_with_operator(x):
    import functools

    return functools.reduce(operator.mul, [x, 2, 3]), functools.reduce(operator.or_, [1, 2, 4])


@case
def truth_and_not(x):
    return (
        x + 1,
        operator.truth([]),
        operator.not_(3),
        operator.index(True),
        operator.concat([1], [2]),
    )


@case
def length_hint_and_call(x):
    return x + operator.length_hint([1, 2]), operator.abs(-3), operator.indexOf([4, 5], 5)


@case
def map_with_operator(x):
    return list(map(operator.add, [1, 2], [3, 4])), list(map(operator.neg, [x, 1]))


class Hinting:
    def __length_hint__(self):
        return sys.maxsize + 1


@case
def errors_of_wrong_arguments(x):
    found = []
    for call in (
        lambda: operator.length_hint(Hinting()),
        lambda: operator.length_hint(5, -7),
        lambda: operator.delitem([1], "a"),
        lambda: operator.indexOf(5, 1),
        lambda: [].__format__(),
        lambda: {1}.union(k=1),
        lambda: "ab".find(k=1),
        lambda: range(3).__reversed__(1),
        lambda: collections.OrderedDict().pop((1, 2)),
        lambda: collections.OrderedDict(["a"]),
    ):
        try:
            found.append(call())
        except Exception as error:
            found.append((type(error), error.args))
    return x + 1, found
