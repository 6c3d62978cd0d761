"""Numbers beyond the range of a tensor's dtype: eager converts them to the operation's dtype."""

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from weft_codegen import compile_graph

pytestmark = pytest.mark.cc

COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
INTEGERS = [300, -1, 70000, 2**40, -129, 255, 256, 32768]
FLOATS = [70000, 16777217, 1e8, -1e6, 3.3, 1e-9]


def _agrees(function, x):
    wanted = function(x)
    found = compile_graph(make_fx(function)(x), [x])(x)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_comparisons_of_small_integers(dtype):
    x = torch.tensor([0, 1, 44, 100, 127], dtype=dtype)
    pairs = [(compare, number) for compare in COMPARISONS for number in INTEGERS]
    results = [pair for pair in pairs if _eager_takes(*pair, x)]
    assert len(results) > 20
    _agrees(lambda x: [compare(x, number) for compare, number in results], x)


def _eager_takes(compare, number, x):
    """Say whether eager takes this number."""
    try:
        compare(x, number)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "rsub", "maximum", "where"])
def test_arithmetic_of_narrow_floats(name, dtype):
    x = torch.tensor([0.0, 1.0, -2.0, 3.0], dtype=dtype)
    functions = {
        "maximum": lambda x, n: torch.maximum(x, torch.tensor(n)),
        "where": lambda x, n: torch.where(x > 0, x, n),
        "rsub": lambda x, n: n - x,
    }
    function = functions.get(name) or getattr(torch, name)
    _agrees(lambda x: [function(x, number) for number in FLOATS], x)


@pytest.mark.parametrize("mode", ["trunc", "floor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounded_quotients_of_narrow_floats(dtype, mode):
    """Eager rounds each step to 16 bits, unless the divisor has one element."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 2000) * 5
    x[:8] = y[4:12] = torch.tensor([0.0, -0.0, 1, -1, torch.inf, -torch.inf, torch.nan, 2])
    scalar = torch.tensor(0.3, dtype=dtype)

    def quotients(x):
        pairs = ((x, other), (3.0, x), (scalar, x), (x, 0.3), (x, scalar), (x, scalar[None]))
        return [torch.div(a, b, rounding_mode=mode) for a, b in pairs]

    other = y.to(dtype)
    _agrees(quotients, x.to(dtype))


def test_a_sum_of_bits_is_a_bit():
    x = torch.tensor([True, True, False])

    def uses(x):
        sums = x + x, x.add(x.flip(0), alpha=3), x * x, x ^ x.flip(0)
        return [
            use for s in sums for use in (s.int(), s.sum(), s & x, s == x, torch.where(s, 1, 2))
        ]

    _agrees(uses, x)
