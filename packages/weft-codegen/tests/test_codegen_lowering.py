"""Every family of operators, interpreted and native, against eager."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from codegen_check import check, dynamic_trace, externs, launches, program_of
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from weft_codegen.compile import compile_graph, decompositions, make_program
from weft_codegen.config import settings
from weft_codegen.kernels import compile_program
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.lower.graph import NoLowering

torch.manual_seed(0)
X = torch.randn(6, 8)
Y = torch.randn(6, 8)
B = torch.rand(8) + 0.5
C4 = torch.randn(2, 3, 4, 5)
INT = torch.randint(-9, 9, (6, 8))
SPECIAL = torch.tensor([0.0, -0.0, 1.5, -2.5, math.inf, -math.inf, math.nan, 0.5])

UNARY = """neg abs sqrt rsqrt exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos atan sinh
cosh tanh asinh acosh atanh erf floor ceil trunc round sign square reciprocal sigmoid relu isnan
isinf signbit logical_not""".split()


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    fn = getattr(torch, name)
    program = check(lambda x, s: (fn(x), fn(s)), X, SPECIAL)
    assert externs(program) == []


@pytest.mark.parametrize(
    "name", "add sub mul div maximum minimum atan2 eq lt ge logical_and".split()
)
@pytest.mark.parametrize(
    ("left", "right"), [(X, Y), (X, B), (INT, Y), (INT, INT + 1), (X > 0, Y > 0)]
)
def test_binary_promotes_and_broadcasts(name, left, right):
    if left.dtype is torch.bool and name in ("sub", "div", "atan2"):
        pytest.skip("not defined for bool")
    check(getattr(torch, name), left, right)


def test_scalars_alpha_and_rounding_modes():
    check(lambda x, y: (torch.add(x, y, alpha=3), torch.rsub(x, 2.0), 1 - x, x / 3), X, Y)
    check(lambda i: (i // 4, i % 5, torch.div(i, 3, rounding_mode="trunc"), i / 2), INT)
    check(lambda x, y: (torch.div(x, y, rounding_mode="floor"), torch.remainder(x, y)), X, Y)


def test_integers_take_rounded_numbers():
    check(lambda i: (torch.addcmul(i, i, i, value=0.5), torch.addcmul(i, i, i, value=-3)), INT)
    for start, end in ((0.5, 10.7), (-3, 250), (10, -10)):
        check(lambda i: torch.linspace(start, end, 8, dtype=torch.int64) + i, INT)
        check(lambda i: torch.linspace(start, end, 8, dtype=torch.uint8) + i, INT)


def test_powers_and_clamps():
    check(lambda x: (x**2, x**3, x.abs() ** 0.5, x.abs() ** 1.7, 2.0**x), X)
    check(lambda x: (x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=0.3), F.hardtanh(x)), X)
    check(lambda s: (s.clamp(-1, 1), torch.maximum(s, -s)), SPECIAL)


ZEROS = torch.tensor([0.0, -0.0, 1.0, math.nan])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.relu(), x.clamp(min=-0.0), x.clamp(max=0.0), F.relu6(x), F.hardtanh(x)),
        lambda x: (x[1:2].sum(), x[:2].sum(), x + 0.0, x * -1, -x, x - 0, 0 - x, x.abs()),
        lambda x: (torch.fmax(x, -x), torch.fmin(x, -x), x.sqrt(), x.sign()),
        lambda x: (x.round(), x.trunc(), x.ceil(), torch.copysign(x, -x), x**3, x.sin(), x.tanh()),
    ],
)
def test_the_sign_of_zero_is_eagers(fn):
    program = program_of(fn, ZEROS)
    for results in (run_program(program, [ZEROS]), compile_program(program)(ZEROS)):
        for result, want in zip(results, fn(ZEROS), strict=True):
            assert torch.equal(result.isnan(), want.isnan())
            signs = [torch.where(t.isnan(), 0, t).signbit() for t in (result, want)]
            assert torch.equal(*signs)


def test_integers_wrap_and_truth_values_are_one():
    low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    x = torch.tensor([low, high, -1, 7], dtype=torch.int32)
    check(lambda x: (x + x, x * 3, -x, x.abs(), x // 3, x % -3, x.to(torch.int8)), x, native=True)
    u = torch.tensor([0, 200, 255], dtype=torch.uint8)
    check(lambda u: (u.any(), u.all(), u + 100, u * 2, u.bool(), u.sum()), u, native=True)


def test_float16_powers_take_minus_infinity_as_eager():
    check(lambda s: (s**0.5, s**-0.5, s**2), SPECIAL.half(), native=True)


ACTIVATIONS = [F.gelu, F.silu, F.softplus, F.elu, F.leaky_relu, F.hardswish, F.mish, F.logsigmoid]


@pytest.mark.parametrize("fn", [*ACTIVATIONS, lambda x: F.gelu(x, approximate="tanh")])
def test_activations(fn):
    check(fn, X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_float_dtypes(dtype):
    x, y = X.to(dtype), Y.to(dtype)
    check(lambda x, y: (x * y, x.exp(), x.sum(), x.to(torch.float32) + 1), x, y)
    check(lambda x: F.gelu(x), x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, m: x.softmax(1),
        lambda x, m: (x.amax(1), x.amin(1), x.amax(), x.sum(0), x.sum(1)),
        lambda x, m: (x[:, 1:] * x[:, :-1]).relu() + x[:, 2:3],
        lambda x, m: torch.where(m, x * 2, (x + 1).t().contiguous().t()),
        lambda x, m: torch.cat([x * 3, m * x], 1).neg(),
        lambda x, m: (x * 3 + x.half() - x.bfloat16()).float(),
        lambda x, m: (x * 1e-4 * 1e-3, x * 6e4, -x * 1e-9),
        lambda x, m: x.add_(1).mul_(x) * 2,
        lambda x, m: (x * 1e-3).softmax(0) * x.exp(),
    ],
)
def test_rows_of_halves_longer_than_a_block(fn, dtype):
    torch.manual_seed(3)
    x = (torch.randn(9, 200) * 3).to(dtype)
    x[1, 70], x[2, 199], x[3, 5], x[4, 64] = math.nan, math.nan, math.inf, -0.0
    close = {"rtol": 0.02, "atol": 0.04 if dtype is torch.bfloat16 else 1e-3}
    check(fn, x, x > 0, native=True, **close)
    graph, _ = dynamic_trace(lambda x: fn(x, x > 0), [x])
    compiled = compile_program(make_program(graph, [x]))
    for shape in ((9, 200), (3, 64), (2, 63)):
        y = (torch.randn(shape) * 3).to(dtype)
        expected = fn(y.clone(), y > 0)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for result, want in zip(compiled(y.clone()), expected, strict=True):
            assert_close(result, want, equal_nan=True, **close)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool])
def test_integer_dtypes_and_casts(dtype):
    x = INT.abs().to(dtype)
    check(lambda x: (x.float() * 2, x.long().sum(0), x.to(torch.float64), ~x, x == 1), x)
    check(lambda x: torch.vmap(lambda row: row * 0.1)(x), x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sum(),
        lambda x: x.sum(0),
        lambda x: x.sum(-1, keepdim=True),
        lambda x: (x.mean(), x.mean(0), x.mean(1)),
        lambda x: (x.var(1), x.std(0), x.var(unbiased=False)),
        lambda x: (x.amax(0), x.amin(1), x.max(), x.min()),
        lambda x: (x.argmax(), x.argmax(0), x.argmin(1, keepdim=True)),
        lambda x: tuple(x.max(1)) + tuple(x.min(0)),
        lambda x: ((x > 0).any(1), (x > -9).all(0), x.prod(1)),
        lambda x: (x.norm(), x.logsumexp(1), x.abs().sum(0)),
    ],
)
def test_reductions(fn):
    check(fn, X)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("fill", [None, torch.nan, -torch.inf])
def test_argmax_takes_the_first_of_equals_in_any_memory_order(order, fill):
    x = torch.arange(24).reshape(2, 3, 4).mul(7).remainder(3).double()
    if fill is not None:
        x[x == 2] = fill
    x = x.permute(order).contiguous().permute([order.index(dim) for dim in range(3)])
    check(lambda x: (x.argmax(), x.argmin(), x.argmax(1)), x, native=True)


def test_argmax_takes_the_first_of_equals_of_what_is_concatenated():
    x = torch.tensor([1, 3, 0, 2, 3])
    check(lambda x: torch.cartesian_prod(x, x).argmax(), x, native=True)
    check(lambda x: torch.stack([x, x, x], 1).argmin(), x, native=True)


def test_take_of_a_single_index_of_no_dimensions():
    check(lambda x, i: (x.take(i), x.take(-i)), X, torch.tensor(7))


def test_block_diag_promotes_numbers_as_torch_does():
    check(lambda x, s: torch.block_diag(x, s), X, torch.tensor(2.0, dtype=torch.float64))
    count, half = torch.tensor(2), torch.tensor(0.5)
    small, matrix = torch.ones(1, dtype=torch.uint8), torch.ones(2, 3, dtype=torch.float16)
    for operands in itertools.permutations((count, half, small, matrix), 2):
        check(lambda *blocks: torch.block_diag(*blocks), *operands)


def test_softmax_of_integers_without_elements():
    check(lambda x: x.softmax(0), torch.zeros(0, 3, dtype=torch.bool))


def test_reductions_propagate_nan_and_reduce_middle_dimensions():
    check(lambda s: (s.amax(0), s.sum(0), s.argmax(0)), torch.stack([SPECIAL, SPECIAL]).t())
    check(lambda x: (x.sum((1, 3)), x.mean((0, 2, 3)), x.amax((0, 1)), x.sum(1)), C4)


VIEWS = [
    lambda x: x.permute(0, 2, 3, 1) * 2,
    lambda x: x.transpose(1, 2).reshape(2, 4, 15) + 1,
    lambda x: x.view(6, 20).t().contiguous(),
    lambda x: x[:, 1:, ::2].exp(),
    lambda x: (x[:, 0], x[1, -1] * 2),
    lambda x: tuple(t * 2 for t in x.split(2, dim=2)),
    lambda x: tuple(t.sin() for t in x.unbind(1)),
    lambda x: x.unsqueeze(1).expand(2, 7, 3, 4, 5) + 1,
    lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    lambda x: torch.stack([x, -x], 2),
    lambda x: F.pad(x, (1, 2, 0, 3), value=1.5) * 2,
    lambda x: x.flip(1, 3) + x,
    lambda x: x.repeat(2, 1, 1, 2) - 1,
    lambda x: x.tril() + x.triu(1),
    lambda x: x.diagonal(0, 2, 3) * 2,
    lambda x: x.squeeze().flatten(1),
    lambda x: x.movedim(1, -1).softmax(-1),
]


@pytest.mark.parametrize("fn", VIEWS)
@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
def test_views_and_movement(fn, layout):
    x = C4 if layout == "contiguous" else C4.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if layout == "permuted" and fn in VIEWS[2:3]:
        pytest.skip("view needs a contiguous tensor")
    check(fn, x)


def test_creation():
    check(lambda x: (torch.arange(8) + x, torch.zeros_like(x) + 1, torch.full((3,), 2.5)), X)
    check(lambda x: torch.where(x > 0, x, torch.tensor(0.5)), X)
    check(lambda x: x.masked_fill(torch.ones(8, 8).triu(1)[:6].bool(), -math.inf), X)


def test_norms_and_losses():
    t = torch.randint(0, 8, (6,))
    check(lambda x, w: F.layer_norm(x, (8,), w, w), X, B, native=True)
    check(lambda x: (F.softmax(x, 1), F.log_softmax(x, 0)), X, native=True)
    check(lambda x, t: F.cross_entropy(x, t), X, t, native=True)
    check(lambda x, y: (F.mse_loss(x, y), F.smooth_l1_loss(x, y)), X, Y, native=True)
    check(lambda x, w: F.group_norm(x, 3, w, w), C4, B[:3], native=True)
    check(lambda x, w: F.batch_norm(x, None, None, w, w, training=True), C4, B[:3], native=True)


def test_mutations_are_written_back_in_order():
    def momentum(p, m, g):
        m.mul_(0.9).add_(g)
        p.sub_(m, alpha=0.1)
        return p.sum()

    check(momentum, X, Y, X * 2, native=True)

    def swap(a, b):
        old = a.clone()
        a.copy_(b)
        b.copy_(old)
        return a - b

    check(swap, X, Y, native=True)


def test_what_has_no_lowering_goes_through_the_dispatcher():
    program = check(lambda x: (x.sort(1)[0], x.kthvalue(2, 1)[0], x.relu()), X, native=True)
    assert len(externs(program)) == 2
    check(
        lambda x, w: F.conv2d(x, w).relu(),
        C4,
        torch.randn(2, 3, 2, 2),
        atol=1e-5,
        rtol=1e-5,
        native=True,
    )
    check(lambda x: torch.view_as_complex(x.reshape(-1, 2)).abs(), X, native=True)


def test_random_operators_draw_eagers_numbers():
    program = program_of(lambda x: F.dropout(x, 0.5), X)
    assert externs(program)
    torch.manual_seed(3)
    want = F.dropout(X, 0.5)
    torch.manual_seed(3)
    assert torch.equal(compile_program(program)(X)[0], want)


def test_outputs_that_are_inputs_views_and_repeats():
    check(lambda x: (x, x.t(), x * 2, x.view(-1)), X)
    program = program_of(lambda x: (x[1:],), X)
    assert launches(program) == 0


def test_empty_and_scalar_tensors():
    check(lambda x: (x + 1, x.sum(), x.sum(1)), torch.empty(3, 0))
    check(lambda x: (x * 2, x.sum(), x.view(1, 1)), torch.tensor(1.5))


def test_pieces_of_rolled_repeated_and_unfolded_tensors():
    check(lambda x: (x.roll((1, -2), (0, 1)), x.roll(9, 0), x.roll(0, 1)), X, native=True)
    check(lambda x: (x.repeat(2, 3), x.repeat(1, 9), x.repeat(2, 1, 2)), X, native=True)
    check(lambda x: (x.unfold(1, 3, 2).contiguous(), x.unfold(0, 2, 1) * 2), X, native=True)


def test_a_literal_is_rounded_to_its_dtype_before_it_is_converted():
    check(lambda x: torch.full((3,), 0.1).double() + x[0, 0], X, native=True)
    check(lambda x: torch.full((3,), 2.0**24 + 1).long() + x[0, 0].long(), X, native=True)


def test_a_huber_loss_has_the_dtype_of_its_input():
    check(lambda x, y: (F.huber_loss(x, y), F.huber_loss(y, x)), X, X.double() * 2, native=True)


def test_a_maximum_beside_a_constant_keeps_nan():
    x = torch.tensor([-1.0, 0.0, -0.0, 1.0, float("nan"), float("inf")])
    limit = torch.tensor([float("nan"), -1.0])
    check(lambda x: torch.maximum(x.log(), x.new_full((), -100.0)), x, native=True)
    check(lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)), x[:, None], limit, native=True)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fake tensors cannot be quantised")
def test_quantised_tensors_have_no_program():
    with pytest.raises(NoLowering, match="quantised"):
        program_of(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(), X)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_gradients_of_mean_losses_of_no_elements(name):
    """Their decompositions divide by the number of elements."""
    backward = getattr(torch.ops.aten, f"{name}_backward").default
    rest = [] if name == "mse_loss" else [1.0]

    def gradient(x):
        return [backward(x.new_ones(()), x, x, 1, *rest)]

    x = torch.ones(4, 0)
    graph = make_fx(gradient, decomposition_table=decompositions())(x)
    assert_close(compile_graph(graph, [x])(x), gradient(x))


def test_the_gradient_of_logit_takes_no_sign_of_zero():
    x = torch.tensor([-0.0, 0.0, 1.0, 0.3, -1.0])
    check(lambda x: torch.ops.aten.logit_backward(torch.ones_like(x), x), x, native=True)


def test_loops_that_run_zero_times_load_nothing_before_them():
    """A value that does not change in a loop over no elements may read a buffer without any."""

    def loss(x):
        return [F.nll_loss(x, x.argmax(1))]

    x = torch.ones(1, 9, 3, 0)
    graph = make_fx(loss, decomposition_table=decompositions())(x)
    with settings.patch(check_bounds=True):
        compiled = compile_graph(graph, [x])
    assert_close(compiled(x), loss(x), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_compared_is_rounded_to_16_bits(dtype):
    x, y = torch.randn(2, 7, 33).to(dtype)

    def compared(x, y):
        product = x * y
        return product == product.amax(0), torch.where(product >= product.amax(1, True), x, y)

    check(compared, x, y, native=True)
