"""Elementary functions in C: how many representable numbers they are from the nearest one.

float32 is compared with float64 over all exponents and closely where functions bend, float64 with
mpmath; subnormals, infinities, nan, signed zeros and the ends of the ranges are among the operands.
"""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from codegen_check import trace
from kernel_programs import buffer, pointwise, program, unary
from scalar_operands import ROUNDED
from weft_codegen import compile_graph
from weft_codegen.kernels import compile_program
from weft_codegen.loops.expr import cast, load
from weft_codegen.loops.index import axis
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.program import Launch

ENDS = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0, -1.0, 0.5, 2.0, 1e-45, -1e-45]
ENDS += [1e-40, -1e-40, 1.17549435e-38, 3.4028234e38, -3.4028234e38, 88.722839, 88.7229, -87.33655]
ENDS += [-87.5, -103.97, -104.0, -104.1, 89.42, 1.7, -1.7, 3.93, 3.9192, 10.0, 0.70710677]


def _operands(name: str, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Random bits, a range around zero, and a neighbourhood of one, after the special values."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,)).to(torch.int32).view(torch.float32)
    spread = [bits, torch.randn(count) * 3, torch.rand(count) * 200 - 100]
    spread.append(1 + torch.randn(count) * 0.01)
    values = torch.cat([torch.tensor(ENDS), *spread]).to(dtype)
    if dtype is torch.float64:
        values[len(ENDS) :] *= 1 + torch.rand(4 * count, dtype=dtype) * 1e-8
    if OPS[name].arity == 1:
        return [values]
    special = values[: len(ENDS)]
    rest = values[len(ENDS) :]
    return [
        torch.cat([special.repeat_interleave(len(ENDS)), rest]),
        torch.cat([special.repeat(len(ENDS)), rest[torch.randperm(len(rest))]]),
    ]


def _steps(values: torch.Tensor) -> torch.Tensor:
    """Numbers counted in order: neighbouring floats differ by one, both zeros are 0."""
    wide = values.view(torch.int32 if values.dtype is torch.float32 else torch.int64).long()
    least = torch.iinfo(torch.int32 if values.dtype is torch.float32 else torch.int64).min
    return torch.where(wide < 0, least - wide, wide)


def _assert_near(actual: torch.Tensor, nearest: torch.Tensor, units: int, at: object) -> None:
    assert torch.equal(actual.isnan(), nearest.isnan()), at
    whole = ~nearest.isnan()
    actual, nearest = actual[whole], nearest[whole]
    assert torch.equal(actual.isinf() & (actual > 0), nearest == math.inf), at
    off = (_steps(actual) - _steps(nearest)).abs()
    assert int(off.max()) <= units, (at, int(off.argmax()))
    zero = (nearest == 0) & (actual == 0)
    assert torch.equal(actual.signbit()[zero], nearest.signbit()[zero]), at


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROUNDED)
def test_float32_is_within_two_units(name: str) -> None:
    operands = _operands(name, torch.float32, 40_000)
    (actual,) = compile_program(unary(name, torch.float32, len(operands[0])))(*operands)
    nearest = OPS[name].reference(*(item.double() for item in operands)).float()
    _assert_near(actual, nearest, 2, name)


def _exact(name: str, values: list[float]) -> float:
    """The function in 160 bits, rounded; what libm does where that is no number."""
    own = {
        "rsqrt": lambda x: 1 / mpmath.sqrt(x),
        "exp2": lambda x: mpmath.power(2, x),
        "log2": lambda x: mpmath.log(x, 2),
        "log10": mpmath.log10,
        "pow": mpmath.power,
    }
    with mpmath.workprec(1200 if max(map(abs, values)) > 1e16 else 200):
        return float(own.get(name, getattr(mpmath, name, None))(*map(mpmath.mpf, values)))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROUNDED)
def test_float64_is_within_two_units(name: str) -> None:
    operands = _operands(name, torch.float64, 100)
    if name in ("sin", "cos", "tan"):
        # Next to multiples of pi/2, on both sides of what the vector form reduces itself.
        turns = torch.cat([torch.arange(1, 200), torch.randint(1, 2**31, (200,))])
        operands[0] = torch.cat([operands[0], turns.double() * (math.pi / 2)])
    (actual,) = compile_program(unary(name, torch.float64, len(operands[0])))(*operands)
    nearest = OPS[name].reference(*operands)
    for k, values in enumerate(zip(*(item.tolist() for item in operands), strict=True)):
        # Eager decides about the ends of the range; mpmath about ordinary numbers.
        moderate = all(1e-30 < abs(value) < 1e30 for value in values)
        if moderate and math.isfinite(nearest[k]) and nearest[k] != 0:
            nearest[k] = _exact(name, list(values))
    _assert_near(actual, nearest, 2, name)


def _converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` as `dtype`, by a kernel."""
    count = len(values)
    element = cast(load("a", axis("i0", count), values.dtype), dtype)
    kernel = pointwise(element, count, {"a": values.dtype})
    buffers = [buffer("x", count, dtype=values.dtype), buffer("y", count, dtype=dtype)]
    made = program(buffers, ["x"], [Launch("pointwise", ("x", "y"))], ["y"], kernel)
    return compile_program(made)(values)[0]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_conversions_of_halves_are_exact(half: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    wide = every.float()
    assert torch.equal(_converted(every, torch.float32).nan_to_num(1.5), wide.nan_to_num(1.5))
    assert torch.equal(_converted(every, torch.float32).signbit(), wide.signbit())
    # Every half, the middles between neighbours, what lies just beside those, and random bits.
    whole = wide[wide.isfinite()].sort().values
    middle = (whole[1:].double() + whole[:-1].double()).div(2).float()
    beside = [torch.nextafter(middle, torch.tensor(end)) for end in (math.inf, -math.inf)]
    bits = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32).view(torch.float32)
    more = torch.tensor([*ENDS, 65519.99, 65520.0, -65520.0, 2.98e-8, 2.9802322e-8, 2.99e-8])
    values = torch.cat([wide, middle, *beside, bits, more])
    actual, expected = _converted(values, half), values.to(half)
    assert torch.equal(actual.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(actual[number].view(torch.int16), expected[number].view(torch.int16))


@pytest.mark.parametrize(
    ("function", "shape", "allowed"),
    [
        (lambda x: (x * 1.7).sum(0), (3000, 8), 8e-7),  # rows of accumulators; before: 3e-5
        (lambda x: x.exp().sum((0, 2)), (700, 5, 30), 8e-7),
        (lambda x: (x * 1.7).sum((0, 2)), (900, 5, 3), 1e-7),  # a total a row; before: 7e-6
        (lambda x: (x * 1.7).sum(), (40000,), 5e-7),  # lanes
        (lambda x: x[:, ::3].reshape(-1).sum(), (3000, 5), 8e-7),
    ],
)
def test_sums_of_equal_numbers_do_not_drift(function, shape, allowed) -> None:  # type: ignore[no-untyped-def]
    x = torch.full(shape, 0.1)
    (total,) = compile_graph(trace(lambda x: (function(x),), [x]), [x])(x)
    exact = function(x.double())
    assert ((total.double() - exact) / exact).abs().max() < allowed


@pytest.mark.parametrize("shape", [(3, 6), (1000,), (700, 5)])
def test_equal_doubles_have_no_deviation(shape) -> None:  # type: ignore[no-untyped-def]
    x = torch.full(shape, 0.43, dtype=torch.float64)
    (deviation,) = compile_graph(trace(lambda x: (x.std(0),), [x]), [x])(x)
    assert not deviation.any()
    (deviation,) = compile_graph(trace(lambda x: (x.std(0),), [x]), [x])(x * torch.rand(shape))
    assert deviation.all()
