"""Numbers and sizes that are read out of tensors, with `capture_scalar_outputs` and without."""

import gc
import math

import pytest
import torch
import weft_capture
from capture_check import eager_backend, same

T = torch.tensor
F = torch.nn.functional
X = torch.arange(12.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def settings():
    with weft_capture.settings.patch(capture_scalar_outputs=True):
        yield


def optimise(function, **options):
    optimised = weft_capture.capture(function, eager_backend, **options)
    return optimised, optimised._weft_capture


def numbers(n):
    k = n.item()
    return k, -k, k + 1, k * 2.5, k // 2, k % 2, k / 3, max(k, 2), int(n), float(n), bool(n)


def floats(x, v):
    s = x.item()
    return v * s, torch.full((2,), s), v.clamp(max=s), v.add(v, alpha=s), s * 3, s // 2, s > 1


def mixed(x, n):
    s, k = x.item(), n.item()
    return k * s, s / k, torch.full((k,), s), math.sqrt(s) * k


def logical(b):
    return b.item(), int(b), float(b), b.any().item()


def made(n):
    k = n.item()
    return torch.zeros(k, 2), torch.arange(k), torch.ones(k).sum(), torch.empty(k, 3).shape


def parts(x, n):
    k = n.item()
    return x[:k] * 2, x[k:], x.narrow(1, k, 1), x[0].expand(k, 4) + 1, x.repeat(k, 1)


def places(x, n):
    k = n.item()
    return x[k], x[-1, k], x[..., k], x[None, k, 1:]


def lists(x, n):
    return n.tolist(), x.tolist(), [v * 2 for v in n.tolist()], [p + 1 for p in x.split(n.tolist())]


def masked(x, m):
    y = x[m]
    return y * 2, x.masked_select(x > 2), y.sum() / max(len(y), 1), y.shape[0], y.new_ones(y.shape)


def found(x, m):
    rows = torch.nonzero(m)
    return rows.reshape(-1), m.nonzero(as_tuple=True), torch.where(m)[0] + 1, torch.argwhere(m)


def distinct(n):
    values, places, counts = torch.unique(n, return_inverse=True, return_counts=True)
    return values[places], counts, n.unique() * 2, torch.unique_consecutive(n), torch.bincount(n)


def repeated(x, n):
    return torch.repeat_interleave(x, n, dim=0) * 2, x.repeat_interleave(n, dim=0).sum(0)


def checked(n, x):
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= 3, lambda: "too many rows")
    if k >= 0:  # decided by the check
        x = x + 1
    return x.narrow(0, 0, k)


def written(x, n):
    x = x.clone()
    x[: n.item()] += 1
    x[x > 5] = 0
    return x


def padded(x, n):
    k = n.item()
    return F.pad(x, (k, 1)), F.pad(x, (0, int(n), k, 0), value=2.0) + 1


MASKS = (T([True, False, True]), T([False] * 3), T([True] * 3))
COUNTS = (T(2), T(0), T(1))
CASES = {
    padded: [(X, n) for n in COUNTS],
    numbers: [(T(3),), (T(0),), (T(-5),), (T(1, dtype=torch.int32),)],
    floats: [(T(2.5), X[0]), (T(-0.5), X[0]), (T(0.0), X[0])],
    mixed: [(T(2.5), T(3)), (T(0.1), T(1))],
    logical: [(T(True),), (T(False),)],
    made: [(T(3),), (T(0),), (T(1),)],
    parts: [(X, n) for n in COUNTS],
    places: [(X, T(0)), (X, T(2))],
    lists: [(X, T([1, 2])), (X, T([3, 0]))],
    masked: [(X, m) for m in MASKS],
    found: [(X, m) for m in MASKS],
    distinct: [(T([1, 5, 5, 2]),), (T([0, 0, 0, 0]),)],
    repeated: [(X, T([1, 0, 2])), (X, T([0, 0, 0])), (X, T([1, 1, 1]))],
    checked: [(n, X) for n in COUNTS],
    written: [(X, n) for n in COUNTS],
}


@pytest.mark.slow
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_one_graph_for_every_value(function):
    calls = CASES[function]
    if function is numbers:
        calls = calls[:-1]  # another dtype is another graph
    if function is written and torch.__version__ < "2.13":
        pytest.skip("each slice with a symbolic end has a size of its own")
    optimised, state = optimise(function, fullgraph=True)
    for args in calls:
        assert same(function(*args), optimised(*args))
    assert len(state.graphs) == 1


def test_types_are_those_of_python():
    optimised, _ = optimise(numbers, fullgraph=True)
    assert [type(v) for v in optimised(T(3))] == [type(v) for v in numbers(T(3))]


def read_item(n):
    return n.item() + 1


def read_list(n):
    return n.reshape(1).tolist()


def read_rows(n):
    return n.reshape(1).nonzero()


def read_mask(n):
    return n.reshape(1)[n.reshape(1) > 0]


def read_unique(n):
    return torch.unique(n)


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (read_item, "data-dependent-value"),
        (read_list, "data-dependent-value"),
        (read_rows, "dynamic-output-shape"),
        (read_mask, "dynamic-output-shape"),
        (read_unique, "dynamic-output-shape"),
    ],
)
def test_without_the_setting_it_breaks_and_names_the_setting(function, code):
    with weft_capture.settings.patch(capture_scalar_outputs=False):
        optimised, state = optimise(function)
        assert same(function(T(3)), optimised(T(3)))
    (record,) = state.breaks
    assert record.code == code
    assert "weft.config.capture_scalar_outputs" in record.remedy


def branching(n):
    k = n.item()
    y = torch.ones(3) * k
    if k > 3:
        return y + 1
    return y - 1


def looping(n):
    return [torch.ones(2) * i for i in range(n.item())]


@pytest.mark.parametrize(
    ("function", "code"), [(branching, "data-dependent-branch"), (looping, "data-dependent-value")]
)
def test_what_python_must_know_breaks(function, code):
    optimised, state = optimise(function)
    for number in (2, 4, 3):
        assert same(function(T(number)), optimised(T(number)))
    assert state.breaks[0].code == code


def test_a_failed_check_is_the_programs_error():
    optimised, state = optimise(checked, fullgraph=True)
    optimised(T(2), X)
    with pytest.raises(RuntimeError, match=r"^too many rows"):
        optimised(T(4), X)
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        optimised(T(-1), X)
    assert len(state.graphs) == 1


def unchecked(n, x):
    return x.narrow(0, 0, n.item())


def test_an_operations_own_error_is_eagers():
    optimised, _ = optimise(unchecked, fullgraph=True)
    optimised(T(2), X)
    for number in (7, -1):
        with pytest.raises(RuntimeError) as expected:
            unchecked(T(number), X)
        with pytest.raises(RuntimeError) as got:
            optimised(T(number), X)
        assert str(got.value) == str(expected.value)


def broadcasting(x, n):
    return x + torch.ones(n.item())


def test_an_assumption_that_fails_raises():
    x = torch.arange(4.0)
    optimised, state = optimise(broadcasting, fullgraph=True)
    assert same(optimised(x, T(4)), broadcasting(x, T(4)))
    with pytest.raises(RuntimeError, match="this graph is for inputs with"):
        optimised(x, T(1))
    assert len(state.graphs) == 1


def kept_over_a_break(n, x):
    k = n.item()
    y = x[:k]
    gc.collect()
    return torch.zeros(k) + 1, y * k


@pytest.mark.slow
def test_numbers_are_kept_over_a_break():
    optimised, state = optimise(kept_over_a_break)
    for number in (2, 3, 1):
        assert same(kept_over_a_break(T(number), X), optimised(T(number), X))
    assert [record.code for record in state.breaks] == ["c-function"]


def summed(x, n, scale):
    return x[:n].sum() * scale


def test_ints_from_outside_may_be_negative():
    optimised, _ = optimise(summed)
    for number in (3, -2, -1, 2):
        assert same(summed(X, number, 1.5), optimised(X, number, 1.5))
