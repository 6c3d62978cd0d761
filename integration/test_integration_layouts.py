"""Arguments in every memory layout, leaves and intermediates, give eager's values and gradients."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
import weft

LAYOUTS = {
    "dense": lambda base: base(4, 6, 8),
    "gap after each matrix": lambda base: base(4, 7, 8)[:, :6],
    "gap after each row": lambda base: base(4, 6, 9)[..., 1:],
    "every second": lambda base: base(8, 6, 16)[::2, :, ::2],
    "transposed": lambda base: base(4, 8, 6).transpose(1, 2),
    "permuted": lambda base: base(6, 8, 4).permute(2, 0, 1),
    "expanded": lambda base: base(4, 1, 8).expand(4, 6, 8),
    "overlapping": lambda base: base(60).as_strided((4, 6, 8), (10, 2, 1)),
    "offset": lambda base: base(5, 6, 8)[1:],
}
WEIGHT = torch.linspace(-1, 1, 64).reshape(8, 8)


def in_place(x):
    x = x * 1
    x[:, 0].mul_(2)
    return x.relu_()


PROGRAMS = {
    "linear of a slice": lambda x: torch.tanh(F.linear(x[:, 0], WEIGHT)),
    "softmax": lambda x: x.softmax(-1) + x.sum(1, keepdim=True),
    "norm": lambda x: F.layer_norm(x, (8,)) * x,
    "batched product": lambda x: x @ x.transpose(1, 2),
    "views": lambda x: (x.reshape(24, 8) + 1, x.flatten(1).cos(), x[1:].sin()),
    "in place": in_place,
    "alias": lambda x: (x[:, 1:], x.transpose(0, 1), x * 2),
}


def make(layout, origin, dtype=torch.float32):
    """Return (the tensor to take gradients of, the argument)."""

    def base(*shape):
        start = torch.Generator().manual_seed(0)
        tensor = (
            torch.rand(shape, generator=start).add(0.1).to(dtype).requires_grad_(origin != "plain")
        )
        roots.append(tensor)
        return tensor * 1 if origin == "intermediate" else tensor

    roots: list[torch.Tensor] = []
    argument = LAYOUTS[layout](base)
    if origin == "leaf":
        argument = argument.detach().requires_grad_()
        return argument, argument
    return roots[0], argument


def run(function, layout, origin):
    root, argument = make(layout, origin)
    results = function(argument)
    results = results if isinstance(results, tuple) else (results,)
    if origin != "plain":
        sum((result.double() ** 2).sum() for result in results).backward()
    return results, root.grad


@contextlib.contextmanager
def subject(name):
    """Say in a failure what it is about."""
    try:
        yield
    except AssertionError as error:
        error.add_note(name)
        raise


@pytest.mark.every(3)
@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
@pytest.mark.parametrize("origin", ["plain", "leaf", "intermediate", "view"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_layout(program, origin, backend):
    function = PROGRAMS[program]
    for layout in LAYOUTS:
        weft.reset()
        expected, grad = run(function, layout, origin)
        results, got = run(weft.compile(function, backend=backend), layout, origin)
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.stride() == theirs.stride(), layout
        with subject(layout):
            torch.testing.assert_close(results, expected)
            torch.testing.assert_close(got, grad)


DRAWS = {
    "dropout": lambda x: F.dropout(x.transpose(0, 1), 0.5),
    "channel dropout": lambda x: F.dropout1d(x.transpose(0, 1), 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x.permute(2, 0, 1), 0.5, training=True),
    "in place": lambda x: x.clone().permute(2, 1, 0).bernoulli_(0.3),
    "in place with gaps": lambda x: x.clone().transpose(0, 1)[:, :2].bernoulli_(0.3),
    "pure": lambda x: torch.bernoulli(x.transpose(0, 1), 0.5),
    "of tensors": lambda x: torch.bernoulli(x.sigmoid().transpose(0, 1)),
    "uniform": lambda x: torch.rand_like(x.transpose(0, 1)),
    "normal": lambda x: torch.empty_like(x.transpose(0, 1)).normal_(),
}


@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_land_where_eager_puts_them(draw, backend):
    x = torch.randn(3, 5, 8)
    results = []
    for function in (DRAWS[draw], weft.compile(DRAWS[draw], backend=backend)):
        torch.manual_seed(1)
        results.append(function(x))
    assert torch.equal(*results)
    assert results[0].stride() == results[1].stride()


# What gcc 12 gets wrong: elements of a row taken in another order, added up or under masks.
SHUFFLED = {
    "rolled and added": lambda x: (torch.roll(x, 1, 1) ** 2).sum(),
    "joined and added": lambda x: (torch.cat([x[:, 1:], x[:, :1]], 1) ** 2).sum(),
    "rows": lambda x: torch.cat([x[:, 1:] * 2, x[:, :1]], 1).prod(1),
    "columns": lambda x: torch.roll(x, 1, 1).sin().sum(0),
    "padded": lambda x: F.pad(x.flip(1), (0, 0, 1, 1)) + 0,
    "twice": lambda x: (torch.cat([x[:, 1:] * 3, x[:, :1]], 1).roll(1, 1) * x).sum(1).sin(),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("program", SHUFFLED.values(), ids=SHUFFLED.keys())
def test_rows_of_few_elements_in_another_order(program, dtype, dynamic):
    compiled = weft.compile(program, dynamic=dynamic)
    for shape in ((16, 2), (37, 2), (33, 3), (20, 4)):
        x = torch.rand(shape, dtype=dtype).requires_grad_()
        results = [each(x) for each in (compiled, program)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x) for each in results))


@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
def test_dropout_whose_gradient_is_laid_out_otherwise_than_on_fakes(backend):
    def program(x, w):
        y = F.dropout(F.linear(x.transpose(1, 3), w), 0.5)
        return y.transpose(1, 2).reshape(x.shape[0], -1)

    compiled = weft.compile(program, backend=backend, dynamic=True)
    for n in (2, 3):
        found = []
        for function in (program, compiled):
            x = torch.ones(n, 4, 2, 3, requires_grad=True)
            w = torch.ones(5, 4, requires_grad=True)
            torch.manual_seed(0)
            function(x, w).cumsum(0).sum().backward()
            found.append((x.grad, w.grad))
        torch.testing.assert_close(*found)
