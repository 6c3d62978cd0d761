"""NumPy in captured code: arrays and scalars with eager's types, dtypes, values and aliasing."""

import copy
import operator

import numpy as np
import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import nn
from weft_capture.libraries import numpy
from weft_core.errors import Unsupported

NAN, INF = np.nan, np.inf
A = np.arange(6, dtype=np.float32).reshape(2, 3)
X = torch.arange(6.0).reshape(2, 3)
ODD = np.array([[0.0, -0.0, 1.5], [2.5, -2.5, NAN], [INF, -INF, -1.0]])
DATA = (ODD, ODD.astype(np.float32), np.array([[0, -3, 5], [7, 2, -8]]), ODD > 1, np.array(2.5))
CALLS = (
    lambda f, a: f(a),
    lambda f, a: f(a, axis=0),
    lambda f, a: f(a, a),
    lambda f, a: f(a, 2),
    lambda f, a: f(2, a),
    lambda f, a: f([a, a]),
)
# Captured with the arguments of `shapes`, `pieces`, `products` and `constructors`.
OTHER_ARGUMENTS = """
    zeros ones full eye arange clip where reshape swapaxes moveaxis broadcast_to outer
    einsum __imatmul__ __setitem__ take_along_axis fft.fftfreq fft.rfftfreq
    linalg.cholesky hsplit dsplit correlate bartlett blackman hamming hanning kaiser indices
    percentile quantile
""".split()
LAYER = nn.Linear(3, 2)


@pytest.fixture(autouse=True)
def _no_numpy_warnings():
    with np.errstate(all="ignore"):
        yield


def same(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, (np.ndarray, np.generic)):
        near = 1e-5 if left.dtype in (np.float32, np.complex64) else 1e-12
        return (left.dtype, left.shape) == (right.dtype, right.shape) and np.allclose(
            left, right, near, near, equal_nan=True
        )
    return left == right


def check(function, *args, fullgraph=True, calls=2):
    captured = weft_capture.capture(function, eager_backend, fullgraph=fullgraph)
    for _ in range(calls):
        one, other = copy.deepcopy(args), copy.deepcopy(args)
        expected, found = function(*one), captured(*other)
        assert same(expected, found), (expected, found)
        assert same(one, other)
    return captured._weft_capture


def agrees(function, array):
    """Say whether a call is captured; its result must be eager's. None where eager raises."""
    try:
        if function(array.copy()) is NotImplemented:
            return None
    except Exception:  # noqa: BLE001 - whatever NumPy raises for what makes no sense
        return None
    try:
        check(function, array, calls=1)
    except Unsupported:
        return False
    return True


@pytest.mark.every(3)
@pytest.mark.sampled
@pytest.mark.parametrize("name", numpy._FUNCTIONS.split())
def test_functions(name):
    function = operator.attrgetter(name)(np)
    cases = [(call, array) for call in CALLS for array in DATA]
    outcomes = [agrees(lambda a, c=c: c(function, a), array) for c, array in cases]
    assert True in outcomes or name in OTHER_ARGUMENTS


@pytest.mark.every(3)
@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(numpy._KNOWN_METHODS))
def test_methods(name):
    given = ((), (0,), (2,), (-1.5,), (True,), ("float32",), (A[0].copy(),))
    cases = [(args, array) for args in given for array in DATA]
    outcomes = [agrees(lambda a, g=g: getattr(a, name)(*g), array) for g, array in cases]
    assert True in outcomes or name in OTHER_ARGUMENTS


def operators(a):
    return a + 1, 1 + a, a / 3, a // 2, a**2, -a, a @ a.T, a > 2, a == 1, 2 / (a + 1), ~(a > 2)


def indexing(a):
    b = a[0], a[0, 1], a[:, 1:], a[..., 0], a[[0, 1], [1, 2]], a[a.argmax(axis=0)]
    return b, a.shape, a.ndim, a.size, a.dtype, len(a), a.T, a.dtype == np.float32


def shapes(a):
    views = a.reshape(3, 2), np.reshape(a, (-1,)), np.swapaxes(a, 0, 1), a.swapaxes(0, 1)
    more = np.moveaxis(a[None], 0, -1), np.broadcast_to(a[0], (4, 3)) + 0, np.outer(a[0], a[1])
    chosen = np.where(a > 2, a, 0), np.clip(a, 1, 3), np.einsum("ij,kj->ik", a, a)
    square = a @ a.T
    square @= square
    return views, more, chosen, square


def pieces(a):
    halves = np.hsplit(a[:, :2], 2), np.dsplit(np.stack((a, a), 2), 2), np.array_split(a, 2)
    windows = np.bartlett(3), np.blackman(3), np.hamming(3), np.hanning(3), np.kaiser(3, 2.0)
    levels = np.percentile(a, 30), np.percentile(a, [25, 70], axis=1)
    levels += (np.quantile(a, 0.9, axis=0),)
    levels += (
        np.quantile(a, 0.3, keepdims=True),
        np.median(a),
        np.median(a, axis=1, keepdims=True),
    )
    where = np.indices((2, 3)), np.broadcast_arrays(a, a[0])
    return halves, windows, levels, where, a + 1


def products(a):
    square = (a @ a.T).astype(float) + 4 * np.eye(2)
    solved = np.linalg.inv(square), np.linalg.solve(square, a), np.linalg.cholesky(square)
    return solved, np.correlate(a[0], a[1]), np.cross(a, a[::1] + 1), np.linalg.pinv(a)


def writes(a):
    a[0] = 7
    row = a[0]
    row += 1
    kept = row[0]
    a[0, 0] = 100
    a[:, 1:] = a[:, :-1]
    return kept, row, a, np.add(a, 1, out=a) is a


def constructors(x):
    more = torch.from_numpy(np.ones((2, 3), np.float32)) + x
    literal = np.array([[1, 2], [3, 4]]), np.array([1, 2.5])
    sized = np.zeros((2, 3)), np.full((2,), 3), np.arange(5), np.linspace(0, 1, 5), np.eye(3)
    sized += (np.ones(2),)
    return more, literal, sized, np.zeros_like(x.numpy(), dtype=float)


def copies(a):
    b = a.astype(np.float32)
    b += 1
    return a, b, np.array(a), np.asarray(a), np.asarray(a) is a, np.array([a, b])


def iteration(a):
    return [row + 1 for row in a] + [one * 2 for one in a[0]]


def scalars(a):
    return a.sum() * a.astype(float), 1.5 * a.mean(), float(a.sum()) * 2.0, a.max().item() + 1


def in_place_through_a_tensor(x):
    a = x.numpy()
    a += 1
    a[0] *= 2
    return a, x * 1


def through_a_layer(a):
    return LAYER(torch.from_numpy(a)).detach().numpy().argmax(1)


def imported_inside(x):
    module = __import__("numpy")
    return torch.from_numpy(module.add(x.numpy(), 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        operators,
        indexing,
        shapes,
        pieces,
        products,
        writes,
        copies,
        iteration,
        scalars,
        through_a_layer,
    ],
)
def test_arrays_are_captured_whole(function):
    assert check(function, A).graphs


@pytest.mark.parametrize("function", [constructors, in_place_through_a_tensor, imported_inside])
def test_tensors_and_arrays(function):
    assert check(function, X).graphs


def test_integers_become_float64():
    check(lambda a: (a / 2, np.sqrt(a), a.mean(), a * 1.5), A.astype(np.int32))


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (lambda a: a[::-1] + 0, A),
        (lambda x: x + x.numpy(), X),
        (lambda a: a if a.sum() > 0 else a + 1, A),
        (lambda a: 2 // (a + 9), A.astype(int)),
        (lambda a: np.unique(a), A),
        (lambda x: (x * 2).numpy(), X.bfloat16()),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_breaks_runs_as_in_eager(function, argument):
    with pytest.raises(Unsupported):
        weft_capture.capture(function, eager_backend, fullgraph=True)(copy.deepcopy(argument))
    if getattr(argument, "dtype", None) is torch.bfloat16:
        with pytest.raises(TypeError, match="BFloat16"):
            weft_capture.capture(function, eager_backend)(argument)
    else:
        check(function, argument, fullgraph=False)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_arrays_are_guarded_like_tensors():
    def function(a):
        return np.exp(a) * 2 + a.sum()

    read_only = A.copy()
    read_only.flags.writeable = False
    captured = weft_capture.capture(function, eager_backend)
    for array in (A, A, A.astype(float), np.ones((4, 5)), A.T, read_only, A[::-1], A[:, ::2], A):
        assert same(function(array), captured(array))
    shared = X.clone()

    def both(array, tensor):
        array += 1
        return tensor * 2

    optimised = weft_capture.capture(both, eager_backend)
    assert torch.equal(optimised(shared.numpy(), shared), (X + 1) * 2)
    assert torch.equal(optimised(A.copy(), X), X * 2)


def test_errors_that_the_program_wants():
    def function(a):
        return a / 0.0

    captured = weft_capture.capture(function, eager_backend)
    assert np.isnan(captured(A)).any()
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        captured(A)


SCALARS = (np.float64(0.8), np.float32(0.8), np.int64(3), np.int32(2), np.bool_(True), np.bool_(0))
USES = (
    lambda x, a: (x * 2 if a > 2 else x * 3) + (x * 2 if a else x * 3),
    lambda x, a: (x * a, a + x, 1 - a, a * 2, a**2, 0 < a < 2, np.exp(a)),
    lambda x, a: (torch.tensor(a), torch.tensor([[a, a]]), torch.full((2,), a), x.clamp(max=a)),
    lambda x, a: (x + int(a), x * float(a), x * a.item(), f"{a}", max(a, 1), a.dtype, type(a)),
)


@pytest.mark.parametrize("use", range(len(USES)))
def test_scalars_of_numpy_are_numbers_of_their_own_types(use):
    captured = weft_capture.capture(USES[use], eager_backend, fullgraph=True)
    for scalar in SCALARS:
        assert same(USES[use](X, scalar), captured(X, scalar))


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_arrays_of_scalars_have_their_dtypes(scalar):
    def make(x, a):
        return np.array(a), np.asarray([a, a]), x + 1

    expected, actual = make(X, scalar), weft_capture.capture(make, eager_backend)(X, scalar)
    assert same(expected, actual)
    assert [one.dtype for one in expected] == [one.dtype for one in actual]


SCHEDULE = np.cumprod(1 - np.linspace(1e-4, 0.02, 12))


def denoise(x, t, eta):
    a, before = SCHEDULE[t], SCHEDULE[t - 1] if t else 1.0
    sigma = eta * ((1 - before) / (1 - a)) ** 0.5 * (1 - a / before) ** 0.5
    x = before**0.5 * x + (1 - before - sigma**2) ** 0.5 * x
    return (x + sigma if sigma > 0 else x), sigma, torch.full((2,), sigma)


def test_elements_of_a_schedule_are_read_before_the_graph_and_vary():
    graphs = []
    captured = weft_capture.capture(denoise, lambda gm, _: graphs.append(gm) or gm, fullgraph=True)
    for eta in (0.0, 0.5):
        for t in range(11, -1, -1):
            torch.testing.assert_close(captured(X, t, eta), denoise(X, t, eta))
    assert len(graphs) < 10

    def written(x, a):
        a[0] += 1
        return x * a[0], a[-1]

    captured = weft_capture.capture(written, eager_backend)
    for first in (1.0, 2.0, 5.0):
        assert same(written(X, np.array([first, 3.0])), captured(X, np.array([first, 3.0])))


@pytest.mark.parametrize("items", [[np.bool_(True), 1], [1, np.bool_(True)]])
def test_errors_of_scalars_are_the_programs(items):
    def f(x, large):
        try:
            return x + 1, large * np.float32(10), np.float64(0) / np.float64(0), torch.tensor(items)
        except (FloatingPointError, TypeError) as error:
            return x + 1, str(error)

    captured = weft_capture.capture(f, eager_backend)
    for mode in ("ignore", "raise", "ignore"):
        with np.errstate(all=mode):
            assert same(f(X, np.float32(1e38)), captured(X, np.float32(1e38)))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_arrays_that_torch_cannot_share():
    def function(x, fixed, turned, texts):
        y = x * 2
        try:
            fixed[0] = 1
        except ValueError as error:
            y = y + len(str(error))
        y = y + torch.tensor(turned.copy()).sum()
        return y.tolist(), fixed.tolist(), turned[0], len(texts), list(texts)

    fixed = np.ones(3)
    fixed.flags.writeable = False
    arrays = fixed, np.arange(3.0)[::-1], np.array(["a", "b"])
    captured = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        assert captured(X, *arrays) == function(X, *arrays)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_arrays_of_constants_are_known(mode):
    table = torch.arange(20.0)

    def sample(x, steps):
        times = np.linspace(19, 0, steps).round().astype(int)
        last = bool(times[-1:])
        for now, after in zip(times, [*times[1:], -1], strict=True):
            x = x * table[now] + torch.tensor(now)
            if after >= 0:
                x = x + table[after]
        return x, times, int(times[0]), times.tolist(), times.sum(), last

    with mode():
        check(sample, X, 5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_arrays_that_were_written_are_not_known(mode):
    def through_a_view(x):
        array = np.arange(4)
        view = array[1:]
        array *= 2
        return x * 2 if view[0] > 1 else x, view

    def through_a_tensor(x):
        array = np.zeros(3)
        torch.from_numpy(array)[0] = x.shape[0]
        return x + 1 if array[0] else x

    def by_an_item(x):
        array = np.arange(3)
        array[0] = 7
        return x * int(array[0])

    with mode():
        for program in (through_a_view, through_a_tensor, by_an_item):
            check(program, X, fullgraph=False)


def test_integers_of_an_array_index_a_tensor():
    def best(x, scores):
        at = scores.argmax()
        return x[at] * 2, x[at, None] + 1

    check(best, X, np.array([1.0, 3.0]), fullgraph=False)
