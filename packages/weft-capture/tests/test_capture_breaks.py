"""Graph breaks: what runs before, at and after them must be what eager runs; resumed and cached."""

import contextlib
import gc
import sys
import warnings
from collections import deque

import pytest
import torch
import weft_capture
from capture_check import Manager, X, check, eager_backend, same
from weft_core.errors import Unsupported


def codes(state):
    return [record.code for record in state.breaks]


def branch(x):
    x = x + 1
    if x.sum() > 0:
        return x * 2
    return x - 1


def branch_in_loop(x):
    out = []
    for i in range(4):
        x = x * 0.5 - i
        if x.mean() > 0:
            out.append(x)
        else:
            out.append(x.abs())
    return out


def explicit_break(x):
    y = x + 1
    weft_capture.graph_break()
    return y * 2


def unbound_cells(x):
    first, texts = 1, []

    def use(x):
        nonlocal first
        for _ in range(2):
            x = through_a_break(x) * 2
            try:
                del first
            except NameError as error:
                texts.append(str(error))
        return x

    x = use(x)
    for _ in range(2):
        try:
            texts.append(first)
        except UnboundLocalError as error:
            texts.append(str(error))
        weft_capture.graph_break()
    return x, texts


def cells_of_later_comprehensions(x):
    i = 7

    def inner(x):
        late = [lambda: i for i in (1, 2) if through_a_break(x) is not None]
        return late[0](), i, [i for i in (1, 2) if through_a_break(x) is not None]

    return inner(x + 1), x * i


def names_of_variables(x):
    y = x + 1
    return eval("sorted(locals())"), y.sin()


def through_a_break(x):
    weft_capture.graph_break()
    return x


def break_in_no_grad(x):
    with torch.no_grad():
        y = x * 2
        weft_capture.graph_break()
        z = y + 1
        inside = torch.is_grad_enabled()
    return z, inside, torch.is_grad_enabled()


def break_in_manager(x):
    log = []
    with Manager(log):
        x = x + 1
        weft_capture.graph_break()
        x = x * 2
        log.append("body")
    return x, log


def break_in_try(x):
    log = []
    try:
        x = x + 1
        weft_capture.graph_break()
        raise ValueError("after")
    except ValueError as error:
        log.append(str(error))
    finally:
        log.append("finally")
    return x * 2, log


def call_that_raises(x):
    def fail(v):
        weft_capture.graph_break()
        raise KeyError("real")

    try:
        x = x + 1
        fail(x)
    except KeyError:
        x = x * 3
    return x


def nested_break(x):
    def inner(v):
        v = v.sin()
        weft_capture.graph_break()
        return v.cos()

    return inner(x + 1) * 2


def break_with_closure(x):
    count = 0

    def add(y):
        nonlocal count
        count += 1
        return y + count

    x = add(x)
    weft_capture.graph_break()
    x = add(x)
    return x, count


def break_with_containers(x):
    shared = [x]
    d = {"a": shared, "b": shared}
    weft_capture.graph_break()
    d["a"].append(x + 1)
    return d["b"], d["a"] is d["b"]


def break_in_arguments(x):
    return torch.add(x + 1, int(x.sum()) + x * 2)


def item(x):
    n = int(x.sum().item())
    return x + n


def calls_what_nobody_knows(x):
    x = x + 1
    gc.collect()
    return x * 2


def break_in_enumerate(x):
    out = []
    for i, v in enumerate([x, x + 1, x + 2]):
        weft_capture.graph_break()
        out.append(v * i)
    return out


def break_in_generator_argument(x):
    return sum(int(t) for t in (x + 1).flatten())


@weft_capture.disable
def called(function):
    return function()


def closures_of_comprehensions_behind_a_break(x):
    weft_capture.graph_break()
    first = [(called(lambda: x + y), lambda: y) for y in (x, x + 1)]
    second = [called(lambda: x * y) for y in (x, x + 2)]
    return [part for part, _ in first], [late() for _, late in first], second


def break_in_comprehension(x):
    return [int(row.sum()) for row in x]


def mutation_before_break(x, items):
    items.append(x + 1)
    weft_capture.graph_break()
    items.append(x + 2)
    return len(items)


BREAKS = [
    (branch, X), (branch, -X - 5), (branch_in_loop, X), (explicit_break, X), (break_in_no_grad, X),
    (break_in_manager, X), (break_in_try, X), (call_that_raises, X), (nested_break, X),
    (break_with_closure, X), (break_with_containers, X), (break_in_arguments, X), (item, X),
    (calls_what_nobody_knows, X), (break_in_enumerate, X), (break_in_generator_argument, X),
    (closures_of_comprehensions_behind_a_break, X),
    (break_in_comprehension, X), (mutation_before_break, X, [1]),
    (unbound_cells, X), (names_of_variables, X), (cells_of_later_comprehensions, X),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("case", BREAKS, ids=lambda case: case[0].__name__)
def test_break_gives_eager_results(case):
    state = check(*case, fullgraph=False)
    assert state.breaks
    assert state.graphs


def test_a_variable_unbound_in_a_comprehension_raises_for_real():
    def unbound(x):
        parts = [last for _ in range(2) for last in [last, 1]]  # noqa: F821
        last = x + 1
        return parts, lambda: last

    with pytest.raises(UnboundLocalError, match="local variable 'last' where"):
        weft_capture.capture(unbound, eager_backend)(X)


def test_fullgraph_raises_with_the_reason():
    with pytest.raises(Unsupported, match="data-dependent-branch") as caught:
        weft_capture.capture(branch, eager_backend, fullgraph=True)(X)
    assert caught.value.user_stack[-1].name == "branch"


def test_both_sides_of_a_branch_are_compiled_once():
    optimised = weft_capture.capture(branch, eager_backend)
    for value in (X, -X - 5, X, -X - 5):
        assert same(optimised(value), branch(value))
    assert len(optimised._weft_capture.graphs) == 3


def test_gradients_flow_through_a_break():
    x = X.clone().requires_grad_()
    y = X.clone().requires_grad_()
    explicit_break(x).sum().backward()
    weft_capture.capture(explicit_break, eager_backend)(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def raises_value_error(x):
    x = x + 1
    if x.shape[0] == 2:
        raise ValueError("two rows")
    return x


def test_user_exception_with_traceback():
    optimised = weft_capture.capture(raises_value_error, eager_backend)
    with pytest.raises(ValueError, match="two rows") as caught:
        optimised(X)
    names = [entry.name for entry in caught.traceback]
    assert names[-1] == "raises_value_error"


def bad_shapes(x):
    try:
        x = x + 1
        x = x @ x
    finally:
        x = None
    return x


def test_op_error_is_eagers_error():
    with pytest.raises(RuntimeError) as eager:
        bad_shapes(X)
    with pytest.raises(RuntimeError) as captured:
        weft_capture.capture(bad_shapes, eager_backend)(X)
    assert str(eager.value) == str(captured.value)


def test_disabled_function_runs_eagerly():
    seen = []

    @weft_capture.disable
    def helper(v):
        seen.append(weft_capture.is_compiling())
        return v * 2

    def function(x):
        return helper(x + 1) + 1

    optimised = weft_capture.capture(function, eager_backend)
    assert same(optimised(X), function(X))
    assert seen == [False, False]
    assert codes(optimised._weft_capture) == ["disabled"]


def test_internal_error_runs_eagerly_with_one_warning(monkeypatch):
    monkeypatch.setattr(weft_capture.settings, "raise_internal_errors", False)
    monkeypatch.setattr("weft_capture.convert.outer_frame", lambda *args: 1 / 0)
    optimised = weft_capture.capture(branch, eager_backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(optimised(X), branch(X))
        assert same(optimised(X), branch(X))
    assert [str(w.message)[:10] for w in caught] == ["[internal]"]


@contextlib.contextmanager
def scope(log):
    log.append("in")
    try:
        yield 3
    finally:
        log.append("out")


def uses_contextlib(x):
    log = []
    with scope(log) as n:
        x = x + n
    return x, log


def test_contextlib_manager():
    check(uses_contextlib, X, fullgraph=False)


def test_functions_without_tensors_are_left_alone():
    seen = []

    def note(step, text):
        seen.append(f"{step}: {text}")

    def function(x, step):
        x = x + 1
        weft_capture.graph_break()
        note(step, "text")
        return x * 2

    def note_only(x):
        with torch.no_grad():
            print_later(len(seen))
        return x + 1

    optimised = weft_capture.capture(function, eager_backend)
    for step in range(3):
        assert same(optimised(X, step), (X + 1) * 2)
    assert seen == ["0: text", "1: text", "2: text"]
    logged = []

    def print_later(count):
        weft_capture.graph_break()
        logged.append(count)

    optimised = weft_capture.capture(note_only, eager_backend)
    for _ in range(3):
        optimised(X)
        seen.append("x")
    assert logged == [3, 4, 5]


def test_a_long_loop_that_leads_to_no_tensor_runs_as_it_is_and_says_so():
    def count(held):
        held.clear()
        weft_capture.graph_break()
        return sum([i for i in range(100)])

    with weft_capture.settings.patch(plain_limit=200):
        captured = weft_capture.capture(count, eager_backend)
        with pytest.warns(UserWarning, match="too-long.*count from line .* runs eagerly"):
            assert [captured([X]), captured([X])] == [4950, 4950]
    assert codes(captured._weft_capture) == ["graph-break", "too-long"]


def test_a_long_loop_ahead_of_a_tensor_that_is_in_sight_is_captured():
    def function(n):
        return torch.full((2,), sum([i % 2 for i in range(n)]))

    with weft_capture.settings.patch(plain_limit=200):
        assert weft_capture.capture(function, eager_backend, fullgraph=True)(100)[0] == 50


def test_changes_in_an_instruction_that_breaks_are_taken_back_one_by_one():
    def function(x):
        items, ends, names = [1, 2], deque([1, 2]), {"a": 1}

        def key(number):
            items.append(items.pop() + number)
            items.append(names.setdefault("b", ends.popleft()))
            ends.appendleft(names["b"] + 5)
            names["a"] = ends.pop()
            weft_capture.graph_break()
            items.reverse()
            return number

        return x + 1, sorted([4, 3], key=key), items, ends, names

    found = weft_capture.capture(function, eager_backend)(X)
    assert found[1:] == function(X)[1:] == ([3, 4], [1, 4, 6, 1], deque(), {"a": 6, "b": 1})


def test_a_long_loop_inside_of_one_instruction_is_given_up():
    def function(x):
        return sum(i % 2 for i in range(200)), x + 1

    with weft_capture.settings.patch(instruction_limit=500):
        captured = weft_capture.capture(function, eager_backend)
        assert captured(X)[0] == 100
    assert [record.code for record in captured._weft_capture.breaks][:1] == ["too-long"]


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_every_variable_is_shown_behind_a_break():
    def function(x):
        _unread, count = 1, int(x.sum())

        def callers():
            return sorted(sys._getframe(1).f_locals)

        shown = [(lambda: [sorted(locals()) for _ in (int(x.sum()),)])() for _ in range(2)]
        return (x + count).tolist(), dir(), sorted(vars()), callers(), shown

    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        assert captured(X) == function(X)
