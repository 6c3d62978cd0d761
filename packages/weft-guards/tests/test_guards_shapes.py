"""Conditions on symbolic sizes become guards that hold where the program goes the same way."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from weft_core.errors import Unsupported
from weft_core.fake import fake_mode, make_shape_env, new_symint, to_fake
from weft_guards import (
    DynamicPolicy,
    GuardSet,
    TensorSpec,
    compile_check,
    explain_miss,
    mark_dynamic,
)
from weft_guards.shapes import shape_guards
from weft_guards.sources import LocalSource


class Case:
    """Tensors with symbolic sizes, a function of them to trace, and the resulting check."""

    def __init__(self, trace, *inputs):
        self.env = make_shape_env()
        self.mode = fake_mode(self.env)
        self.names = [f"x{index}" for index in range(len(inputs))]
        self.sources = [LocalSource(name) for name in self.names]
        fakes = [self.fake(*row) for row in zip(inputs, self.names)]
        with self.mode:
            trace(*fakes)
        self.guards = GuardSet()
        for value, fake, source in zip(inputs, fakes, self.sources):
            if isinstance(value, torch.Tensor):
                self.guards.add(source, "TENSOR", TensorSpec.of(value, like=fake))
            else:
                self.guards.add(source, "TYPE", int)
        self.shapes = shape_guards(self.env, zip(self.sources, fakes))
        for guard in self.shapes:
            self.guards.setdefault(guard)
        self.check = compile_check(self.guards, self.names)

    def fake(self, value, name):
        if isinstance(value, int):
            return new_symint(self.env, value, f"L['{name}']", duck=False)
        dims = [dim for dim, size in enumerate(value.shape) if size not in (0, 1)]
        return to_fake(self.mode, value, dims, f"L['{name}']")

    def __call__(self, *inputs):
        return self.check(None, *inputs)

    def texts(self):
        return [str(guard) for guard in self.shapes]


def z(*sizes):
    return torch.zeros(sizes)


def test_plain_use_admits_all_sizes_but_zero_and_one():
    case = Case(lambda x: x * 2, z(4, 6))
    assert [case(z(n, 6)) for n in (0, 1, 2, 3, 1000)] == [False, False, True, True, True]
    assert case(z(3, 7))
    assert not case(z(3, 7).t())  # strides are functions of sizes, and guarded


def test_equal_sizes_share_a_symbol():
    case = Case(lambda x, y: x + y, z(4), z(4))
    assert case(z(9), z(9))
    assert not case(z(9), z(8))


def test_branches():
    def trace(x, y):
        assert x.shape[0] * 2 == y.shape[0]
        assert x.shape[0] % 3 == 0
        assert y.shape[0] < 50

    case = Case(trace, z(6), z(12))
    for n in range(2, 40):
        assert case(z(n), z(2 * n)) == (n % 3 == 0 and 2 * n < 50), n
    assert not case(z(9), z(17))
    assert explain_miss(case.guards, lambda x0, x1: 0, (z(7), z(14)))


def test_specialised_size():
    def trace(x):
        assert x.shape[0] == 5

    case = Case(trace, z(5, 3))
    assert case(z(5, 4))
    assert not case(z(6, 4))


def test_specialising_a_marked_size_is_refused():
    env = make_shape_env()
    x = z(5, 3)
    mark_dynamic(x, [0, 1])
    fake = to_fake(fake_mode(env), x, [0, 1], "L['x']")
    source = LocalSource("x")
    DynamicPolicy().check(source, x, fake.shape)
    assert fake.shape[1] == 3
    with pytest.raises(Unsupported, match="dimension 1"):
        DynamicPolicy().check(source, x, fake.shape)


def test_int_arguments():
    def trace(x, n):
        assert n > 2
        assert x.shape[0] != n

    case = Case(trace, z(5), 7)
    assert [case(z(5), n) for n in (2, 3, 5, 7, True, 7.0)] == [
        False, True, False, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x @ y,
        lambda x, y: torch.cat([x, y.t()]),
        lambda x, y: x.reshape(-1)[: y.shape[0]],
        lambda x, y: x.unflatten(0, (2, -1)).sum(1) @ y,
    ],
)
def test_real_operations(function):
    """Where the check says yes, the operation works as traced; the traced sizes always pass."""
    case = Case(function, z(4, 6), z(6, 4))
    assert case(z(4, 6), z(6, 4))
    for a in range(2, 7):
        for b in range(2, 7):
            if case(z(a, 6), z(6, b)):
                function(z(a, 6), z(6, b))


def test_implied_conditions_are_not_repeated():
    def trace(x):
        assert x.shape[0] > 3
        assert x.shape[0] > 2
        assert x.shape[0] >= 2

    case = Case(trace, z(9))
    assert case.texts() == ["4 <= L['x0'].size(0)"]


def test_a_symbol_that_no_input_determines_is_refused():
    env = make_shape_env()
    n = new_symint(env, 7, "L['n']", duck=False)
    assert n * 3 > 20
    assert n % 2 == 1
    with pytest.raises(Unsupported, match="no input"):
        shape_guards(env, [])


atoms = st.sampled_from(["a", "b", "c", "2", "3", "7"])


def extend(inner):
    """Binary operators; divisors are positive: torch folds (a // b) // c wrongly for others."""
    plain = st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner)
    divided = st.tuples(inner, st.sampled_from(["//", "%"]), atoms)
    return (plain | divided).map(lambda row: f"({row[0]} {row[1]} {row[2]})")


operands = st.recursive(atoms, extend, max_leaves=4)
conditions = st.tuples(operands, st.sampled_from(["<", "<=", "==", "!=", ">"]), operands).map(
    " ".join
)


@settings(max_examples=60, deadline=None)
@given(st.lists(conditions, min_size=1, max_size=3), st.data())
def test_random_branches(conditions, data):
    """Sizes that pass the check send a program with random branches the way it was traced."""
    sizes = st.integers(2, 12)

    def branches(a, b, c):
        taken = []
        for condition in conditions:
            try:
                taken.append(bool(eval(condition)))
            except ZeroDivisionError:
                assume(False)
        return taken

    traced = data.draw(st.tuples(sizes, sizes, sizes))
    expected = branches(*traced)
    case = Case(
        lambda x, y, n: branches(x.shape[0], y.shape[0], n), z(traced[0]), z(traced[1]), traced[2]
    )
    assert case(z(traced[0]), z(traced[1]), traced[2])
    for a, b, c in data.draw(st.lists(st.tuples(sizes, sizes, sizes), max_size=20)):
        if case(z(a), z(b), c):
            assert branches(a, b, c) == expected
