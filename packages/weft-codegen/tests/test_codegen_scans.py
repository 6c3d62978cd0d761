"""Running sums, products and extrema as loops, against eager."""

import math

import pytest
import torch
from codegen_check import check, dynamic_trace, externs, launches
from torch.testing import assert_close
from weft_codegen.compile import make_program
from weft_codegen.kernels import compile_program
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.verify import verify_program

torch.manual_seed(0)
X = torch.randn(3, 4, 7)
SPECIAL = X.clone()
SPECIAL[0, 0, 2] = math.nan
SPECIAL[1, 1, 2], SPECIAL[1, 1, 4] = math.inf, -math.inf
SPECIAL[2, :, 0] = -math.inf
SPECIAL[2, 1] = 1
EXACT = ["cumsum", "cumprod", "cummax", "cummin"]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("x", [X, SPECIAL, X.double(), X.bfloat16(), X.half(), X.transpose(0, 2)])
def test_scans_are_eagers_to_the_bit(x, dim):
    def scans(x):
        return tuple(
            part
            for name in EXACT
            for part in torch.utils._pytree.tree_leaves(getattr(x, name)(dim))
        )

    assert externs(check(scans, x, native=True, rtol=0, atol=0)) == []


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_logcumsumexp(dim):
    for x in (X, SPECIAL, X.double() * 100, X.bfloat16()):
        assert externs(check(lambda x: x.logcumsumexp(dim), x, native=True)) == []


def test_integers_and_given_dtypes():
    x = torch.randint(-5, 5, (5, 6))
    check(lambda x: (x.cumsum(1), x.int().cumprod(0), (x > 0).cumsum(0), *x.cummax(1)), x)
    check(lambda x: (x.cumsum(1, dtype=torch.float64), x.cumsum(0, dtype=torch.int8)), X * 3)


FUSED = [
    lambda x: torch.relu(x * 2 + 1).cumsum(-1) * 3 + x,
    lambda x: torch.relu(x * 2 + 1).cumsum(0).sigmoid(),
    lambda x: (x * 2).cumsum(-1).softmax(-1),
    lambda x: x.softmax(-1).cumsum(-1) - x,
    lambda x: (x.cumsum(-1).cumsum(-1) + 1).exp(),
    lambda x: (x * 2).cummax(-1).values * (x * 3).cumsum(-1),
    lambda x: (x * 2).cumsum(-1).amax(-1),
]


@pytest.mark.sampled
@pytest.mark.parametrize("fn", FUSED)
@pytest.mark.parametrize("columns", [5, 256, 700])
def test_scans_share_a_kernel_with_what_surrounds_them(fn, columns):
    x = torch.randn(3, columns) * 0.1
    program = check(fn, x, native=True)
    assert launches(program) == 1 and externs(program) == []
    assert_close(fn(x), fn(x.double()).float(), rtol=1e-4, atol=1e-4)


def test_a_scan_keeps_its_order_when_axes_are_split_or_merged():
    check(lambda x: x.reshape(12, 7).cumsum(0).reshape(3, 4, 7) + x, X, native=True)
    check(lambda x: x.reshape(-1).cumsum(0).reshape(3, 4, 7) * x, X, native=True)
    check(lambda x: x.reshape(-1).cumsum(0).reshape(28, 3).t() * x.reshape(28, 3).t(), X)
    check(lambda x: x.permute(2, 0, 1).reshape(-1).cumsum(0) + x.reshape(-1), X)
    check(lambda x: torch.cat([x, x * 2], -1).cumsum(-1), X, native=True)


def test_one_binary_scans_every_size():
    def fn(x):
        return (x * 2 + 1).cumsum(1).sigmoid(), x.cumsum(0) + x.cummin(1).values

    graph, fakes = dynamic_trace(fn, [torch.randn(5, 7)])
    program = make_program(graph, fakes)
    verify_program(program)
    compiled = compile_program(program)
    for shape in ((5, 7), (3, 600), (1, 257)):
        x = torch.randn(shape)
        for result in (run_program(program, [x]), compiled(x)):
            assert_close(result, list(fn(x)))


def test_nothing_and_one_element():
    for shape in ((5, 0), (0, 5), (5, 0, 0)):
        check(lambda x: (x * 2).cumsum(1).exp(), torch.randn(shape), native=True)
    x = torch.randn(3, 1)
    assert externs(check(lambda x: x.cumsum(1) + 1, x)) == ["aten.cumsum.default"]
