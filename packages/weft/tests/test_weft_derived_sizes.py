"""Sizes made of other sizes that become 0 or 1 from one call to the next, and integers."""

import pytest
import torch
import weft


@pytest.fixture(autouse=True)
def fresh():
    weft.reset()
    yield
    weft.reset()


def z(n):
    return torch.arange(n) * 1.5 - 3


def same_in_turn(function, calls, **arguments):
    """Compare each call of one compiled function with eager, what it raises included."""
    compiled = weft.compile(function, **arguments)
    for call in calls:
        try:
            expected = function(*call)
        except (RuntimeError, IndexError):
            with pytest.raises((RuntimeError, IndexError)):
                compiled(*call)
            continue
        torch.testing.assert_close(compiled(*call), expected, rtol=1e-6, atol=0)


ONE = {
    "view": lambda x: x.view(-1, 4) + torch.ones(3, 4),
    "reshape": lambda x: x.reshape(2, -1)[:, :4] - torch.ones(2, 4),
    "unflatten": lambda x: x.unflatten(0, (-1, 4)) + torch.ones(3, 4),
    "quotient": lambda x: x[: x.shape[0] // 4] + torch.ones(3),
    "rest": lambda x: x[: x.shape[0] % 3] + torch.ones(2),
    "first chunk": lambda x: x.chunk(3)[0] + torch.ones(4),
    "last chunk": lambda x: x.chunk(3)[-1] + torch.ones(4),
    "steps": lambda x: x[::4] + torch.ones(3),
    "where": lambda x: torch.where(x[::4] > 0, torch.ones(3), x[1::4].sum()),
    "windows": lambda x: x.unfold(0, 3, 2) + torch.ones(4, 3),
    "expanded": lambda x: x.view(-1, 4).expand(3, -1).sum(0),
}


@pytest.mark.every(3)
@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("name", ONE)
def test_a_derived_size_that_is_one_is_broadcast(name, dynamic):
    sizes = (12, 4, 8, 5, 3, 7)
    same_in_turn(ONE[name], [(z(n),) for n in sizes], dynamic=dynamic)


TWO = {
    "view": lambda x, y: x.view(-1, 4) * y.view(-1, 4),
    "quotient": lambda x, y: x[: x.shape[0] // 4] * y[: y.shape[0] // 4],
    "rest": lambda x, y: x[: x.shape[0] % 4] + y[: y.shape[0] % 4],
    "steps": lambda x, y: x[::4] * y[::4],
}


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("name", TWO)
def test_one_of_two_derived_sizes_is_one(name, dynamic):
    sizes = ((12, 12), (4, 8), (8, 4), (4, 4), (5, 2))
    same_in_turn(TWO[name], [(z(a), z(b)) for a, b in sizes], dynamic=dynamic)


INTEGERS = {
    "slice": lambda x, k: x[k:] * 2,
    "until": lambda x, k: x[:k] * 2,
    "narrow": lambda x, k: x.narrow(0, k, 2) * 2,
    "element": lambda x, k: x[k] * 2,
    "quotient": lambda x, k: x * (k // 2) + k % 3,
    "by": lambda x, k: x * (7 // k) + 7 % k,
    "arange": lambda x, k: torch.arange(k, 7) * 2,
    "pad": lambda x, k: torch.nn.functional.pad(x, (k, 2)) * 2,
    "roll": lambda x, k: x.roll(k) * 2,
    "tril": lambda x, k: x.view(5, 6).tril(k) * 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTEGERS)
def test_arguments_that_are_negative_integers(name):
    numbers = (-3, -2, -7, -5, 3, 4)
    same_in_turn(INTEGERS[name], [(z(30), k) for k in numbers])


@pytest.mark.slow
def test_products_of_sizes_in_a_gradient():
    """The backward is given the product alone, and tensors that show neither factor."""

    def of_sizes(x, s):
        return x.shape[0] * x.shape[1] * s.exp()

    def of_integers(a, b, s):
        return (a * b + 2 * a - 1) * s.exp()

    def as_a_size(a, b, s):
        return s.exp().sum() * torch.ones(a * b)

    pairs = ((8, 9), (4, 5), (4, 7), (6, 6))
    for function in (of_sizes, of_integers, as_a_size):
        compiled = weft.compile(function)
        for a, b in pairs:
            given = (torch.ones(a, b),) if function is of_sizes else (a, b)
            s = torch.tensor([0.5, -1.0], requires_grad=True)
            (actual,) = torch.autograd.grad(compiled(*given, s).sum(), s)
            (expected,) = torch.autograd.grad(function(*given, s).sum(), s)
            torch.testing.assert_close(actual, expected)


def test_floats_made_of_sizes_are_computed_in_the_code():
    def function(x, n):
        k = x.shape[0]
        decay = min(0.9, (1 + n) / (10 + n))
        return x * decay, x * max(k / 3, 1.2), x * (k / 2 % 1.5), x * abs(1 - k / 2), k * 0.1

    compiled = weft.compile(function)
    for k, n in ((3, 2), (4, 3), (5, 40)):
        x = torch.randn(k, 3)
        torch.testing.assert_close(compiled(x, n), function(x, n))
    (frame,) = weft.report().frames
    assert not frame.uncompiled


def test_ints_of_floats_of_sizes_are_computed_by_python():
    def capacity(x, factor):
        x = x.reshape(-1, 3)
        count = int(factor * x.shape[0] * 2 / 4)
        return x.new_zeros(count, 2) + x.sum(), x[:count] * 2, count

    compiled = weft.compile(capacity)
    for rows, columns in ((2, 6), (3, 5), (4, 8)):
        x = torch.randn(rows, columns, 3)
        torch.testing.assert_close(compiled(x, 1.3), capacity(x, 1.3))
    (frame,) = weft.report().frames
    assert not frame.uncompiled and frame.graphs == 2
