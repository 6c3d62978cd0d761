"""Which operators become loops under the option `strict_numerics`: those that are exactly eager's.

Their results are exact, or correctly rounded from their operands, whatever the order of operations:
additions and products, comparisons, selections, moves of elements, conversions. All others are
called (sums of floats, exp, norms, products of matrices), and none is decomposed.
"""

from __future__ import annotations

from typing import Any

from weft_codegen.loops.lower.fxnodes import is_view

_EXACT = frozenset(
    """
    add sub mul div neg abs maximum minimum eq ne lt le gt ge where clamp relu sign clone copy
    _to_copy convert_element_type lift_fresh_copy logical_and logical_or logical_xor logical_not
    bitwise_and bitwise_or bitwise_xor bitwise_not isnan isinf signbit floor ceil trunc sqrt
    full full_like new_full fill scalar_tensor empty empty_like empty_permuted empty_strided
    new_empty new_empty_strided iota arange cat slice_scatter diagonal_scatter constant_pad_nd flip
    roll repeat amax amin any all argmax argmin index index_select gather embedding chunk
    tensor_split sum prod cumsum pow clamp_max clamp_min
    """.split()  # noqa: SIM905
)
_OF_INTS = frozenset(("sum", "prod", "cumsum"))  # of floats the order of additions decides


def is_exact(target: Any, fake: Any, args: Any, kwargs: Any) -> bool:
    """Say whether a loop for an operator gives the bits of eager's kernel.

    Args:
        target: the operator.
        fake: its result, or results.
        args, kwargs: its arguments.
    """
    dtype = getattr(fake, "dtype", None)
    is_float = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    if is_view(target):
        return True
    name = target._opname
    if name not in _EXACT or (is_float and name in _OF_INTS):
        return False
    scale = kwargs.get("alpha", args[2] if len(args) > 2 else 1) if name in ("add", "sub") else 1
    fused = is_float and not (isinstance(scale, int | float) and scale == 1)  # eager's is an FMA
    rounded = name == "div" and (len(args) > 2 or kwargs.get("rounding_mode") is not None)
    power = args[1] if name == "pow" else 2
    return not fused and not rounded and power == 2
