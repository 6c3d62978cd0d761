"""Operators under weft.compile and in eager: what random programs have found."""

import pytest
import torch
import torch.nn.functional as F
import weft
from weft_core import events


@pytest.mark.parametrize(
    "power",
    [
        lambda x: x.pow(x.shape[0] % 3),
        lambda x: x ** (x.shape[0] // 2),
        lambda x: torch.pow(x.exp(), x.shape[0] / 2),
    ],
)
def test_a_power_with_a_symbolic_exponent_is_compiled_with_its_gradient(power):
    compiled = weft.compile(power)
    for size in (4, 5, 6, 7):
        x = torch.randn(size, requires_grad=True)
        found, wanted = compiled(x), power(x)
        torch.testing.assert_close(found, wanted)
        grads = [torch.autograd.grad(result.sum(), x)[0] for result in (found, wanted)]
        torch.testing.assert_close(*grads)
    assert not events.notified


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_mean_losses_over_a_size_that_comes_to_zero(loss):
    def halves(x):
        half = x[: x.shape[0] // 2]
        return loss(half, half * 2)

    compiled = weft.compile(halves)
    for size in (8, 6, 2, 1, 0):
        x = torch.arange(1.0, size + 1).requires_grad_()
        found, wanted = compiled(x), halves(x)
        torch.testing.assert_close(found, wanted, equal_nan=True)
        grads = [torch.autograd.grad(result, x)[0] for result in (found, wanted)]
        torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, i: x[:, i],
        lambda x, i: x[i, :, i.contiguous()],
        lambda x, i: 2.0**x,
        lambda x, i: F.logsigmoid(x),
        lambda x, i: F.one_hot(i, 5),
        lambda x, i: x.masked_fill(x > 0, 1.0),
        lambda x, i: torch.copysign(x, x.contiguous()),
    ],
)
def test_results_of_permuted_operands_have_eagers_strides(program):
    x = torch.randn(3, 4, 5).permute(2, 0, 1)
    index = torch.randint(0, 3, (2, 4, 3)).permute(2, 0, 1)
    found, wanted = weft.compile(program)(x, index), program(x, index)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize("backend", ["codegen", "aot_eager"])
@pytest.mark.parametrize("shape", [(1, 0), (2, 4, 3, 0), (0, 2, 3)])
def test_group_norm_of_no_elements_has_a_gradient(shape, backend):
    def norm(x, w):
        return F.group_norm(x, 1, w, w)

    grads = []
    for function in (norm, weft.compile(norm, backend=backend)):
        x, w = torch.ones(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
        grads.append(torch.autograd.grad(function(x, w).sum(), (x, w)))
    torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize("size", [7, 17, 33, 100, 768])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e5 / 3])
def test_norms_of_equal_numbers_are_zero(size, value):
    def norms(x):
        of_batch = F.batch_norm(x.t(), None, None, training=True)
        return F.layer_norm(x, x.shape[1:]), F.group_norm(x, 1), of_batch, torch.var_mean(x, 1)[1]

    x = torch.full((4, size), value)
    *zeros, mean = weft.compile(norms)(x)
    assert not any(one.any() for one in zeros)
    assert torch.equal(mean, x[:, 0])


def test_mean_beside_an_infinity_is_infinite():
    x = torch.tensor([[1.0, 2.0, torch.inf]])
    assert weft.compile(lambda x: torch.var_mean(x, 1))(x)[1].item() == torch.inf


def test_indices_that_take_nothing_are_not_checked():
    """A graph that raises, and eager does not, runs once more in eager."""

    def take(x):
        return x[..., [0, 0, 1]] * 2

    found = weft.compile(take)(torch.ones(0, 1))
    assert found.shape == take(torch.ones(0, 1)).shape
    assert not events.counters["capture"]["run_again"]


SINGLE = torch.randn(4, 4, 1, 1).to(memory_format=torch.channels_last)
ODD = torch.tensor([[float("inf"), 1.0, 1e20], [float("nan"), 2.0, -1e20]])


def filled(view):
    def fill(x):
        x = view(x.clone())
        x.narrow(-1, 0, 1).fill_(0.1)
        return x

    return fill


@pytest.mark.parametrize(
    ("program", "x"),
    [
        (lambda x: F.pad(F.glu(x, 0), (-1, 2)), SINGLE),
        (lambda x: F.pad(x[:2] * x[2:], (1, 2)), SINGLE),
        (lambda x: F.softmin(x.new_full((3,), -float("inf")).view(-1, 1), -2), SINGLE),
        (filled(lambda x: x.expand(1, 1, *x.shape)), ODD > 1),
        (filled(lambda x: x.expand(1, -1, -1)), ODD),
        (filled(lambda x: x.expand_as(x)), ODD),
        (filled(lambda x: torch.broadcast_to(x, (1, 2, 3))), ODD),
        (filled(lambda x: torch.broadcast_tensors(x, x)[0]), ODD),
        (lambda x: (x.sum(0, dtype=torch.bool), (x * 0).prod(dtype=torch.bool)), SINGLE),
        (lambda x: F.pad(x, (1, 0), value=2**63 - 1), torch.arange(3)),
        (lambda x: (x.norm(1, -1), x.norm(3, (-1, -2)), x.norm(4)), torch.randn(4, 3, 1)),
        (lambda x: x.std(0), torch.full((8, 5), 0.1)),
        (lambda x: (x.std(), x.var(1), x.half().std(0)), torch.randn(8, 33) * 1e4 + 1e5),
        (lambda x: x.std(-1, unbiased=False), torch.linspace(-3e38, 3e38, 21).view(3, 7)),
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_results_are_eagers_to_the_last_stride(program, x, dynamic):
    found, wanted = weft.compile(program, dynamic=dynamic)(x), program(x)
    torch.testing.assert_close(found, wanted, equal_nan=True, check_stride=True)
    assert not events.notified


def test_rrelu_can_be_differentiated_again_outside_of_training():
    x = torch.linspace(-2, 2, 6, requires_grad=True)
    compiled = weft.compile(lambda x: F.rrelu(x) * x)
    (once,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), x)
    torch.testing.assert_close(twice, torch.where(x > 0, 2.0, 11 / 24))


@pytest.mark.parametrize("program", [lambda x, n: x ^ n, lambda x, n: x & n, lambda x, n: x | x])
def test_bits_of_floats_raise_what_the_operator_raises(program):
    compiled = weft.compile(program, dynamic=True)
    for n in (3, 5):
        with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
            compiled(torch.ones(4), n)


def test_isin_finds_numbers_beside_nan():
    x = torch.cat([torch.linspace(-3, 3, 15), torch.tensor([torch.nan])])[torch.randperm(16)]
    for test in (x, x[:3], torch.cat([x, x * 2, x * 3])):
        assert weft.compile(torch.isin)(x, test).equal(torch.isin(x, test))


def test_products_of_symbolic_sizes_are_no_views():
    def product(x, y):
        return x @ y

    compiled = weft.compile(product, dynamic=True)
    for shapes in [((1, 6, 2, 3), (1, 6, 3, 2)), ((2, 3), (3,)), ((4, 2, 3), (3,)), ((3,), (3, 2))]:
        x, y = (torch.randn(shape, requires_grad=True) for shape in shapes)
        found = compiled(x, y)
        torch.testing.assert_close(found, x @ y)
        assert not found._is_view()
        first = torch.autograd.grad(found.square().sum(), x, create_graph=True)[0]
        wanted = torch.autograd.grad((x @ y).square().sum(), x, create_graph=True)[0]
        pair = [torch.autograd.grad(one.sum(), y)[0] for one in (first, wanted)]
        torch.testing.assert_close(*pair)


def test_operands_that_are_converted_decide_the_layout():
    x = torch.randint(0, 2, (1, 5, 2, 3)).bool().permute(0, 3, 1, 2)[..., ::4]

    def norm(x):
        return F.batch_norm(torch.xlogy(x, x), None, None, training=True)

    found, wanted = weft.compile(norm)(x), norm(x)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize(
    "program",
    [
        lambda x, i: x.contiguous() // (x.abs() + 1),
        lambda x, i: x[i],
        lambda x, i: x.contiguous()[:, i],
        lambda x, i: x[:1].mT[:, i.flatten()],
        lambda x, i: torch.copysign(x.repeat(2, 1, 1, 1), x),
    ],
)
def test_results_of_permuted_operands_of_symbolic_sizes_have_eagers_strides(program):
    compiled = weft.compile(program, dynamic=True)
    for size in (5, 7):
        x = torch.randn(size, 6, size, dtype=torch.float16).permute(2, 1, 0)
        index = torch.randint(0, 5, (size, 4)).t()
        found, wanted = compiled(x, index), program(x, index)
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()


def test_an_empty_index_scatters_nothing_of_a_source_of_any_shape():
    def program(x, index, source):
        return x.scatter(0, index, source), x.scatter_add(0, index, source)

    args = torch.ones(3, 2), torch.zeros(0, 2, dtype=torch.long), torch.ones(7)
    torch.testing.assert_close(weft.compile(program)(*args), program(*args))


def test_losses_skip_nan_where_eager_does():
    x = torch.tensor([[torch.nan, 1.0, 2.0], [torch.inf, 1.0, 0.0], [1.0, 2.0, 3.0]])
    loss = torch.nn.functional.multi_margin_loss
    target = torch.tensor([0, 0, 2])
    torch.testing.assert_close(weft.compile(loss)(x, target), loss(x, target), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: (x - x * y).amax(1),
        lambda x, y: (x * y - x / 3).amax(1),
        lambda x, y: torch.where(x * 3 * y + x > y / 3 - x, x * 2, y),
        lambda x, y: (x * y - x / 3).max(0).values,
        lambda x, y: ((x / 3 - y) * x).argmax(1),
        lambda x, y: (x * y - x / 3).cummax(1).indices,
        lambda x, y: -0.3 / x.exp() - (-0.3 / x.exp()).amax(0),
        lambda x, y: (x * y).exp() + (x * y).exp().view(20, -1).amax(1).sum(),
    ],
)
def test_what_is_compared_is_rounded_in_the_forward_and_the_backward(program, dtype):
    torch.manual_seed(0)
    x, y = (torch.randn(6, 400).to(dtype).requires_grad_() for _ in range(2))
    found, wanted = weft.compile(program)(x, y), program(x, y)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    if wanted.is_floating_point():
        grads = [torch.autograd.grad(r.sum(), x)[0] for r in (found, wanted)]
        torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)


ALIKE = {
    "norm": (lambda x: x.norm(1, -1).repeat(2, 1, 1), torch.ones(5, 6, 1)),
    "norm-of-two": (lambda x: x.norm(3, (-2, -1)).unsqueeze(0), torch.ones(3, 1, 1)),
    "logits-float16": (F.binary_cross_entropy_with_logits, torch.ones(5), torch.ones(5).half()),
    "logits-double": (F.binary_cross_entropy_with_logits, torch.ones(5).double(), torch.ones(5)),
    "soft-margin": (F.soft_margin_loss, torch.ones(5), torch.ones(5).double()),
    "clamp-int": (lambda x: x.clamp(min=torch.nan), torch.arange(5)),
    "clamp-double": (lambda x: x.clamp(max=torch.nan), torch.ones(9, 4).double().t()),
    "clamp-bfloat16": (lambda x: x.clamp_(torch.nan), torch.ones(3, 17).bfloat16()),
    "clamp-both": (lambda x: x.clamp(torch.nan, 1.0), torch.ones(9)),
    "clamp-tensor": (lambda x: x.clamp(x / 0 * 0), torch.ones(9)),
    "fft-of-real": (torch.fft.fft2, torch.ones(49).unfold(0, 33, 1)),
    "fft-of-complex": (torch.fft.ifft2, torch.ones(8, 5, dtype=torch.complex64).t()),
    "scatter": (lambda x, i: x.scatter(-1, i % 2, x.sum()), torch.ones(6), torch.tensor([True])),
    "grid": (lambda x: torch.meshgrid(x, x, indexing="ij")[0].logical_not_(), torch.tensor([True])),
    "scatter-expanded": (lambda x: x.diagonal_scatter(x[:, 0]).exp(), torch.ones(3).expand(2, 3)),
    "grids": (lambda x, y: torch.meshgrid([x, y], indexing="ij"), torch.ones(3), torch.ones(())),
}


@pytest.mark.parametrize("case", ALIKE.values(), ids=ALIKE.keys())
def test_what_results_are(case):
    """Sizes, dtypes, strides and values, of what torch's fake tensors or references have wrong."""
    program, *args = case
    compiled = weft.compile(program)
    found, wanted = ([call(*(x.clone() for x in args))] for call in (compiled, program))
    wanted, found = (torch.utils._pytree.tree_leaves(r) for r in (wanted, found))
    torch.testing.assert_close(found, wanted, equal_nan=True, check_stride=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.sqrt().sgn(),
        lambda x: torch.vstack([x, x]).rsqrt().sgn(),
        lambda x: (0.3 ** -x.view(2, 3)).sgn().t(),
        lambda x: x.sqrt().sgn() + x.exp(),
        lambda x: x[:3].sqrt().sum() * x.sgn(),
        lambda x: x[1:4].max().erfinv(),
        lambda x: x[:4].min().sqrt(),
        lambda x: x[:3].median().log().sqrt(),
        lambda x: x[3].sqrt() * (x > 1),
        lambda x: (x[:4] * (x[:4] > 1)).sqrt(),
    ],
)
def test_gradients_that_are_zero_are_not_multiplied(program):
    """Those of `sgn`, and of `max()` beside the places of the largest number, on a CPU."""
    grads = []
    for call in (weft.compile(program), program):
        x = torch.tensor([0.0, 1.0, -1.0, 2.0, torch.inf, 3.0], requires_grad=True)
        result = call(x)
        grads.append(torch.autograd.grad(result, x, torch.ones_like(result))[0] + 0)
    torch.testing.assert_close(*grads, equal_nan=True)


def test_a_gradient_that_eager_lacks_stays_none_before_a_break():
    def program(x):
        y = x.exp2()
        weft.graph_break()
        return torch.linalg.vector_norm(y, 0, -1)

    for call in (weft.compile(program), program):
        x = torch.ones(3, 3, requires_grad=True)
        assert torch.autograd.grad(call(x).sum(), x, allow_unused=True) == (None,)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_truth_value_as_an_index_is_not_read(shape):
    def program(x):
        y = x.sin()
        y[y.sum() > 0] = 3
        return y

    compiled = weft.compile(program, fullgraph=True)
    for sign in (1, -1):
        x = (torch.ones(shape) * sign).requires_grad_()
        found, wanted = compiled(x), program(x)
        torch.testing.assert_close(found, wanted)
        grads = [torch.autograd.grad(r.sum(), x)[0] for r in (found, wanted)]
        torch.testing.assert_close(*grads)


def test_a_sum_to_which_each_step_adds_twice_is_accurate():
    def program(x):
        pairs = torch.cartesian_prod(x, x)
        return pairs, pairs.sum()

    x = torch.rand(99, generator=torch.Generator().manual_seed(0)) + 0.5
    exact, found = program(x.double())[1], weft.compile(program)(x)[1]
    torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.diag_embed(1),
        lambda x: x[0].diag(),
        lambda x: x[:0].triu(1),
        lambda x: x.nansum(-1),
        lambda x: x.roll(1).unbind(1)[0].mul_(2),
        lambda x: x.select(0, 1).zero_(),
        lambda x: x[:1].fill_(3),
        lambda x: x[0, 0].aminmax(dim=-1),
    ],
)
def test_operators_on_rare_dtypes_are_not_taken_apart(program, dtype):
    found, wanted = (torch.arange(6).view(2, 3).to(dtype) for _ in range(2))
    results = [weft.compile(program, fullgraph=True)(found), program(wanted)]
    leaves = map(torch.utils._pytree.tree_leaves, results)
    for one, other in [(found, wanted), *zip(*leaves, strict=True)]:
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_classes_are_encoded_for_a_symbolic_number_of_them():
    compiled = weft.compile(lambda x: F.one_hot(x % 3, x.shape[0]), dynamic=True)
    for size in (5, 7):
        x = torch.arange(size)
        assert torch.equal(compiled(x), F.one_hot(x % 3, size))
    with pytest.raises(RuntimeError):
        weft.compile(lambda x: F.one_hot(x, x.shape[0] - 2), dynamic=True)(torch.arange(5))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda x: F.tanhshrink(x).median(), id="median"),
        pytest.param(lambda x: F.tanhshrink(x).max(), id="max"),
        pytest.param(lambda x: (x.exp() * x.sin()).amax(-1).sum(), id="amax"),
        pytest.param(lambda x: torch.maximum(x.erf(), x.erf().min()).sum(), id="maximum"),
    ],
)
def test_an_extremum_is_found_again_in_the_backward(program, dynamic):
    weft.reset()
    compiled = weft.compile(program, dynamic=dynamic)
    for seed in range(12):
        x = torch.randn(17, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        (expected,) = torch.autograd.grad(program(x), x)
        (found,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(found, expected)


def test_infinity_beside_complex_numbers():
    x = torch.randn(5, dtype=torch.complex64)
    compiled = weft.compile(lambda x: (float("inf") - x, x + float("nan"), x * 2.5, 2 - x))
    for found, expected in zip(compiled(x), (float("inf") - x, x + float("nan"), x * 2.5, 2 - x)):
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_selection_written_in_another_dtype_keeps_the_tensors():
    x, source = torch.randn(4, 5), torch.randn(5, dtype=torch.float64)
    found = weft.compile(lambda x, source: x.select_scatter(source, 0, 1))(x, source)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, x.select_scatter(source, 0, 1))
