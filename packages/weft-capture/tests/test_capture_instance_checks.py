"""`isinstance` with classes whose metaclass answers in Python, and with protocols."""

import typing

import pytest
import torch
import weft_capture
from capture_check import X, check, eager_backend, same


@typing.runtime_checkable
class HasScale(typing.Protocol):
    scale: int

    def apply(self, x): ...


@typing.runtime_checkable
class Applies(typing.Protocol):
    def apply(self, x): ...


class Scaled:
    def __init__(self):
        self.scale = 3

    def apply(self, x):
        return x * self.scale


class Unscaled:
    def apply(self, x):
        return x


class Blocked:
    apply = None


def protocols(x, obj):
    found = [isinstance(obj, kind) for kind in (HasScale, Applies, (int, HasScale))]
    return x + 1, found, isinstance(x, Applies), issubclass(type(obj), Applies)


@pytest.mark.parametrize("obj", [Scaled(), Unscaled(), Blocked(), 3])
def test_protocols(obj):
    check(protocols, X, obj)


def test_a_member_that_a_protocol_names_appears_later():
    obj = Unscaled()
    captured = weft_capture.capture(protocols, eager_backend, fullgraph=True)
    assert same(captured(X, obj), protocols(X, obj))
    obj.scale = 2
    assert same(captured(X, obj), protocols(X, obj))
    assert captured(X, obj)[1] == [True, True, True]


class Shaped(type):
    asked: typing.ClassVar[list] = []

    def __instancecheck__(cls, obj):
        Shaped.asked.append(cls.__name__)
        return hasattr(obj, "shape") and obj.shape[0] == cls.size


class Two(metaclass=Shaped):
    size = 2


class Three(metaclass=Shaped):
    size = 3


def test_a_metaclass_that_looks_at_the_instance_and_keeps_count():
    def function(x):
        known = isinstance(x, (int, Three, Two, str)), isinstance(Two(), Two)
        return x + 1, known, len(Shaped.asked)

    captured = weft_capture.capture(function, eager_backend, fullgraph=True)
    for size in (2, 3, 4, 2):
        expected, asked = function(torch.ones(size)), Shaped.asked.copy()
        Shaped.asked.clear()
        result = captured(torch.ones(size))
        assert (result[1:], Shaped.asked) == (expected[1:], asked)
        Shaped.asked.clear()
