"""The one table of scalar operations: type rule, reference, C and Triton text of each.

Templates hold {0}, {1}, ... for operands and {t} for the emitter's name of the operand type (such
as f32 or i64; a vector emitter may use its vector types).  An infix template means the same in C,
on GCC vector types and in Triton; a call such as `exp_{t}({0})` names a function that the
emitter's prelude defines for every {t} it uses.  Comparison results are bool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
DtypeRule = Callable[..., torch.dtype]

# The dtypes of values and their short names.
DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "b8",
}


@dataclass(frozen=True)
class OpRow:
    """One scalar operation.

    `cost` is in units of a float add, used to weigh recomputation against a buffer.
    """

    name: str
    arity: int
    dtype: DtypeRule
    reference: Callable[..., Tensor]
    c: str
    triton: str
    cost: int = 1


def _same(*dtypes: torch.dtype) -> torch.dtype:
    """All operands have the result's dtype."""
    if any(dtype is not dtypes[0] for dtype in dtypes):
        raise ValueError(f"operands differ in dtype: {dtypes}")
    return dtypes[0]


def _bool(*dtypes: torch.dtype) -> torch.dtype:
    """Operands agree, the result is bool."""
    _same(*dtypes)
    return torch.bool


def floating(*dtypes: torch.dtype) -> torch.dtype:
    """Operands agree and are float32 or float64."""
    if _same(*dtypes) not in (torch.float32, torch.float64):
        raise ValueError(f"floating-point operation on {dtypes}")
    return dtypes[0]


def _where(condition: torch.dtype, yes: torch.dtype, no: torch.dtype) -> torch.dtype:
    if condition is not torch.bool:
        raise ValueError(f"where needs a bool condition, got {condition}")
    return _same(yes, no)


def _infix(name: str, sign: str, rule: DtypeRule, reference: Callable[..., Tensor]) -> OpRow:
    text = f"({{0}} {sign} {{1}})"
    return OpRow(name, 2, rule, reference, text, text)


def _call(
    name: str,
    reference: Callable[..., Tensor],
    triton: str = "",
    *,
    arity: int = 1,
    rule: DtypeRule = floating,
    cost: int = 1,
) -> OpRow:
    operands = ", ".join(f"{{{i}}}" for i in range(arity))
    c, triton = f"{name}_{{t}}({operands})", triton or f"libdevice.{name}({operands})"
    return OpRow(name, arity, rule, reference, c, triton, cost)


def _extreme(beyond: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: torch.where(beyond(a, b) | a.isnan(), a, b)


def _word(*dtypes: torch.dtype) -> torch.dtype:
    """int64 operands, a word of 32 bits."""
    if _same(*dtypes) is not torch.int64:
        raise ValueError(f"seed and counter of {dtypes}")
    return torch.int32


def philox(seed: Tensor, index: Tensor, stream: Tensor, word: Tensor) -> Tensor:
    """Word `word` of Philox4x32-10 with key `seed` and counter (index, stream), as int32."""
    mask = 2**32 - 1
    a, b, c, d = (half & mask for n in (index, stream) for half in (n, n >> 32))
    low, high = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (q >> 32) & mask ^ b ^ low, q & mask
        c, d = (p >> 32) & mask ^ d ^ high, p & mask
        low, high = low + 0x9E3779B9 & mask, high + 0xBB67AE85 & mask
    picked = torch.where(word == 0, a, torch.where(word == 1, b, torch.where(word == 2, c, d)))
    return picked.to(torch.int32)


_truncated = functools.partial(torch.div, rounding_mode="trunc")
_ROWS = (
    # arithmetic; integers wrap around
    _infix("add", "+", _same, torch.add),
    _infix("sub", "-", _same, torch.sub),
    _infix("mul", "*", _same, torch.mul),
    # a product that may keep its exact value until it is added to a sum
    _call("product", torch.mul, "({0} * {1})", arity=2),
    OpRow("div", 2, floating, torch.div, "({0} / {1})", "div({0}, {1})", 4),
    OpRow("neg", 1, _same, torch.neg, "(-{0})", "(-{0})"),
    _call("abs", torch.abs, "tl.abs({0})", rule=_same),
    # nan if either operand is nan; of equal operands (0.0 and -0.0) the second
    _call("maximum", _extreme(torch.gt), "maximum({0}, {1})", arity=2, rule=_same),
    _call("minimum", _extreme(torch.lt), "minimum({0}, {1})", arity=2, rule=_same),
    # integer division truncates (C) or floors (Python); the divisor is not zero
    _call("truncdiv", _truncated, "truncdiv({0}, {1})", arity=2, rule=_same, cost=8),
    _call("floordiv", torch.floor_divide, "floordiv({0}, {1})", arity=2, rule=_same, cost=8),
    _call("remainder", torch.remainder, "remainder({0}, {1})", arity=2, rule=_same, cost=8),
    _call("fmod", torch.fmod, "fmod({0}, {1})", arity=2, rule=_same, cost=8),
    # bits; on bool they are the logical operations
    _infix("and", "&", _same, torch.bitwise_and),
    _infix("or", "|", _same, torch.bitwise_or),
    _infix("xor", "^", _same, torch.bitwise_xor),
    _infix("shl", "<<", _same, torch.bitwise_left_shift),
    _infix("shr", ">>", _same, torch.bitwise_right_shift),
    _call("not", torch.bitwise_not, "not_({0})", rule=_same),
    # comparisons
    _infix("eq", "==", _bool, torch.eq),
    _infix("ne", "!=", _bool, torch.ne),
    _infix("lt", "<", _bool, torch.lt),
    _infix("le", "<=", _bool, torch.le),
    _infix("gt", ">", _bool, torch.gt),
    _infix("ge", ">=", _bool, torch.ge),
    _call("isnan", torch.isnan, "({0} != {0})", rule=_bool),
    _call("isinf", torch.isinf, "isinf({0})", rule=_bool),
    _call("signbit", torch.signbit, "signbit({0})", rule=_bool),
    _call("where", torch.where, "tl.where({0}, {1}, {2})", arity=3, rule=_where),
    # rounding; `round` goes to even
    _call("floor", torch.floor, "libdevice.floor({0})"),
    _call("ceil", torch.ceil, "libdevice.ceil({0})"),
    _call("trunc", torch.trunc, "libdevice.trunc({0})"),
    _call("round", torch.round, "libdevice.rint({0})"),
    # elementary functions
    _call("sqrt", torch.sqrt, "sqrt({0})", cost=4),
    _call("rsqrt", torch.rsqrt, "libdevice.rsqrt({0})", cost=6),
    _call("exp", torch.exp, "libdevice.exp({0})", cost=10),
    _call("exp2", torch.exp2, "libdevice.exp2({0})", cost=10),
    _call("expm1", torch.expm1, cost=14),
    _call("log", torch.log, "libdevice.log({0})", cost=12),
    _call("log1p", torch.log1p, cost=14),
    _call("log2", torch.log2, "libdevice.log2({0})", cost=12),
    _call("log10", torch.log10, cost=12),
    _call("sin", torch.sin, "libdevice.sin({0})", cost=14),
    _call("cos", torch.cos, "libdevice.cos({0})", cost=14),
    _call("tan", torch.tan, cost=20),
    _call("asin", torch.asin, cost=16),
    _call("acos", torch.acos, cost=16),
    _call("atan", torch.atan, cost=16),
    _call("sinh", torch.sinh, cost=20),
    _call("cosh", torch.cosh, cost=20),
    _call("tanh", torch.tanh, cost=16),
    _call("asinh", torch.asinh, cost=20),
    _call("acosh", torch.acosh, cost=20),
    _call("atanh", torch.atanh, cost=20),
    _call("erf", torch.erf, cost=16),
    _call("erfc", torch.erfc, cost=24),
    _call("pow", torch.pow, arity=2, cost=30),
    _call("atan2", torch.atan2, arity=2, cost=24),
    _call("hypot", torch.hypot, arity=2, cost=12),
    _call("logaddexp", torch.logaddexp, "logaddexp({0}, {1})", arity=2, cost=24),
    _call("copysign", torch.copysign, arity=2),
    # random numbers: (seed, index, stream, which of four words)
    _call("philox", philox, "philox({0}, {1}, {2}, {3})", arity=4, rule=_word, cost=60),
)

OPS: dict[str, OpRow] = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class ReduceRow:
    """How a Reduce statement combines: state' = combine(state, value).

    `identity` is the state before the first value: a number, or "lowest"/"highest" for the least
    and greatest value of the dtype (-inf/inf for floats).  `states` is 1, or 2 for (value, index)
    reductions, which keep the first index among equals and treat nan as the extreme.
    """

    name: str
    states: int
    identity: float | str
    combine: str
    reference: Callable[..., Tensor]


_REDUCE_ROWS = (
    ReduceRow("sum", 1, 0, "add", torch.sum),
    ReduceRow("prod", 1, 1, "mul", torch.prod),
    ReduceRow("max", 1, "lowest", "maximum", torch.amax),
    ReduceRow("min", 1, "highest", "minimum", torch.amin),
    ReduceRow("logsumexp", 1, "lowest", "logaddexp", lambda values: values.logsumexp(0)),
    ReduceRow("any", 1, 0, "or", torch.any),
    ReduceRow("all", 1, 1, "and", torch.all),
    ReduceRow("argmax", 2, "lowest", "argmax", torch.argmax),
    ReduceRow("argmin", 2, "highest", "argmin", torch.argmin),
)

REDUCTIONS: dict[str, ReduceRow] = {row.name: row for row in _REDUCE_ROWS}
