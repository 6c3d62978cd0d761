"""Enums as programs use them: members that are called, iterated, hold data or have methods."""

import copy
import enum
import functools

import pytest
import torch
import weft_capture
from capture_check import check, eager_backend, same


class Reduction(enum.Enum):
    MEAN = 1
    SUM = 2

    def __call__(self, x, scale=1):
        return (x.mean() if self is Reduction.MEAN else x.sum()) * scale

    def __iter__(self):
        return iter((self.value, 10))

    @property
    def weight(self):
        return self.value * FACTOR

    @classmethod
    def parse(cls, name):
        return cls[name]

    @staticmethod
    def twice(x):
        return x * 2


class Shape(tuple, enum.Enum):
    SMALL = (1, 2)


class Activation(enum.Enum):
    RELU = functools.partial(torch.relu)
    TABLE = {"slope": 2.0}  # noqa: RUF012 - the member's value


FACTOR = 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (Reduction.MEAN(x), Reduction.SUM(x, scale=3)),
        lambda x: [x * k for k in Reduction.SUM],
        lambda x: functools.reduce(lambda y, member: member(y), Reduction, x),
        lambda x: (x * Shape.SMALL[1], [*Shape.SMALL], len(Shape.SMALL)),
        lambda x: (Reduction.MEAN.parse("SUM"), Reduction.MEAN.twice(x)),
        lambda x: (Activation.RELU.value(x), x * Activation["TABLE"].value["slope"]),
    ],
)
def test_members_are_one_graph(function):
    check(function, torch.tensor([-1.0, 3.0]))


def test_changes_of_a_members_attribute_and_of_what_its_property_reads(monkeypatch):
    def function(x, member):
        return x * member.scale * member.weight

    captured = weft_capture.capture(function, eager_backend, fullgraph=True)
    monkeypatch.setattr(Reduction.SUM, "scale", 3, raising=False)
    x = torch.ones(2)
    assert same(captured(x, Reduction.SUM), x * 12)
    Reduction.SUM.scale = 5
    assert same(captured(x, Reduction.SUM), x * 20)
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert same(captured(x, Reduction.SUM), x * 30)


def test_copies_of_sizes_are_the_sizes():
    def function(x):
        n = x.shape[0]
        return x + 1, copy.deepcopy({"n": [n, x.shape]}), copy.copy(n)

    captured = weft_capture.capture(function, eager_backend, fullgraph=True)
    for n in (3, 4, 5):
        assert same(captured(torch.ones(n)), function(torch.ones(n)))
    assert weft_capture.report().frames[-1].graphs == 2
