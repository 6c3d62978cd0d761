"""Random numbers as loops, with `fallback_random=False`: Philox of (seed, element, operator).

A graph that draws takes one seed a call from torch's default generator.  Each number is a pure
function of it (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), so it fuses
with its users and does not depend on threads, layout or order:

    key = the seed      counter = (idx in row-major order, number of the operator in the graph)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weft_codegen.loops.expr import Expr, apply, cast, compute_dtype, constant, index_value
from weft_codegen.loops.lower.lazy_tensor import Indices, LazyTensor, flatten
from weft_codegen.loops.lower.lowering import Call, lowers, lowers_each, require
from weft_codegen.loops.lower.pointwise import SUPPORTED
from weft_codegen.loops.lower.shapes import to_shape

Words = Callable[[int], Expr]
Make = Callable[[Words, torch.dtype], Expr]
# Random bits of a uniform number: as many as its dtype holds, so that rounding never makes it 1.
_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def _bits(word: Expr, digits: int, dtype: torch.dtype) -> Expr:
    """The lowest `digits` bits of `word` as a number in [0, 1), or 1 where `dtype` rounds to it."""
    return cast(word & (2**digits - 1), dtype) * 2.0**-digits


def _uniform(words: Words, dtype: torch.dtype) -> Expr:
    """A number in [0, 1)."""
    digits = _DIGITS[dtype]
    if digits <= 31:
        return _bits(words(0), digits, torch.float32)
    return _bits(words(0), 31, dtype) + _bits(words(1), digits - 31, dtype) * 2.0**-31


def _normal(words: Words, dtype: torch.dtype) -> Expr:
    """A standard normal number (Box and Muller's transform), at most 6.7 away from zero."""
    wide = compute_dtype(dtype)
    radius = apply("log", _bits(words(0), 31, wide) + 2.0**-32)
    angle = _bits(words(1), 31, wide) * (2 * math.pi)
    return apply("sqrt", radius * -2.0) * apply("cos", angle)


def _stream(call: Call) -> tuple[LazyTensor, int]:
    """The seed of this call of the graph (an int64 scalar), and a number of the operator's own."""
    graph = call.graph
    require(not graph.fallback_random, "fallback_random")
    graph.draws += 1
    if graph.seed is None:
        scalar = replace(call, fake=torch.empty((), dtype=torch.int64))
        draw = torch.ops.aten.randint.default
        graph.seed = graph.extern(scalar, draw, (2**63 - 1, []), {"dtype": torch.int64})
    return graph.seed, graph.draws


def _drawn(call: Call, make: Make, dtype: torch.dtype) -> Any:
    """index -> a number that `make` derives from random words, another one in each operator."""
    require(dtype in _DIGITS and call.fake.device.type == "cpu", "dtype or device")
    seed, number = _stream(call)
    shape = to_shape(call.fake.shape)

    def element(idx: Indices) -> Expr:
        counter = index_value(flatten(idx, shape)), constant(number, torch.int64)
        return make(
            lambda word: apply("philox", seed.at(()), *counter, constant(word, torch.int64)), dtype
        )

    return element


@lowers_each({"aten.rand": _uniform, "aten.rand_like": _uniform})
@lowers_each({"aten.randn": _normal, "aten.randn_like": _normal})
def _standard(make: Make, call: Call, like: Any, *, generator: Any = None, **_: Any) -> LazyTensor:
    require(generator is None, "a generator of its own")
    return call.lazy(_drawn(call, make, call.fake.dtype))


@lowers("aten.uniform")
def _uniform_between(call: Call, x: Any, low: float = 0.0, high: float = 1.0) -> LazyTensor:
    drawn = _drawn(call, _uniform, call.fake.dtype)
    return call.lazy(lambda idx: drawn(idx) * (high - low) + low)


@lowers("aten.normal_functional")
def _normal_around(call: Call, x: Any, mean: float = 0.0, deviation: float = 1.0) -> LazyTensor:
    drawn = _drawn(call, _normal, call.fake.dtype)
    return call.lazy(lambda idx: drawn(idx) * deviation + mean)


@lowers("aten.bernoulli")
def _bernoulli(call: Call, x: LazyTensor, probability: Any = None) -> LazyTensor:
    """One with this probability (a number), else zero."""
    known = isinstance(probability, float) and 0 <= probability <= 1
    require(known and call.fake.dtype in SUPPORTED, "probabilities that eager checks")
    drawn, wide = _drawn(call, _uniform, torch.float32), compute_dtype(call.fake.dtype)
    return call.lazy(lambda idx: cast(drawn(idx) < probability, wide))


@lowers("aten.native_dropout")
def _dropout(
    call: Call, x: LazyTensor, probability: float, train: bool | None
) -> tuple[LazyTensor, LazyTensor]:
    values, kept = call.results
    require(x.dtype in SUPPORTED and 0 <= probability <= 1, "dtype or probability")
    if train is False:
        return values.lazy(x.at), kept.lazy(lambda idx: constant(True, torch.bool))
    keep = 1.0 - probability
    mask = _bernoulli(kept, x, keep)
    if call.uses > 1:  # drawn once for both
        call.graph.realise(mask)
    scale = 1.0 / keep if keep else 0.0
    wide = compute_dtype(values.fake.dtype)
    return values.lazy(lambda i: cast(x.at(i), wide) * cast(mask.at(i), wide) * scale), mask
