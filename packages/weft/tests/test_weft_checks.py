"""Operators that return nothing are run in each call: checks, and what custom ones do.

PYTEST_DONT_REWRITE: the programs' own `assert` statements are what is tested.
"""

import pytest
import torch
import weft

X = torch.linspace(-1, 1, 12).reshape(3, 4)
BACKENDS = ("eager", "aot_eager", "codegen")
noted = []


@torch.library.custom_op("weft_tests::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    noted.append(round(float(x.sum()), 3))


@note.register_fake
def _(x):
    pass


def asynchronous(x):
    torch._assert_async((x > 5).all(), "too small")
    return x + 1


def statement(x):
    y = x * 2
    assert (y > 5).all(), "too small"
    return y + 1


def negated(x):
    assert not (x.sin() < 5).any()
    return x + 1


def in_a_callee(x):
    return statement(x + 1) * 3


def before_a_lookup(x):
    index = x.long() + 7
    assert index.max() < 3, "outside"
    return x[index]


PROGRAMS = (asynchronous, statement, negated, in_a_callee, before_a_lookup)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_a_check_in_the_graph_raises_as_eager(function, backend):
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        function(X)
    with pytest.raises(expected.type) as got:
        weft.compile(function, backend=backend, fullgraph=True)(X)
    assert got.value.args == expected.value.args


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_holds_is_one_graph_with_gradients(backend):
    def program(x):
        y = x.sin()
        assert (y < 2).all(), "too large"
        note(y)
        z = y * 2
        note(z)
        return z

    x = X.clone().requires_grad_()
    noted.clear()
    weft.compile(program, backend=backend, fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * X.cos())
    compiled, _ = list(noted), noted.clear()
    program(X)
    assert compiled == noted


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_written_after_a_failed_check(backend):
    def program(x):
        y = x + 1
        assert (y > 5).all(), "too small"
        x.mul_(2)
        return y

    x = X.clone()
    with pytest.raises(AssertionError, match="too small"):
        weft.compile(program, backend=backend)(x)
    torch.testing.assert_close(x, X)


def test_stages_of_a_compilation_can_be_watched():
    seen = []
    stop = weft.watch_stages(lambda stage, detail, seconds: seen.append((stage, seconds is None)))
    weft.compile(lambda x: x + 1)(X)
    stop()
    assert seen[0] == ("capture", True) and ("backend", False) in seen
    assert len(seen) == 2 * len([begun for _, begun in seen if begun])


def test_a_failure_that_the_program_sees_is_its_own():
    seen = []

    def program(x):
        seen.append(1)
        try:
            assert (x > 5).all(), "too small"
        except AssertionError as error:
            return x + 1, str(error)

    def counts_first(x):
        seen.append(2)
        assert (x > 5).all()
        return x + 1

    compiled = weft.compile(program, backend="eager")
    result, text = compiled(X)
    torch.testing.assert_close(result, X + 1)
    assert text == "too small" and seen == [1]
    with pytest.raises(AssertionError):
        weft.compile(counts_first, backend="eager")(X)
    assert seen == [1, 2]
