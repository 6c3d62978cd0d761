"""Index expressions: canonical form, ranges, and agreement with Python's integers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft_codegen.loops.evaluate import evaluate, substitute
from weft_codegen.loops.index import ZERO, as_axis, axis, const, in_range, least, nonnegative, size
from weft_codegen.loops.steps import coefficient

ROW = axis("i", 6)
J = axis("j", 8)
S, T = size("s0"), size("s1")


def test_equal_expressions_are_one_object():
    assert ROW * 8 + J is J + ROW * 4 * 2
    assert (ROW + 1) * 2 - 2 is ROW * 2
    assert ROW - ROW is ZERO


def test_division_uses_the_ranges_of_axes():
    flat = ROW * 8 + J
    assert flat // 8 is ROW
    assert flat % 8 is J
    assert (flat % 4) is J % 4
    assert (flat // 2) // 4 is ROW


def test_reshaping_there_and_back_is_nothing():
    flat = axis("f", 256)
    assert flat % 16 + flat // 16 * 16 is flat
    assert (flat % 16) * S - 3 * ROW + flat // 16 * 16 * S is flat * S - 3 * ROW
    assert flat % 4 + flat // 4 % 4 * 4 + flat // 16 * 16 is flat
    assert flat % 16 + flat // 16 * 32 is not flat


def test_symbolic_sizes_divide_like_constants():
    row, column = axis("r", S), axis("c", T)
    flat = row * T + column
    assert flat // T is row
    assert flat % T is column
    assert nonnegative(S - 1)
    assert not nonnegative(S - 2)
    assert in_range(column, T)


def test_an_axis_of_one_iteration_is_zero():
    assert axis("k", 1) is ZERO


def test_minimum_folds_when_the_order_is_known():
    assert least(S, S + 1) is S
    assert str(least(S, T)) == "min(s0, s1)"


def test_coefficient_is_none_when_not_linear():
    loop = as_axis(J)
    assert coefficient(ROW * 8 + J * 3, loop) is const(3)
    assert coefficient(ROW, loop) is ZERO
    assert coefficient(J % 4, loop) is None
    assert coefficient(J * J, loop) is None


def test_as_axis_refuses_other_expressions():
    with pytest.raises(TypeError):
        as_axis(ROW + 1)


def test_substitute_replaces_axes_inside_quotients():
    replaced = substitute(
        (ROW * 8 + J) // 3, lambda atom: const(2) if atom is as_axis(ROW) else None
    )
    assert evaluate(replaced, lambda atom: 5) == (2 * 8 + 5) // 3


_leaves = st.sampled_from([(ROW, "i"), (J, "j")]) | st.integers(-9, 9).map(lambda n: (const(n), n))


def _value(tree, env):
    if isinstance(tree, tuple) and len(tree) == 3:
        op, left, right = tree
        a, b = _value(left, env), _value(right, env)
        return (
            {"+": a + b, "-": a - b, "*": a * b}[op]
            if op in "+-*"
            else (a // max(abs(b), 1) if op == "/" else a % max(abs(b), 1))
        )
    return env.get(tree[1], tree[1]) if isinstance(tree[1], str) else tree[1]


def _build(tree):
    if isinstance(tree, tuple) and len(tree) == 3:
        op, left, right = tree
        a = _build(left)
        if op in "/%":
            divisor = right[1]
            return a // divisor if op == "/" else a % divisor
        b = _build(right)
        return {"+": a + b, "-": a - b, "*": a * b}[op]
    return tree[0]


_trees = st.recursive(
    _leaves,
    lambda inner: (
        st.tuples(st.sampled_from("+-*"), inner, inner)
        | st.tuples(st.sampled_from("/%"), inner, st.integers(1, 12).map(lambda n: (const(n), n)))
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(_trees)
def test_every_expression_equals_pythons_arithmetic(tree):
    expr = _build(tree)
    for i in (0, 1, 5):
        for j in (0, 3, 7):
            got = evaluate(expr, lambda atom: {"i": i, "j": j}[atom.key])
            assert got == _value(tree, {"i": i, "j": j})
