"""Methods of the program's classes run as often as in eager: no guard or rebuilding calls one."""

import collections

import pytest
import torch
import weft_capture

X = torch.ones(2)
LOG = []
VALUES = {
    dict: {"a": 1, "b": 2},
    collections.OrderedDict: {"a": 1},
    collections.Counter: {"a": 1},
    list: [1, 2],
    collections.deque: [1, 2],
    tuple: (1, 2),
    set: {1},
    frozenset: {1},
    str: "ab",
    bytes: b"ab",
    int: 2,
    float: 1.5,
    ValueError: "q",
}
SPECIAL = (
    *("__len__", "__iter__", "__contains__", "__getitem__", "__reversed__", "__eq__", "__hash__"),
    *("__bool__", "__repr__", "__str__", "__index__", "__int__", "__float__", "__format__"),
    *("keys", "items", "values", "get", "copy", "__copy__", "__reduce_ex__", "__or__"),
)


def logging(base, names):
    """A subclass whose methods note that they were called, and do the same."""

    def made(name):
        real = getattr(base, name)

        def method(self, *args):
            LOG.append(name)
            return real(self, *args)

        return method

    return type(f"My{base.__name__}", (base,), {n: made(n) for n in names if hasattr(base, n)})


def given_back(x, o):
    return x + 1, o


def over_a_break(x, o):
    y = x + 1
    weft_capture.graph_break()
    return y * 2, o


def with_an_attribute(x, o):
    if not hasattr(o, "__dict__"):
        return x
    o.tag = 1
    weft_capture.graph_break()
    return x + o.tag


def copied(x, o):
    made = type(o)(o)
    weft_capture.graph_break()
    return x + 1, [made]


def asked(x, o):
    kept = [o, isinstance(o, (complex, list, range)), type(o), callable(o), o is None]
    weft_capture.graph_break()
    kept.append(o)
    return x + len(kept)


@pytest.mark.sampled
@pytest.mark.parametrize("function", [given_back, over_a_break, with_an_attribute, copied, asked])
@pytest.mark.parametrize("names", [SPECIAL, ("__getattribute__",)], ids=["special", "attribute"])
@pytest.mark.parametrize("base", VALUES)
def test_methods_run_as_often_as_in_eager(base, names, function):
    cls = logging(base, names)
    captured = weft_capture.capture(function, lambda graph, inputs: graph.forward)
    theirs, ours = [], []
    for run, log in ((function, theirs), (captured, ours)):
        for _ in range(3):
            made = cls(VALUES[base])
            LOG.clear()
            run(X, made)
            log.append(list(LOG))
    assert theirs == ours
