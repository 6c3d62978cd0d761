"""Which operators are taken apart before lowering, and which stay whole.

torch's core decompositions reduce softmax, norms, losses and most backward formulas to pointwise
operators, views and reductions, which fuse.  Kept whole: what a library call does better, and what
has a row of its own in the lowering table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from weft_codegen.loops.lower.rows import LOWERINGS
from weft_codegen.torch_compat import vector_norm

# What a library call does better, and operators whose random numbers or strides are eager's. Of
# others the decomposition is wrong: block_diag's promotes tensors of no dimensions as others,
# isin's searches, and finds nothing beside NaN; those of the losses count what comes after a -1, or
# NaN, and the gradient has no NaN.
_KEEP = (
    "baddbmm", "mv", "dot", "_scaled_dot_product_flash_attention_for_cpu", "bernoulli",
    "max_unpool2d", "max_unpool3d", "block_diag", "isin", "multilabel_margin_loss_forward",
    "multi_margin_loss", "soft_margin_loss_backward",
)  # fmt: skip

# Of which eager says under deterministic algorithms that they are none, on a GPU.
VARYING = frozenset((
    "upsample_linear1d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "upsample_trilinear3d_backward",
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "avg_pool3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "grid_sampler_2d_backward", "nll_loss2d_forward", "cumsum",
))  # fmt: skip

# Taken apart although torch's core set has them.
_ALSO = (
    "native_layer_norm", "_softmax", "_log_softmax", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update_functional", "native_group_norm", "hardtanh", "leaky_relu", "elu",
    "linalg_vector_norm", "logsumexp",
)  # fmt: skip


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    table = dict(core_aten_decompositions())
    table.update(get_decompositions([getattr(aten, name) for name in _ALSO]))
    kept = {f"aten::{name}" for name in _KEEP} | {name.replace(".", "::") for name in LOWERINGS}
    table = {op: rule for op, rule in table.items() if _base_name(op) not in kept}
    table[aten.native_batch_norm.default] = _native_batch_norm
    for name in ("linspace", "logspace", "addcmul", "_softmax", "_log_softmax"):
        op = getattr(aten, name).default
        table[op] = functools.partial(_of_floats, table[op])
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "native_group_norm"):
        op = getattr(aten, f"{name}_backward").default
        table[op] = functools.partial(_of_elements, table[op])
    for op in (aten.huber_loss.default, aten.select_scatter.default):
        table[op] = functools.partial(_of_first_dtype, table[op])
    for name in ("binary_cross_entropy_with_logits", "soft_margin_loss"):
        op = getattr(aten, name).default
        table[op] = functools.partial(_of_one_dtype, table[op])
    norm = aten.linalg_vector_norm.default
    table[norm] = functools.partial(vector_norm, table[norm])
    for name in ("var", "std"):
        table[getattr(aten, name).correction] = functools.partial(_variance, name)
    table[aten.take.default] = _take
    table[aten.bucketize.Tensor] = _bucketize
    for name in ("nll_loss_backward", "nll_loss2d_backward"):
        table[getattr(aten, name).default] = _nll_loss_backward
    logit = aten.logit_backward.default
    rule = table[logit]
    # Of -0.0, it is that of 0.0.
    table[logit] = lambda grad, x, eps=None: rule(grad, x + 0.0, eps)
    bce = aten.binary_cross_entropy.default
    table[bce] = functools.partial(_binary_cross_entropy, table[bce])
    table[aten._int_mm.default] = _integer_product
    table[aten._amp_foreach_non_finite_check_and_unscale.default] = _unscale
    embedding = aten.embedding_dense_backward.default
    table[embedding] = functools.partial(_on_cpu, table[embedding])  # else a copy of the zeros
    return {op: _but_for_rare(rule) for op, rule in table.items()}


# Of which eager has few kernels: that of `where`, which torch's rules use, came with torch 2.12.
_RARE = (torch.uint16, torch.uint32, torch.uint64)


def _but_for_rare(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition, but for tensors of rare dtypes, on which the operator itself runs."""

    @functools.wraps(rule)
    def call(*args: Any, **kwargs: Any) -> Any:
        rare = any(getattr(one, "dtype", None) in _RARE for one in args)
        return NotImplemented if rare else rule(*args, **kwargs)

    return call


def _take(x: Any, index: Any) -> Any:
    """An index of what is flattened, which is never read: torch's reads one of no dimensions."""
    return torch.ops.aten.index(x.reshape(-1), [index])


def _bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """The number of boundaries below each element; in lanes that is faster than a search."""
    count = boundaries.numel()
    if x.dtype != boundaries.dtype or not isinstance(count, int) or not 0 < count <= 1024:
        return NotImplemented
    value = x.unsqueeze(-1)
    below = ~(boundaries > value if right else boundaries >= value)  # all of them, for NaN
    found = below.sum(-1, dtype=torch.int32).contiguous()
    return found if out_int32 else found.long()


def _nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> Any:
    """The gradient where each target is, zero elsewhere: torch's is a product, NaN for NaN."""
    channel = min(x.dim() - 1, 1)
    target = (target[0] if x.dim() == 1 and target.dim() else target).unsqueeze(channel)
    used = target != ignored
    place = torch.where(used, target, 0)
    value = -(grad / total if reduction == 1 else grad)
    if x.dim() > value.dim() > 0:
        value = value.unsqueeze(channel)
    if weight is not None:
        value = value * weight[place]
    value = torch.where(used, value, 0).to(x.dtype).expand(target.shape)
    return torch.zeros_like(x).scatter(channel, place, value)


def _unscale(grads: Any, found: Any, factor: Any) -> Any:
    """What `GradScaler.unscale_` does: the gradients times `factor`, `found` 1 where not finite."""
    for grad in grads:
        found = torch.where(torch.isfinite(grad).all(), found, 1.0)
    wide = [torch.promote_types(grad.dtype, torch.float32) for grad in grads]
    pairs = zip(grads, wide, strict=True)
    return [(grad.to(dtype) * factor.to(dtype)).to(grad.dtype) for grad, dtype in pairs], found


def _variance(name: str, x: Any, *rest: Any, **options: Any) -> Any:
    """A variance or deviation, summed in float64 on a CPU as eager's."""
    widened = x.device.type == "cpu" and x.dtype.is_floating_point and x.dtype != torch.float64
    if name == "var" and not widened:
        return NotImplemented
    found = torch.ops.aten.var.correction(x.double() if widened else x, *rest, **options)
    return (found.sqrt() if name == "std" else found).to(x.dtype)


def _binary_cross_entropy(rule: Callable[..., Any], x: Any, target: Any, *rest: Any) -> Any:
    """The decomposition, and what the operator checks."""
    for name, one in ("input", x), ("target", target):
        inside = ((one >= 0) & (one <= 1)).all()
        torch._assert_async(inside, f"all elements of {name} should be between 0 and 1")
    return rule(x, target, *rest)


def _of_floats(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The decomposition, but for integers: eager rounds the numbers that it is given first."""
    dtype: Any = kwargs.get("dtype") or getattr(args[0], "dtype", torch.float32)
    floats = dtype.is_floating_point or dtype.is_complex
    return rule(*args, **kwargs) if floats else NotImplemented


# So many products of int8 add up to a number that float32 holds, in any order.
_EXACT_TERMS = 1024
_FEW_ROWS = 4  # a loop; see schedule/matmul.py


def _integer_product(a: Any, b: Any) -> Any:
    """Exact products of float32 on a CPU without instructions for int8, where eager's are slow."""
    rows, length = a.shape
    slow = a.device.type == "cpu" and not torch.cpu._is_vnni_supported()
    slow &= a.dtype is b.dtype is torch.int8 and type(length) is int
    if not slow or (type(rows) is int and rows <= _FEW_ROWS):
        return NotImplemented
    starts = range(0, max(length, 1), _EXACT_TERMS)
    blocks = [slice(start, start + _EXACT_TERMS) for start in starts]
    sums = [(a[:, block].float() @ b[block].float()).int() for block in blocks]
    return functools.reduce(torch.add, sums)


def _on_cpu(rule: Callable[..., Any], x: Any, *rest: Any, **options: Any) -> Any:
    """The decomposition, on a CPU."""
    return rule(x, *rest, **options) if x.device.type == "cpu" else NotImplemented


def _of_first_dtype(rule: Callable[..., Any], x: Any, *rest: Any, **options: Any) -> Any:
    """The decomposition, whose result has the first operand's dtype as eager's has."""
    return rule(x, *rest, **options).to(x.dtype)


def _of_one_dtype(rule: Callable[..., Any], x: Any, target: Any, *rest: Any) -> Any:
    """The decomposition, but for unlike dtypes: eager computes in place, in one of the two."""
    return rule(x, target, *rest) if x.dtype == target.dtype else NotImplemented


def _of_elements(rule: Callable[..., Any], grad: Any, x: Any, *rest: Any) -> Any:
    """The decomposition, which divides a number by that of the elements, where there are any."""
    return rule(grad, x, *rest) if x.numel() else NotImplemented


def _native_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> Any:
    """The decomposition, but for running statistics: only the operator itself updates those."""
    if training and mean is not None:
        return NotImplemented
    rule = get_decompositions([torch.ops.aten.native_batch_norm])
    decomposed = rule[torch.ops.aten.native_batch_norm.default]
    return decomposed(x, weight, bias, mean, var, training, *rest)


def _base_name(op: Any) -> str:
    schema = getattr(op, "_schema", None)
    return str(schema.name) if schema is not None else str(op)


# What only moves or selects elements, for strict numerics.
_EXACT = ("select_scatter", "t", "masked_fill", "zeros_like", "ones_like", "new_zeros", "new_ones")


def decompositions(strict: bool = False) -> dict[Any, Callable[..., Any]]:
    """The decomposition table for tracing graphs that this package compiles: op -> function.

    With `strict` only that of operators whose decomposition computes nothing.
    """
    if strict:
        return {op: rule for op, rule in _table().items() if _base_name(op)[6:] in _EXACT}
    if not torch.are_deterministic_algorithms_enabled():
        return dict(_table())
    return {op: rule for op, rule in _table().items() if _base_name(op)[6:] not in VARYING}
