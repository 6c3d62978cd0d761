"""Operators that return nothing are run in each call: checks, and what custom ones do.

PYTEST_DONT_REWRITE: the programs' own `assert` statements are what is tested.
"""

import random
import traceback

import pytest
import torch
import weft
from torch.nn.functional import one_hot
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

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


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_a_check_in_the_graph_raises_as_eager(function, backend):
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        function(X)
    with pytest.raises(expected.type) as got:
        weft.compile(function, backend=backend, fullgraph=True)(X)
    assert got.value.args == expected.value.args


@pytest.mark.slow
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


def raises(x):
    if (x > 0.9).any():
        raise ValueError(f"too large: {x.max():.2f}")


def counts_first(x):
    seen.append(2)
    y = x * 2
    print("counted", len(seen))
    raises(x)
    print("passed")
    return y


def prints_first(x):
    print("first")
    raises(x)
    return x + 1


def draws(x):
    y = x + torch.rand_like(x)
    raises(x)
    return y + torch.rand(3, 4)


def draws_python(x):
    raises(x)
    return x * random.random()


def mutates(x):
    x.mul_(2)
    raises(x / 2)
    return x + 1


def notes(x):
    note(x)
    raises(x)
    return x + 1


def catches(x):
    try:
        raises(x)
    except ValueError as error:
        return x + 1, str(error)
    return x


def without_grad(x, *rest, scale=2, **more):
    with torch.no_grad():
        y = [(lambda: raises(x * one))() for one in range(scale)]
    return x * len(y)


def in_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
        raises(x)
    return y


class Checks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        raises(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def in_a_function(x):
    return Checks.apply(x) + 1


def in_a_checkpoint(x):
    def block(x):
        raises(x)
        return x.sin()

    return checkpoint(block, x, use_reentrant=False) + 1


FAILING = (
    counts_first, prints_first, draws, draws_python, mutates, notes, catches, without_grad,
    in_autocast, in_a_function, in_a_checkpoint,
)  # fmt: skip
seen = []


def all_that_shows(function, x, capsys):
    """Return result or exception with its traceback, and every effect of a call."""
    x = x.clone()
    seen.clear()
    noted.clear()
    torch.manual_seed(0)
    random.seed(0)
    try:
        result = function(x)
    except ValueError as error:
        places = [(s.filename, s.name, s.lineno) for s in traceback.extract_tb(error.__traceback__)]
        result = error.args, error.__context__, [p for p in places[1:] if "/weft" not in p[0]]
    drawn = torch.rand(2), random.random()
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return result, x, capsys.readouterr().out, seen.copy(), noted.copy(), drawn, modes


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FAILING, ids=lambda f: f.__name__)
def test_a_failed_check_shows_what_eager_shows(function, backend, capsys):
    compiled = weft.compile(function, backend=backend, options={"fallback_random": True})
    for x in (X / 2, X, X / 2, X):
        expected = all_that_shows(function, x, capsys)
        got = all_that_shows(compiled, x, capsys)
        torch.testing.assert_close(got[0], expected[0]) if x is not X else None
        assert x is not X or repr(got[0]) == repr(expected[0])
        assert repr(got[1:]) == repr(expected[1:])


@pytest.mark.parametrize("function", [counts_first, draws, without_grad, in_a_checkpoint])
def test_what_can_be_run_again_is_whole(function):
    compiled = weft.compile(function, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="too large: 1.00"):
        compiled(X)
    assert compiled(X / 2).shape == (3, 4)


@pytest.mark.slow
def test_one_hot_checks_its_classes_as_eager_does():
    def f(x, classes):
        return one_hot(classes, 5) * x, one_hot(classes, num_classes=7).sum(0)

    compiled, x = weft.compile(f, fullgraph=True), torch.randn(5)
    for count in (3, 4, 0):
        classes = torch.randint(0, 5, (count, 2))
        torch.testing.assert_close(compiled(x, classes), f(x, classes))
    for bad, text in ((5, "smaller than num_classes"), (-1, "non-negative")):
        for function in (f, compiled):
            with pytest.raises(RuntimeError, match=f"^Class values must be {text}"):
                function(x, torch.full((4, 2), bad))


def factored(x, log):
    log.append("before")
    try:
        root = torch.linalg.cholesky(x)
        log.append("factored")
    except RuntimeError:
        log.append("handled")
        root = torch.linalg.cholesky(x + 10 * torch.eye(3))
    return root * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operator_that_fails_is_handled_by_the_program(backend):
    compiled = weft.compile(factored, backend=backend, fullgraph=True)
    for scale in (1.0, -1.0, 2.0, -1.0):
        logs = [], []
        x = scale * torch.eye(3)
        torch.testing.assert_close(compiled(x, logs[0]), factored(x, logs[1]))
        assert logs[0] == logs[1]


def looked_up(x, index, log):
    log.append("before")
    return (x * 2)[index] + 1


def written_before(x, index, log):
    x.add_(1)
    return looked_up(x, index, log)


def drawn_before(x, index, log):
    return looked_up(torch.rand_like(x), index, log)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [looked_up, written_before, drawn_before])
def test_what_fails_is_done_once(function, backend):
    compiled = weft.compile(function, backend=backend, fullgraph=True)
    compiled(torch.ones(4), torch.tensor([1, 2]), [])
    x, log, again = torch.ones(4), [], weft.counters["capture"]["run_again"]
    with pytest.raises(IndexError) as got:
        compiled(x, torch.tensor([1, 9]), log)
    ran = weft.counters["capture"]["run_again"] - again
    assert (ran, log) == ((1, ["before"]) if function is looked_up else (0, []))
    assert x.max() <= 2 and x.min() >= 1 and (function is written_before or x.max() == 1)
    lines = [entry.name for entry in traceback.extract_tb(got.value.__traceback__)]
    assert (lines[-1] == "looked_up") is bool(ran)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_may_end_early_in_a_compiled_function(early_stop):
    def function(x, w):
        return (x @ w).sin() * 2

    x, found = torch.linspace(-1, 1, 9).reshape(3, 3), []
    for run in (function, weft.compile(function, backend="aot_eager")):
        w = torch.eye(3, requires_grad=True)
        with set_checkpoint_early_stop(early_stop):
            checkpoint(run, x, w, use_reentrant=False).sum().backward()
        found.append(w.grad)
    torch.testing.assert_close(*found)
