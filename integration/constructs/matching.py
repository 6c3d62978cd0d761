"""match statements."""

import dataclasses

from constructs import case


@dataclasses.dataclass
class Point:
    x: object
    y: int


class Named:
    __match_args__ = ("name", "size")

    def __init__(self, name, size):
        self.name, self.size = name, size


@case
def literals(x):
    out = []
    for value in (0, "a", None, True, 2.5, b"z", -3, "other"):
        match value:
            case 0:
                out.append("zero")
            case "a" | "b":
                out.append("letter")
            case None:
                out.append("none")
            case True:
                out.append("true")
            case 2.5 | -3:
                out.append("number")
            case _:
                out.append("default")
    return x + len(out), out


@case
def sequences(x):
    out = []
    for value in ([], [1], [1, 2], (1, 2, 3), [1, [2, 3]], "ab", range(2), [1, 2, 3, 4]):
        match value:
            case []:
                out.append("empty")
            case [1, [a, b]]:
                out.append((a, b))
            case [one]:
                out.append(one)
            case [a, b]:
                out.append((b, a))
            case [1, *rest] if len(rest) == 2:
                out.append(rest)
            case [first, *_, last]:
                out.append((first, last))
            case _:
                out.append("?")
    return x + 1, out


@case
def mappings(x):
    out = []
    for value in ({}, {"a": 1}, {"a": 1, "b": 2}, {"k": {"n": [1, 2]}}, 5):
        match value:
            case {"a": n, "b": m}:
                out.append((n, m))
            case {"a": n, **rest}:
                out.append((n, rest))
            case {"k": {"n": [_, second]}}:
                out.append(second)
            case {}:
                out.append("any mapping")
            case _:
                out.append("no mapping")
    return x + 1, out


@case
def classes(x):
    out = []
    for value in (Point(x, 0), Point(x, 3), Named("n", 4), 7, "s", [1]):
        match value:
            case Point(x=p, y=0):
                out.append(p + 1)
            case Point(_, y):
                out.append(y)
            case Named(name, size=s):
                out.append((name, s))
            case int(n):
                out.append(n * 2)
            case str() as text:
                out.append(text + "!")
            case list([item]):
                out.append(item)
    return out


@case
def guards_and_captures(x):
    match (2, 5):
        case (a, b) if a > b:
            y = x
        case (a, b) if a * 2 < b:
            y = x + a * b
        case whole:
            y = whole
    return y


@case
def value_patterns(x):
    class Color:
        RED = 1
        BLUE = 2

    match 2:
        case Color.RED:
            return x
        case Color.BLUE:
            return x * 2


@case
def tensor_in_tuple(x):
    match ("scale", x, 3):
        case ("shift", t, k):
            return t + k
        case ("scale", t, int(k)):
            return t * k


@case
def or_patterns_with_capture(x):
    match ["go", "north"]:
        case ["go", ("north" | "south") as d] | ["walk", d]:
            return x + len(d), d


@case
def no_case_matches(x):
    y = x
    match 5:
        case 1:
            y = x + 1
    return y * 2


@case
def match_on_shape(x):
    match x.shape:
        case (2, n):
            return x + n
        case (n,):
            return x - n


@case
def match_type_of_tensor(x):
    import torch

    match x:
        case torch.Tensor(shape=s):
            return x + s[0]


@case
def match_named_tuple(x):
    import collections

    Pair = collections.namedtuple("Pair", "a b")
    match Pair(x, 2):
        case Pair(a=t, b=2):
            return t + 2


@case
def match_wrong_positional_count(x):
    try:
        match Named("a", 1):
            case Named(a, b, c):
                pass
    except TypeError as error:
        return x + 1, type(error).__name__
