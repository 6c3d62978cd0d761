"""Scalar operations in C against eager: every row of the op table, special values included."""

from __future__ import annotations

import pytest
import torch
from kernel_programs import unary
from scalar_operands import CANCELS, EXACT, FLOAT, INTEGER_ONLY, operands_of
from weft_codegen.kernels import compile_program
from weft_codegen.kernels.c_types import literal
from weft_codegen.loops.ops import OPS

INTEGER = ["add", "sub", "mul", "neg", "abs", "maximum", "minimum", "truncdiv", "floordiv"]
INTEGER += ["remainder", "fmod", "eq", "lt", "ge", *sorted(INTEGER_ONLY)]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("name", FLOAT)
def test_float_operation(name: str, dtype: torch.dtype) -> None:
    operands = operands_of(name, dtype)
    (actual,) = compile_program(unary(name, dtype, len(operands[0])))(*operands)
    expected = OPS[name].reference(*operands)
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected)
        return
    # Four units in the last place: what glibc's vector functions promise.
    rtol = 0 if name in EXACT else 4 * torch.finfo(dtype).eps
    # The logarithm of a sum may be next to zero, where its two terms cancel.
    atol = 0 if name in EXACT else rtol if name in CANCELS else 1e-37
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    zero = (expected == 0) & (actual == 0)
    assert torch.equal(actual.signbit()[zero], expected.signbit()[zero])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.parametrize("name", INTEGER)
def test_integer_operation(name: str, dtype: torch.dtype) -> None:
    low = 0 if dtype is torch.uint8 else -100
    torch.manual_seed(0)
    operands = [torch.randint(low, 100, (500,)).to(dtype) for _ in range(OPS[name].arity)]
    if name in ("truncdiv", "floordiv", "remainder", "fmod"):
        operands[1] = torch.where(operands[1] == 0, 3, operands[1]).to(dtype)
    if name in ("shl", "shr"):
        operands[1] = operands[1].abs() % 7
    (actual,) = compile_program(unary(name, dtype, 500))(*operands)
    assert torch.equal(actual, OPS[name].reference(*operands))


@pytest.mark.parametrize("name", ["and", "or", "xor", "not", "eq", "ne"])
def test_boolean_operation(name: str) -> None:
    torch.manual_seed(0)
    operands = [torch.rand(500) < 0.5 for _ in range(OPS[name].arity)]
    (actual,) = compile_program(unary(name, torch.bool, 500))(*operands)
    assert torch.equal(actual, OPS[name].reference(*operands))


def test_constants_beyond_float32_are_infinite():
    assert literal(1e300, torch.float32) == "__builtin_inff()"
    assert literal(-1e300, torch.float32) == "(-__builtin_inff())"
    assert literal(1e300, torch.float64) == "1e+300"
