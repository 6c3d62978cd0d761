"""Pointwise operators, one row each: result[i] = f(a[i], b[i], ...) with broadcasting.

Rows say in which dtype to compute: the result's (`_RESULT`), the operands' promoted one
(`_OPERANDS`, for comparisons), or bool (`_LOGICAL`).  16-bit floats are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from weft_codegen.loops.expr import Const, Expr, apply, cast, constant, index_value, where
from weft_codegen.loops.index import IndexExpr
from weft_codegen.loops.lower.shapes import to_index
from weft_codegen.loops.lower.table import Call, lowers, require
from weft_codegen.loops.lower.values import (
    Indices,
    LazyTensor,
    broadcast_at,
    compute_dtype,
)

Function = Callable[..., Expr]
SUPPORTED = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
)


def number(value: Any, dtype: torch.dtype) -> Expr:
    """A Python scalar, symbolic int or number computed from sizes as an expression of `dtype`."""
    if isinstance(value, Expr):
        return cast(value, dtype)
    if isinstance(value, IndexExpr | torch.SymInt):
        return cast(index_value(to_index(value)), dtype)
    require(isinstance(value, bool | int | float), f"operand {value!r}")
    if dtype is torch.uint8 and value < 0:
        value %= 256
    return constant(value, dtype)


def operand_at(operand: Any, place: Indices, dtype: torch.dtype) -> Expr:
    """A tensor's (broadcast) element or a scalar, as `dtype`."""
    if isinstance(operand, LazyTensor):
        return cast(broadcast_at(operand, place), dtype)
    return number(operand, dtype)


def pointwise(call: Call, function: Function, operands: tuple[Any, ...], dtype: Any) -> LazyTensor:
    """function over operands cast to `dtype`; the result is cast to the node's dtype."""
    for operand in operands:
        if isinstance(operand, LazyTensor):
            require(operand.dtype in SUPPORTED, f"dtype {operand.dtype}")
        else:
            number(operand, dtype)
    require(call.fake.dtype in SUPPORTED, f"dtype {call.fake.dtype}")
    wide = compute_dtype(call.fake.dtype)

    def element(place: Indices) -> Expr:
        return cast(function(*(operand_at(o, place, dtype) for o in operands)), wide)

    return call.lazy(element)


def operands_dtype(operands: tuple[Any, ...]) -> torch.dtype:
    """The dtype a comparison of `operands` happens in, by torch's promotion rules."""
    tensors = [o for o in operands if isinstance(o, LazyTensor)]
    first = tensors[0].dtype
    if len(tensors) == len(operands) and all(t.dtype is first for t in tensors):
        return compute_dtype(first)
    stand_ins = [
        torch.empty((1,) * min(len(o.shape), 1), dtype=o.dtype, device="meta")
        if isinstance(o, LazyTensor)
        else _stand_in(o)
        for o in operands
    ]
    # Read from the module: weft_core.fake puts a function there that does not load sympy.
    _, dtype = torch._prims_common.elementwise_dtypes(
        *stand_ins,
        type_promotion_kind=torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT,
    )
    return compute_dtype(dtype)


def _stand_in(scalar: Any) -> Any:
    """A Python number of the kind that `scalar` is."""
    if isinstance(scalar, Expr):
        return 0.5
    return 0 if isinstance(scalar, IndexExpr | torch.SymInt) else scalar


def _one(name: str) -> Function:
    return lambda *args: apply(name, *args)


def literal(like: Expr, value: float) -> Const:
    """A constant of the same dtype as `like`."""
    return constant(value, like.dtype)


def _sigmoid(x: Expr) -> Expr:
    one = literal(x, 1)
    return apply("div", one, apply("add", one, apply("exp", apply("neg", x))))


def _relu(x: Expr) -> Expr:
    # Of equal operands `maximum` gives the second: relu(-0.0) is -0.0.
    return apply("maximum", literal(x, 0), x)


def _silu(x: Expr) -> Expr:
    return apply("div", x, apply("add", literal(x, 1), apply("exp", apply("neg", x))))


def _sign(x: Expr) -> Expr:
    if x.dtype is torch.bool:
        return x
    zero = literal(x, 0)
    up, down = apply("gt", x, zero), apply("lt", x, zero)
    return apply("sub", cast(up, x.dtype), cast(down, x.dtype))


def _square(x: Expr) -> Expr:
    return apply("mul", x, x)


def _reciprocal(x: Expr) -> Expr:
    return apply("div", literal(x, 1), x)


def _pow(base: Expr, exponent: Expr) -> Expr:
    """Small constant exponents become products, as eager's kernels also do."""
    power = exponent.value if isinstance(exponent, Const) else None
    simple: dict[float, Callable[[], Expr]] = {
        0.5: lambda: apply("sqrt", base),
        1: lambda: base,
        2: lambda: _square(base),
        3: lambda: apply("mul", _square(base), base),
        -0.5: lambda: apply("rsqrt", base),
        -1: lambda: _reciprocal(base),
        -2: lambda: _reciprocal(_square(base)),
    }
    if power in simple and base.dtype.is_floating_point:
        return simple[power]()
    if power in (1, 2, 3):
        return simple[power]()
    return apply("pow", base, exponent)


def _ignoring_nan(name: str) -> Function:
    """maximum or minimum, where nan counts as missing."""

    def function(a: Expr, b: Expr) -> Expr:
        both = apply(name, b, a)
        if not a.dtype.is_floating_point:
            return both
        return where(apply("isnan", a), b, where(apply("isnan", b), a, both))

    return function


def _clamp(x: Expr, low: Expr | None, high: Expr | None) -> Expr:
    if low is not None:
        x = apply("maximum", low, x)
    return x if high is None else apply("minimum", high, x)


_RESULT: dict[str, Function] = {
    "mul": _one("mul"),
    "neg": _one("neg"),
    "maximum": _one("maximum"),
    "minimum": _one("minimum"),
    "fmax": _ignoring_nan("maximum"),
    "fmin": _ignoring_nan("minimum"),
    "bitwise_and": _one("and"),
    "bitwise_or": _one("or"),
    "bitwise_xor": _one("xor"),
    "bitwise_not": _one("not"),
    "sign": _sign,
    "relu": _relu,
    "square": _square,
    "abs": _one("abs"),
    "clone": lambda x: x,
    "alias_copy": lambda x: x,
    "fmod": _one("fmod"),
    "remainder": _one("remainder"),
}
_FLOAT: dict[str, Function] = {
    "sigmoid": _sigmoid,
    "silu": _silu,
    "reciprocal": _reciprocal,
    "hypot": _one("hypot"),
    "atan2": _one("atan2"),
    "copysign": _one("copysign"),
    **{
        name: _one(name)
        for name in [
            "sqrt",
            "rsqrt",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log1p",
            "log2",
            "log10",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "sinh",
            "cosh",
            "tanh",
            "asinh",
            "acosh",
            "atanh",
            "erf",
        ]
    },
}
_FLOAT_ONLY = {name: _one(name) for name in ("floor", "ceil", "trunc", "round")}
_OPERANDS: dict[str, Function] = {name: _one(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_LOGICAL: dict[str, Function] = {
    "logical_and": _one("and"),
    "logical_or": _one("or"),
    "logical_xor": _one("xor"),
    "logical_not": _one("not"),
}


def _rows(table: dict[str, Function], dtype_of: Callable[[Call, tuple[Any, ...]], Any]) -> None:
    for name, function in table.items():

        def lowering(call: Call, *operands: Any, _function: Function = function, **kw: Any) -> Any:
            require(not set(kw) - {"memory_format"}, f"keyword {kw}")
            return pointwise(call, _function, operands, dtype_of(call, operands))

        lowers(f"aten.{name}")(lowering)


def _result_dtype(call: Call, operands: tuple[Any, ...]) -> torch.dtype:
    return compute_dtype(call.fake.dtype)


def _float_result(call: Call, operands: tuple[Any, ...]) -> torch.dtype:
    require(call.fake.dtype.is_floating_point, "not a float result")
    return compute_dtype(call.fake.dtype)


_rows(_RESULT, _result_dtype)
_rows(_FLOAT, _float_result)
_rows(_FLOAT_ONLY, _float_result)
_rows(_OPERANDS, lambda call, operands: operands_dtype(operands))
_rows(_LOGICAL, lambda call, operands: torch.bool)


def _linear(name: str, swap: bool) -> Callable[..., LazyTensor]:
    """left +- alpha * right; rsub swaps its operands."""

    def lowering(call: Call, left: Any, right: Any, *rest: Any, alpha: Any = 1) -> LazyTensor:
        if rest:
            alpha = rest[0]
        if swap:
            left, right = right, left

        def function(a: Expr, b: Expr, scale: Expr) -> Expr:
            # torch subtracts alpha * other, and rsub is other - alpha * self.
            return apply(name, a, apply("mul", b, scale))

        return pointwise(call, function, (left, right, alpha), compute_dtype(call.fake.dtype))

    return lowering


lowers("aten.add")(_linear("add", swap=False))
lowers("aten.sub")(_linear("sub", swap=False))
lowers("aten.rsub")(_linear("sub", swap=True))


@lowers("aten.div")
def _div(call: Call, left: Any, right: Any, rounding_mode: str | None = None) -> LazyTensor:
    dtype = compute_dtype(call.fake.dtype)
    if rounding_mode is None:
        return pointwise(call, _one("div"), (left, right), dtype)
    if dtype.is_floating_point:
        if rounding_mode == "floor":
            return pointwise(call, _one("floordiv"), (left, right), dtype)
        return pointwise(
            call, lambda a, b: apply("trunc", apply("div", a, b)), (left, right), dtype
        )
    # Integer division by zero is undefined in C; eager's raises.
    require(isinstance(right, int) and right != 0, "integer division by a tensor")
    name = "floordiv" if rounding_mode == "floor" else "truncdiv"
    return pointwise(call, _one(name), (left, right), dtype)


@lowers("aten.floor_divide")
def _floor_divide(call: Call, left: Any, right: Any) -> LazyTensor:
    return _div(call, left, right, rounding_mode="floor")


def _float_test(name: str) -> Callable[..., LazyTensor]:
    def lowering(call: Call, x: LazyTensor) -> LazyTensor:
        require(x.dtype.is_floating_point, f"{name} of integers")
        return pointwise(call, _one(name), (x,), compute_dtype(x.dtype))

    return lowering


for _name in ("isnan", "isinf", "signbit"):
    lowers(f"aten.{_name}")(_float_test(_name))


@lowers("aten.pow")
def _power(call: Call, base: Any, exponent: Any) -> LazyTensor:
    dtype = compute_dtype(call.fake.dtype)
    require(dtype.is_floating_point or exponent in (1, 2, 3), "integer power")
    # Eager uses pow for float16 and sqrt for other floats, which -inf tells apart.
    halves = call.fake.dtype is torch.float16 and exponent in (0.5, -0.5)
    return pointwise(call, _one("pow") if halves else _pow, (base, exponent), dtype)


@lowers("aten.where")
def _where(call: Call, condition: LazyTensor, yes: Any, no: Any) -> LazyTensor:
    dtype = compute_dtype(call.fake.dtype)

    def element(place: Indices) -> Expr:
        test = operand_at(condition, place, torch.bool)
        return where(test, operand_at(yes, place, dtype), operand_at(no, place, dtype))

    require(call.fake.dtype in SUPPORTED, f"dtype {call.fake.dtype}")
    return call.lazy(element)


@lowers("aten.masked_fill")
def _masked_fill(call: Call, x: LazyTensor, mask: LazyTensor, value: Any) -> LazyTensor:
    return _where(call, mask, value, x)


@lowers("aten.clamp", "aten.clamp_min", "aten.clamp_max")
def _clamp_op(call: Call, x: LazyTensor, low: Any = None, high: Any = None) -> LazyTensor:
    bounds = tuple(bound for bound in (low, high) if bound is not None)
    has_low = low is not None

    def function(value: Expr, *limits: Expr) -> Expr:
        rest = list(limits)
        return _clamp(value, rest.pop(0) if has_low else None, rest[0] if rest else None)

    return pointwise(call, function, (x, *bounds), compute_dtype(call.fake.dtype))


lowers("aten.clamp_max")(lambda call, x, high: _clamp_op(call, x, None, high))


@lowers("aten.gelu")
def _gelu(call: Call, x: LazyTensor, approximate: str = "none") -> LazyTensor:
    def exact(value: Expr) -> Expr:
        half, scaled = literal(value, 0.5), apply("mul", value, literal(value, math.sqrt(0.5)))
        tail = apply("add", literal(value, 1), apply("erf", scaled))
        return apply("mul", apply("mul", value, half), tail)

    def tanh(value: Expr) -> Expr:
        cube = apply("mul", apply("mul", value, value), value)
        inner = apply("add", value, apply("mul", literal(value, 0.044715), cube))
        bent = apply("tanh", apply("mul", literal(value, math.sqrt(2 / math.pi)), inner))
        tail = apply("add", literal(value, 1), bent)
        return apply("mul", apply("mul", literal(value, 0.5), value), tail)

    function = tanh if approximate == "tanh" else exact
    return pointwise(call, function, (x,), compute_dtype(call.fake.dtype))


@lowers("aten._to_copy", "prims.convert_element_type")
def _to_copy(call: Call, x: LazyTensor, *args: Any, **kwargs: Any) -> LazyTensor:
    device = kwargs.get("device")
    require(device is None or torch.device(device).type == x.device.type, "device copy")
    target = call.fake.dtype
    require(target in SUPPORTED and x.dtype in SUPPORTED, "dtype")

    # Rounding to a 16-bit float is the point of the conversion: keep it although the value is
    # carried in float32 afterwards.
    return call.lazy(lambda place: cast(cast(x.at(place), target), compute_dtype(target)))


@lowers("aten.copy")
def _copy(call: Call, target: LazyTensor, source: LazyTensor, blocks: bool = False) -> LazyTensor:
    """The source, broadcast and converted, in the layout of the target."""
    require(source.device == target.device, "device copy")
    return _to_copy(call, LazyTensor(target.shape, source.dtype, target.strides,
                                     lambda place: broadcast_at(source, place),
                                     device=source.device))  # fmt: skip


@lowers("aten.lift_fresh_copy", "aten.detach", "aten.alias", "aten.contiguous")
def _same(call: Call, x: LazyTensor, **kwargs: Any) -> LazyTensor:
    return call.lazy(x.at)
