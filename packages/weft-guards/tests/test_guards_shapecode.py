"""Conditions on sizes mean in C what their Python text means, and are run there where they can."""

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy import functions as sf
from weft_guards import GuardSet, TensorSpec, compile_check, explain_miss
from weft_guards.abi import extension
from weft_guards.config import settings as guard_settings
from weft_guards.native import Assembler
from weft_guards.payloads import ShapeExpr
from weft_guards.shapes import _Maker
from weft_guards.sources import LocalSource, TensorProperty

pytestmark = pytest.mark.skipif(extension() is None, reason="the extension was not built")
NAMES = ("a", "b", "c")
SOURCES = tuple(map(LocalSource, NAMES))


def conditions(text):
    """Guards with one condition on three ints, {0} to {2}."""
    guards = GuardSet()
    for source in SOURCES:
        guards.add(source, "TYPE", int)
    guards.add(SOURCES[0], "SHAPE", ShapeExpr(text, SOURCES))
    return guards


def in_c(guards, values):
    """What the C form says: True, False, or None where it would ask Python."""
    assembler = Assembler(NAMES, ())
    assert all(map(assembler.add, guards)), "C has no words for this"
    asked = []
    check = extension().Check(tuple(assembler.rows), 3, None, lambda *_: asked.append(1))
    answer = check(None, *values)
    return None if asked else answer


def in_python(guards, values):
    with guard_settings.patch(native_checks=False):
        return compile_check(guards, NAMES)(None, *values)


def whole(guards, values):
    """The check as it is used: in C, and in Python where C asks for it."""
    with guard_settings.patch(native_checks=True):
        return compile_check(guards, NAMES)(None, *values)


atoms = st.sampled_from(["{0}", "{1}", "{2}"]) | st.integers(-9, 9).map(lambda n: f"({n})")


def arithmetic(inner):
    binary = st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner)
    call = st.tuples(st.sampled_from(["min", "max"]), inner, inner)
    return (
        binary.map(lambda row: f"({row[0]} {row[1]} {row[2]})")
        | call.map(lambda row: f"{row[0]}({row[1]}, {row[2]})")
        | st.tuples(inner, inner).map(lambda row: f"math.floor({row[0]} / {row[1]})")
        | inner.map(lambda one: f"(-{one})")
    )


amounts = st.recursive(atoms, arithmetic, max_leaves=6)
comparisons = st.tuples(
    amounts, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), amounts
).map(lambda row: f"({row[0]} {row[1]} {row[2]})")  # fmt: skip
chains = st.tuples(amounts, amounts, amounts).map(lambda row: f"({row[0]} <= {row[1]} < {row[2]})")


def logic(inner):
    both = st.tuples(inner, st.sampled_from(["and", "or"]), inner)
    return both.map(lambda row: f"({row[0]} {row[1]} {row[2]})") | inner.map(
        lambda one: f"(not {one})"
    )


texts = st.recursive(comparisons | chains, logic, max_leaves=4)
small = st.integers(-40, 40)
large = st.integers(-(1 << 64), 1 << 64) | st.sampled_from(
    [sign * (1 << bits) + by for sign in (1, -1) for bits in (31, 53, 62, 63) for by in (-1, 0, 1)]
)


@settings(max_examples=400, deadline=None)
@given(texts, st.lists(st.tuples(*[small | large] * 3), min_size=1, max_size=8))
def test_random_conditions(text, rows):
    guards = conditions(text)
    for values in rows:
        wanted = in_python(guards, values)
        assert whole(guards, values) == wanted, values
        assert in_c(guards, values) in (wanted, None), values


@settings(max_examples=150, deadline=None)
@given(texts, st.tuples(small, small, small))
def test_small_numbers_need_no_python(text, values):
    """Only a division by zero is left to Python, also where Python would not have come to it."""
    guards = conditions(text)
    answer = in_c(guards, values)
    assert answer is in_python(guards, values) or (answer is None and set(text) & set("/%"))


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("{0} + {1} > {2}", ((1 << 63) - 1, 1, 0), True),
        ("{0} - {1} < {2}", (-(1 << 63), 1, 0), True),
        ("{0} * {1} == {2}", (1 << 32, 1 << 32, 0), False),
        ("{0} // {1} > {2}", (-(1 << 63), -1, 0), True),
        ("{0} % {1} == {2}", (-(1 << 63), -1, 0), True),
        ("-{0} > {1} + {2}", (-(1 << 63), 0, 0), True),
        ("{0} > {1} + {2}", (1 << 70, 0, 0), True),
        ("math.floor({0} / {1}) == {2}", ((1 << 53) + 1, 1, 1 << 53), True),  # floats round
        ("{2} == 1 or {0} // {1} == 2", (4, 0, 1), True),  # not divided by zero
        ("{2} == 1 or {0} // {1} == 2", (4, 0, 2), False),
    ],
)
def test_what_int64_cannot_hold_is_left_to_python(text, values, holds):
    guards = conditions(text)
    assert in_c(guards, values) is None
    assert whole(guards, values) is in_python(guards, values) is holds


A, B = sympy.symbols("a b", integer=True, positive=True)
EXPRESSIONS = {
    "FloorDiv": sympy.Eq(sf.FloorDiv(A, B), 2),
    "Mod": sympy.Ne(sf.Mod(A, B), 1),
    "PythonMod": sympy.Eq(sf.PythonMod(A - 9, B), 1),
    "CleanDiv": sympy.Le(sf.CleanDiv(A, B), 3),
    "ModularIndexing": sympy.Eq(sf.ModularIndexing(A, 2, 3), 1),
    "FloorToInt": sympy.Ge(sf.FloorToInt(sf.IntTrueDiv(A, B)), 2),
    "Max": sympy.Lt(sf.Max(A, B, 5), 2 * B),
    "Min": sympy.Gt(sf.Min(A, B - 3), 1),
    "Pow": sympy.Eq(A**2 + B**2, 100),
    "And": sympy.And(sympy.Lt(A, B), sympy.Not(sympy.Eq(A, 3))),
    "Or": sympy.Or(sympy.Eq(A * B, 12), sympy.Gt(A - B, 3)),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_functions_of_shape_environments(name):
    maker = _Maker({A: SOURCES[0], B: SOURCES[1]})
    maker.condition(EXPRESSIONS[name])
    answers = set()
    for a in range(1, 13):
        for b in range(1, 13):
            answer = in_c(maker.guards, (a, b, 0))
            assert answer is in_python(maker.guards, (a, b, 0)), (a, b)
            answers.add(answer)
    assert answers == {True, False}


@pytest.mark.parametrize(
    "text",
    [
        "{0} / {1} > {2}",
        "{0} * 0.5 > 3",
        "({0} if {1} > 2 else {2}) == 3",
        "torch.sym_float({0}) > 2.5",
        "({0} or {1}) == 2",
        "{0} ** {1} > {2}",
        "{0} == 18446744073709551616",
        "math.ceil({0} / {1}) == 3",
    ],
)
def test_what_has_no_words_stays_python(text):
    guards = conditions(text)
    with guard_settings.patch(native_checks=True):
        check = compile_check(guards, NAMES)
    assert check.residual is not None
    for values in ((3, 1, 4), (7, 3, 3), (0, 2, 9)):
        assert check(None, *values) is in_python(guards, values)


def test_sizes_and_strides_of_tensors():
    """Amounts come from tensors that were tested; one that misses is named with its values."""
    x, y = LocalSource("x"), LocalSource("y")
    tensor = torch.zeros(3, 6)
    guards = GuardSet()
    for source in (x, y):
        spec = TensorSpec.of(tensor)
        anything = TensorSpec(*(spec.cls, spec.dtype, spec.device), (None,) * 2, (None,) * 2,
                              spec.requires_grad, spec.keys)  # fmt: skip
        guards.add(source, "TENSOR", anything)
    rows = ((x, "size", 0), (x, "stride", 0), (y, "size", 1))
    properties = tuple(TensorProperty(*row) for row in rows)
    guards.add(properties[0], "SHAPE", ShapeExpr("{0} * {1} == 3 * {2}", properties))
    check = compile_check(guards, ("x", "y"))
    assert getattr(check, "residual", None) is None
    assert check(None, tensor, torch.zeros(1, 6))
    assert check(None, torch.zeros(4, 5)[1:], torch.zeros(9, 5))
    assert not check(None, tensor, torch.zeros(1, 7))
    assert not check(None, tensor.t(), torch.zeros(1, 6))
    assert not check(None, tensor, torch.zeros(7))
    assert not check(None, None, tensor)
    (miss,) = explain_miss(guards, lambda x, y: 0, (tensor, torch.zeros(1, 7)))
    assert miss.old == "L['x'].size(0) * L['x'].stride(0) == 3 * L['y'].size(1)"
    assert miss.new == "values 3, 6, 7"


def test_more_amounts_than_there_is_room_for():
    names = [f"n{index}" for index in range(400)]
    guards = GuardSet()
    for name in names:
        guards.add(LocalSource(name), "TYPE", int)
        guards.add(LocalSource(name), "SHAPE", ShapeExpr("{0} > 2", (LocalSource(name),)))
    check = compile_check(guards, names)
    assert check(None, *[3] * 400)
    for index in (0, 127, 128, 399):
        assert not check(None, *[2 if index == at else 3 for at in range(400)])


def test_a_condition_of_very_many_words():
    guards = conditions(" + ".join(["{0}"] * 300) + " == 300")
    check = compile_check(guards, NAMES)
    assert check(None, 1, 0, 0)
    assert not check(None, 2, 0, 0)
