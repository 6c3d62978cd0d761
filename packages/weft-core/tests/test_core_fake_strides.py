"""Fake tensors have the strides of real ones, whatever the layouts of the operands."""

import random

import pytest
import torch
from weft_core.fake import fake_mode, make_shape_env, to_fake

UNARY = [torch.neg, torch.sigmoid, torch.logical_not, torch.isnan, lambda x: x.clamp(0, 1)]
BINARY = [torch.add, torch.mul, torch.logical_xor, torch.xlogy, torch.maximum, torch.fmod]
BINARY += [torch.atan2, torch.copysign, torch.hypot, torch.sub, torch.div]
TERNARY = [torch.addcmul, torch.lerp, torch.addcdiv, lambda a, b, c: torch.where(a > 0, b, c)]


def _laid_out(rng, shape):
    """A tensor in some layout: rows, permuted, with gaps, expanded or channels last."""
    kind = rng.choice(["rows", "permuted", "gaps", "expanded", "last"])
    if kind == "permuted":
        order = rng.sample(range(len(shape)), len(shape))
        return torch.randn([shape[d] for d in order]).permute(*map(order.index, sorted(order)))
    if kind == "gaps":
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    if kind == "expanded":
        dim = rng.randrange(len(shape))
        return torch.randn(*shape[:dim], 1, *shape[dim + 1 :]).expand(shape)
    if kind == "last" and len(shape) == 4:
        return torch.randn(shape).to(memory_format=torch.channels_last)
    return torch.randn(shape)


def test_divided_operands_that_are_converted_with_symbolic_sizes():
    one, other = torch.randn(5, 5, 5).double(), torch.randn(5, 5, 5).mT
    mode = fake_mode(make_shape_env())
    fakes = [to_fake(mode, t, range(3), name) for t, name in ((one, "one"), (other, "other"))]
    with mode:
        fake = fakes[0] // fakes[1]
    assert [int(step) for step in fake.stride()] == list((one // other).stride())


def _operands(rng, count):
    whole = [rng.choice([1, 1, 2, 3, 4]) for _ in range(rng.randint(1, 4))]
    for _ in range(count):
        shape = [1 if rng.random() < 0.25 else size for size in whole]
        first = rng.randrange(len(shape)) if rng.random() < 0.15 else 0
        yield _laid_out(rng, tuple(shape[first:]))


@pytest.mark.slow
@pytest.mark.parametrize("operators", [UNARY, BINARY, TERNARY])
@pytest.mark.parametrize("seed", [3, 10])
def test_pointwise_results_of_random_operands(operators, seed):
    rng, mode = random.Random(seed), fake_mode()
    for _ in range(300):
        operator = rng.choice(operators)
        operands = list(_operands(rng, 1 + [UNARY, BINARY, TERNARY].index(operators)))
        real = operator(*operands)
        with mode:
            fake = operator(*(to_fake(mode, one) for one in operands))
        layouts = [(tuple(one.shape), one.stride()) for one in operands]
        assert _steps(real) == _steps(fake), (operator, layouts)


def _steps(tensor):
    """The strides that matter: of sizes above one."""
    return [step for step, size in zip(tensor.stride(), tensor.shape) if size > 1]


@pytest.mark.parametrize("dims", [(0,), (-1,), (0, -1), ()])
@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (4, 1, 2, 5), (4, 3)])
def test_rolled_tensors(shape, dims):
    rng, mode = random.Random(5), fake_mode()
    for _ in range(10):
        x = _laid_out(rng, shape)
        with mode:
            fake = to_fake(mode, x).roll([1] * max(len(dims), 1), dims)
        assert _steps(x.roll([1] * max(len(dims), 1), dims)) == _steps(fake), x.stride()


@pytest.mark.parametrize("seed", [1, 2])
def test_results_of_random_indices(seed):
    rng, mode = random.Random(seed), fake_mode()
    for _ in range(300):
        tensor = _laid_out(rng, tuple(rng.choice([1, 1, 2, 3]) for _ in range(rng.randint(1, 4))))
        shape = tuple(rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 3)))
        some = rng.randrange(tensor.dim())
        indices = [
            _laid_out(rng, shape).gt(0).long() % size if d == some or rng.random() < 0.5 else None
            for d, size in enumerate(tensor.shape)
        ]
        real = torch.ops.aten.index(tensor, indices)
        with mode:
            given = [None if one is None else to_fake(mode, one) for one in indices]
            fake = torch.ops.aten.index(to_fake(mode, tensor), given)
        layouts = [one if one is None else (shape, one.stride()) for one in indices]
        assert _steps(real) == _steps(fake), (tensor.shape, tensor.stride(), layouts)


def test_a_view_of_channels_last_gives_the_strides_of_channels_last():
    x = torch.empty_strided((1, 8, 5, 1), (40, 1, 8, 1))
    mode = fake_mode()
    for operator in (torch.sin, lambda x: x.clamp(min=0), lambda x: x + x, lambda x: x % 2):
        with mode:
            fake = operator(to_fake(mode, x))
        assert fake.stride() == operator(x).stride()
