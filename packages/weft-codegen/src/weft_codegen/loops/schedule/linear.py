"""Products with the weight of a linear layer, which a function of weft's own computes.

    mm(x, w.t())           weft_codegen.mm(x, w.t())
    addmm(b, x, w.t())     weft_codegen.addmm(b, x, w.t())    b: a bias, or a sum (a residual)

The functions (kernels/include/weft_linear.h) take a weight as `nn.Linear` keeps it: the terms of
each sum lie side by side. Where they are faster is decided by who calls (tune.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from weft_codegen.loops.index import ONE, ZERO, IndexExpr
from weft_codegen.loops.lower.lazy_tensor import contiguous_strides
from weft_codegen.loops.program import Buffer, BufferRef, Buffers, Extern, on_cpu

_library = torch.library.Library("weft_codegen", "FRAGMENT")
_library.define("mm(Tensor left, Tensor right) -> Tensor")
_library.define("addmm(Tensor added, Tensor left, Tensor right) -> Tensor")
_library.impl("mm", torch.mm, "CompositeExplicitAutograd")
_library.impl("addmm", torch.addmm, "CompositeExplicitAutograd")

ADDMM = torch.ops.weft_codegen.addmm.default
LINEAR = (torch.ops.weft_codegen.mm.default, ADDMM)
_OWN = {torch.ops.aten.mm.default: LINEAR[0], torch.ops.aten.addmm.default: ADDMM}

Wins = Callable[[int | None, int, int, torch.dtype], bool]
"""Whether weft's function is faster, by rows (None: only known while running), columns, terms and
dtype."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def own_product(step: Extern, buffers: Buffers, wins: Wins) -> Extern | None:
    """A call of weft's function, where it can compute a product of `mm` or `addmm` and wins."""
    result = step.results[0] if step.op in _OWN else None
    if result is None or step.kwargs or not all(isinstance(arg, BufferRef) for arg in step.args):
        return None
    used = [buffers[arg.name] for arg in step.args]
    *added, left, right = used
    target = buffers[result]
    if not on_cpu((*used, target), *_DTYPES):
        return None
    rows, (depth, columns) = left.shape[0], right.shape
    known = depth.is_const and columns.is_const and depth.value > 0 and columns.value > 0
    ordered = left.strides[1] is ONE and right.strides[0] is ONE
    ordered &= target.strides == contiguous_strides(target.shape)
    ordered &= all(added_stride(buffer, rows) is not None for buffer in added)
    count = rows.value if rows.is_const else None
    own = known and ordered and wins(count, columns.value, depth.value, target.dtype)
    return replace(step, op=_OWN[step.op]) if own else None


def added_stride(added: Buffer, rows: IndexExpr) -> IndexExpr | None:
    """The elements from a row of what is added to a product to the next; None: it is laid out
    in a way that the function does not take."""
    if added.strides[-1:] != (ONE,):
        return None
    if len(added.shape) == 1:
        return ZERO
    return added.strides[0] if added.shape[0] == rows else None
