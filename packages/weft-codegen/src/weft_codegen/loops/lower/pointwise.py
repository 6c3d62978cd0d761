"""Pointwise operators, one row each: result[i] = f(a[i], b[i], ...) with broadcasting.

Rows say which dtype operands are converted to: the result's (`_RESULT`), or the operands' promoted
one (`_OPERANDS`, for comparisons).  16-bit floats are then computed in float32; but operands of
another dtype, numbers included, are rounded first: eager's `x + 70000` of float16 adds inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from weft_core.launches import LAUNCH_

from weft_codegen.loops.expr import (
    Const,
    Expr,
    apply,
    cast,
    compute_dtype,
    constant,
    index_value,
    where,
)
from weft_codegen.loops.index import ONE, IndexExpr
from weft_codegen.loops.lower.lazy_tensor import Indices, LazyTensor, broadcast_index
from weft_codegen.loops.lower.lowering import Call, lowers, lowers_each, require
from weft_codegen.loops.lower.shapes import NARROW, number
from weft_codegen.loops.ops import DTYPES, OPS, floating
from weft_codegen.torch_compat import clamps_to

Function = Callable[..., Expr]
SUPPORTED = frozenset(DTYPES)


def operand_at(operand: Any, idx: Indices, dtype: torch.dtype, rounds: bool = False) -> Expr:
    """A tensor's (broadcast) element or a scalar, converted to `dtype` and as computed with.

    What is computed in the same loop is rounded as in eager only if it `rounds`.
    """
    wide = compute_dtype(dtype)
    if not isinstance(operand, LazyTensor):
        return cast(number(operand, dtype), wide)
    at = operand.rounded_at if rounds else operand.at
    value = at(broadcast_index(operand.shape, idx))
    narrows = dtype in NARROW and operand.dtype is not dtype
    return cast(cast(value, dtype) if narrows else value, wide)


def pointwise(
    call: Call,
    function: Function,
    operands: tuple[Any, ...],
    dtype: Any,
    *exact: int,
    rounds: bool = False,
) -> LazyTensor:
    """function over operands converted to `dtype`; the result is cast to the node's dtype.

    `exact` are the positions of operands that eager does not round, if they are scalars.
    """
    dtypes = [
        compute_dtype(dtype) if position in exact and not getattr(operand, "shape", ()) else dtype
        for position, operand in enumerate(operands)
    ]
    for used in (dtype, call.fake.dtype):
        require(used in SUPPORTED, f"dtype {used}")
    for operand in operands:
        if isinstance(operand, LazyTensor):
            require(operand.dtype in SUPPORTED, f"dtype {operand.dtype}")
        else:
            number(operand, compute_dtype(dtype))
    wide = compute_dtype(call.fake.dtype)

    def element(idx: Indices) -> Expr:
        pairs = zip(operands, dtypes, strict=True)
        return cast(function(*(operand_at(o, idx, t, rounds) for o, t in pairs)), wide)

    return call.lazy(element)


def operands_dtype(operands: tuple[Any, ...]) -> torch.dtype:
    """The dtype that one or two operands have together, by torch's promotion rules."""
    return torch.result_type(_stand_in(operands[0]), _stand_in(operands[-1]))


def _stand_in(operand: Any) -> Any:
    """What promotes as `operand` does: a tensor, or a number of its kind."""
    if isinstance(operand, LazyTensor):
        shape = (1,) * min(len(operand.shape), 1)
        return torch.empty(shape, dtype=operand.dtype, device="meta")
    if isinstance(operand, Expr):
        return 0.5
    return 0 if isinstance(operand, IndexExpr | torch.SymInt) else operand


def _one(name: str) -> Function:
    return lambda *args: apply(name, *args)


def _of_bools(name: str) -> Function:
    return lambda *args: apply(name, *(cast(arg, torch.bool) for arg in args))


def literal(like: Expr, value: float) -> Const:
    """A constant of the same dtype as `like`."""
    return constant(value, like.dtype)


def _sign(x: Expr) -> Expr:
    return x if x.dtype is torch.bool else cast(x > 0, x.dtype) - cast(x < 0, x.dtype)


# x to the power of a small constant is a product, as in eager's kernels.
_POWERS: dict[Any, Function] = {
    0.5: _one("sqrt"),
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    -0.5: _one("rsqrt"),
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
}


def _pow(base: Expr, exponent: Expr) -> Expr:
    power = exponent.value if isinstance(exponent, Const) else None
    if power in _POWERS and (base.dtype.is_floating_point or power in (1, 2, 3)):
        return _POWERS[power](base)
    return apply("pow", base, exponent)


def _ignoring_nan(name: str) -> Function:
    """maximum or minimum, where nan counts as missing."""

    def function(a: Expr, b: Expr) -> Expr:
        both = apply(name, b, a)
        if not a.dtype.is_floating_point:
            return both
        return where(apply("isnan", a), b, where(apply("isnan", b), a, both))

    return function


_RESULT: dict[str, Function] = {
    **{name: _one(name) for name in ("neg", "abs")},
    **{name: _one(name) for name in ("maximum", "minimum")},
    "fmax": _ignoring_nan("maximum"),
    "fmin": _ignoring_nan("minimum"),
    "sign": _sign,
    # Of equal operands `maximum` gives the second: relu(-0.0) is -0.0.
    "relu": lambda x: apply("maximum", literal(x, 0), x),
    "clone": lambda x: x,
}
_BITWISE = {f"bitwise_{name}": _one(name) for name in ("and", "or", "xor", "not")}
_FLOAT: dict[str, Function] = {
    **{name: _one(name) for name, row in OPS.items() if row.dtype is floating and row.arity == 1},
    **{name: _one(name) for name in ("hypot", "atan2", "copysign")},
    "sigmoid": lambda x: 1 / (1 + apply("exp", -x)),
    "silu": lambda x: x / (1 + apply("exp", -x)),
    "reciprocal": lambda x: 1 / x,
}
_OPERANDS = {name: _one(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_TESTS = {name: _one(name) for name in ("isnan", "isinf", "signbit")}
_LOGICAL = {f"logical_{name}": _of_bools(name) for name in ("and", "or", "xor", "not")}


# (table, whether operands have the dtype that they promote to and not the result's, whether they
# have to be floats; True or False, or None for any)
_TABLES: tuple[tuple[dict[str, Function], bool, bool | None], ...] = (
    (_RESULT, False, None),
    (_BITWISE, False, False),  # of floats the operator raises
    (_FLOAT, False, True),
    (_OPERANDS, True, None),
    (_TESTS, True, True),
    (_LOGICAL, True, None),
)


@lowers_each({f"aten.{n}": (f, *row[1:]) for row in _TABLES for n, f in row[0].items()})
def _table_row(row: Any, call: Call, *operands: Any, **keywords: Any) -> LazyTensor:
    require(not set(keywords) - {"memory_format"}, f"keyword {keywords}")
    function, promoted, floats = row
    dtype = operands_dtype(operands) if promoted else call.fake.dtype
    require(floats in (None, dtype.is_floating_point), f"{dtype} operands")
    return pointwise(call, function, operands, dtype, rounds=row[0] in _OPERANDS.values())


@lowers_each({"aten.add": "add", "aten.sub": "sub"})
def _linear(name: str, call: Call, left: Any, right: Any, alpha: Any = 1) -> LazyTensor:
    """left +- alpha * right"""
    dtype = call.fake.dtype

    def function(a: Expr, b: Expr, *c: Expr) -> Expr:
        return apply(name, a, cast(cast(b * c[0], dtype), b.dtype) if c else b)

    operands = (left, right) if isinstance(alpha, int) and alpha == 1 else (left, right, alpha)
    return pointwise(call, function, operands, dtype, 2)


@lowers("aten.mul")
def _mul(call: Call, left: Any, right: Any) -> LazyTensor:
    return pointwise(call, _one("mul"), (left, right), call.fake.dtype, 1)


@lowers("aten.div")
def _div(call: Call, left: Any, right: Any, rounding_mode: str | None = None) -> LazyTensor:
    dtype = call.fake.dtype
    if rounding_mode is None:
        return pointwise(call, _one("div"), (left, right), dtype, 1)
    if dtype in NARROW and any(size is not ONE for size in getattr(right, "shape", ())):
        return pointwise(call, _narrow_division(dtype, rounding_mode), (left, right), dtype)
    if dtype.is_floating_point and rounding_mode == "trunc":
        return pointwise(call, lambda a, b: apply("trunc", a / b), (left, right), dtype, 1)
    return _divided(("floordiv" if rounding_mode == "floor" else "truncdiv", 1), call, left, right)


def _narrow_division(dtype: torch.dtype, rounding_mode: str) -> Function:
    """A quotient of 16-bit floats: eager rounds after each step, unless it divides by a scalar."""

    def narrow(value: Expr) -> Expr:
        return cast(cast(value, dtype), value.dtype)

    def truncated(a: Expr, b: Expr) -> Expr:
        return apply("trunc", narrow(a / b))

    def floored(a: Expr, b: Expr) -> Expr:
        rest = apply("fmod", a, b)
        quotient = narrow(narrow(a - rest) / b)
        unlike = apply("ne", rest, literal(rest, 0)) & apply("ne", rest < 0, b < 0)
        quotient = where(unlike, narrow(quotient - 1), quotient)
        whole = apply("floor", quotient)
        whole = where(narrow(quotient - whole) > 0.5, narrow(whole + 1), whole)
        zero = apply("eq", quotient, literal(quotient, 0))
        whole = where(zero, apply("copysign", literal(a, 0), narrow(a / b)), whole)
        return where(apply("eq", b, literal(b, 0)), narrow(a / b), whole)

    return floored if rounding_mode == "floor" else truncated


@lowers_each({"aten.fmod": ("fmod",), "aten.remainder": ("remainder",)})
def _divided(row: tuple[Any, ...], call: Call, left: Any, right: Any) -> LazyTensor:
    """The quotient or the rest of a division: (operation, exact operands as in `pointwise`)."""
    dtype = call.fake.dtype
    # Integer division by zero is undefined in C; eager's raises.
    divides = dtype.is_floating_point or (isinstance(right, int) and right != 0)
    require(divides, "integer division by a tensor")
    return pointwise(call, _one(row[0]), (left, right), dtype, *row[1:])


@lowers("aten.pow")
def _power(call: Call, base: Any, exponent: Any) -> LazyTensor:
    dtype = call.fake.dtype
    require(dtype.is_floating_point or exponent in (1, 2, 3), "integer power")
    # Eager uses pow for float16 and sqrt for other floats, which -inf tells apart.
    halves = call.fake.dtype is torch.float16 and exponent in (0.5, -0.5)
    return pointwise(call, _one("pow") if halves else _pow, (base, exponent), dtype)


@lowers("aten.where")
def _where(call: Call, condition: LazyTensor, yes: Any, no: Any) -> LazyTensor:
    dtype = call.fake.dtype

    def element(idx: Indices) -> Expr:
        test = operand_at(condition, idx, torch.bool)
        return where(test, operand_at(yes, idx, dtype), operand_at(no, idx, dtype))

    require(call.fake.dtype in SUPPORTED, f"dtype {call.fake.dtype}")
    return call.lazy(element)


@lowers("aten.clamp")
def _clamp(call: Call, x: LazyTensor, low: Any = None, high: Any = None) -> LazyTensor:
    bounds = [(k, b) for k, b in (("maximum", low), ("minimum", high)) if b is not None]
    if len(bounds) == 1 and not clamps_to(bounds[0][1], call.fake.device):
        bounds = []

    def function(value: Expr, *limits: Expr) -> Expr:
        for (kind, _), limit in zip(bounds, limits, strict=True):
            value = apply(kind, limit, value)
        return value

    operands = (x, *(bound for _, bound in bounds))
    return pointwise(call, function, operands, call.fake.dtype)


@lowers_each({"aten.clamp_max": "minimum", "aten.clamp_min": "maximum"})
def _clamp_to(kind: str, call: Call, x: LazyTensor, bound: Any) -> LazyTensor:
    def function(value: Expr, limit: Expr) -> Expr:
        return apply(kind, limit, value)

    return pointwise(call, function, (x, bound), call.fake.dtype)


@lowers("aten.gelu")
def _gelu(call: Call, x: LazyTensor, approximate: str = "none") -> LazyTensor:
    def exact(value: Expr) -> Expr:
        return value * 0.5 * (1 + apply("erf", value * math.sqrt(0.5)))

    def tanh(value: Expr) -> Expr:
        inner = value + 0.044715 * (value * value * value)
        return 0.5 * value * (1 + apply("tanh", math.sqrt(2 / math.pi) * inner))

    function = tanh if approximate == "tanh" else exact
    return pointwise(call, function, (x,), call.fake.dtype)


@lowers("aten._to_copy", "prims.convert_element_type")
def _to_copy(call: Call, x: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
    device = kwargs.get("device")
    require(device is None or torch.device(device).type == x.device.type, "device copy")
    # Rounding to a 16-bit float is the point of the conversion: keep it although the value is
    # carried in float32 afterwards.
    # Under vmap a Python number is converted too, where it meets a tensor of another type.
    given = getattr(x, "dtype", call.fake.dtype)
    return pointwise(call, lambda value: cast(value, call.fake.dtype), (x,), given)


@lowers("aten.copy")
def _copy(call: Call, target: LazyTensor, source: LazyTensor, blocks: bool = False) -> LazyTensor:
    """The source, broadcast and converted, in the layout of the target."""
    require(source.device == target.device, "device copy")
    return _to_copy(call, source)


@lowers("aten.lift_fresh_copy")
def _same(call: Call, x: LazyTensor, **kwargs: Any) -> LazyTensor:
    return call.lazy(x.at)


# ---- tensors made from nothing


def _filled(call: Call, value: Any) -> LazyTensor:
    require(call.fake.dtype in SUPPORTED, f"a tensor of {call.fake.dtype}")
    return pointwise(call, lambda value: value, (value,), call.fake.dtype)


@lowers("aten.full", "aten.full_like", "aten.new_full", "aten.fill", "aten.scalar_tensor")
def _full(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    return _filled(call, kwargs.get("fill_value", args[-1]))


# Uninitialised memory may as well be zero: as a constant it vanishes when it is overwritten.
@lowers("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided")
@lowers("aten.new_empty", "aten.new_empty_strided")
def _empty(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    require(not torch.are_deterministic_algorithms_enabled(), "torch may fill it")
    return _filled(call, 0)


_EMPTY, _COPY = torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default


@lowers("weft.launch")
def _launch(call: Call, name: str, tensors: Any, numbers: Any, written: Any) -> list[LazyTensor]:
    """A kernel of the program writes to copies, or to an input that gets its result in the end."""
    made = list(tensors)
    for at, result in zip(written, call.results, strict=True):
        node, old = call.node.args[1][at], made[at]
        if "empty" in getattr(node.target, "_opname", ""):
            kind = {"dtype": old.dtype, "device": old.device}
            made[at] = call.graph.extern(result, _EMPTY, (old.shape, old.strides), kind)
        elif [(user.target, user.args[0]) for user in node.users][1:] != [(_COPY, node)]:
            made[at] = result.lazy(old.at)
            call.graph.realise(made[at])
    call.graph.extern(call, LAUNCH_, (name, made, numbers, written), {})
    return [made[at] for at in written]


@lowers("prims.iota")
def _iota(call: Call, length: Any, *, start: Any, step: Any, **kwargs: Any) -> LazyTensor:
    dtype = call.fake.dtype
    integral = all(isinstance(v, int | IndexExpr) for v in (start, step))
    require(integral and dtype in SUPPORTED, "float range")
    return call.lazy(lambda idx: cast(index_value(idx[0] * step + start), compute_dtype(dtype)))


@lowers("aten.arange")
def _arange(call: Call, *args: Any, **kwargs: Any) -> LazyTensor:
    start, step = args[0] if len(args) > 1 else 0, args[2] if len(args) > 2 else 1
    return _iota(call, None, start=start, step=step)
