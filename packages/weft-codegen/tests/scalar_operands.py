"""Operands for the rows of the table of scalar operations, and the error that each may have.

A row that is added to `loops/ops.py` is added here, too: to one of the four sets of names.
"""

from __future__ import annotations

import torch
from kernel_programs import loop
from weft_codegen.loops.expr import apply, load
from weft_codegen.loops.index import axis
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.program import Kernel, Param, Store

INTEGER_ONLY = {"and", "or", "xor", "shl", "shr", "not"}
# Rounded once or not at all: equal to eager's results.
EXACT = set(
    """
    add sub mul product div neg abs maximum minimum truncdiv floordiv remainder fmod
    eq ne lt le gt ge isnan isinf signbit where floor ceil trunc round copysign philox
""".split()
)
# At most two representable numbers away from the exact result (test_kernels_accuracy.py).
ROUNDED = """
    sqrt rsqrt exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos atan sinh cosh tanh
    asinh acosh atanh erf erfc pow atan2 hypot
""".split()
# Near eager's result, within the rounding of the larger of two terms that may cancel.
CANCELS = {"logaddexp"}
FLOAT = sorted(OPS.keys() - INTEGER_ONLY - {"where", "philox"})
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 2.0, 0.5, -0.5]
SPECIAL += [88.0, 89.5, -103.5, -200.0, 3e38, -3e38, 1e-30]
COUNT = 64
# Operands of the rows that take neither floats nor integers of one dtype.
OPERANDS = {"where": [torch.bool, torch.float32, torch.float32], "philox": [torch.int64] * 4}


def operands_of(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    spread = [torch.randn(3000) * 4 for _ in range(OPS[name].arity)]
    special = torch.tensor(SPECIAL)
    if name in ("fmod", "remainder"):
        # Eager's vectorised fmod gives nan for quotients beyond 2^24 or so; C's is exact.
        special = special[~(special.abs() > 1e6) & (special.abs() != 1e-30)]
    first = torch.cat([special.repeat_interleave(len(special)), spread[0]])
    second = torch.cat([special.repeat(len(special)), spread[-1]])
    return [item.to(dtype) for item in (first, second)[: OPS[name].arity]]


def dtypes_of(name: str) -> list[torch.dtype]:
    dtype = torch.int64 if name in INTEGER_ONLY else torch.float32
    return OPERANDS.get(name, [dtype] * OPS[name].arity)


def kernel_of(names: list[str]) -> Kernel:
    """out_NAME = NAME(operands) for each name, in one loop; operands are shared by dtype."""
    where = axis("i0", COUNT)
    params, stores = {}, []
    for name in names:
        operands = [(f"a{n}_{str(d)[6:]}", d) for n, d in enumerate(dtypes_of(name))]
        params |= {label: Param(label, dtype, False) for label, dtype in operands}
        value = apply(name, *(load(label, where, dtype) for label, dtype in operands))
        stores.append(Store(f"out_{name}", where, value))
        params[f"out_{name}"] = Param(f"out_{name}", value.dtype, True)
    body = loop(where, *stores, kind="parallel")
    return Kernel("pointwise", tuple(params.values()), (), (), (body,))
