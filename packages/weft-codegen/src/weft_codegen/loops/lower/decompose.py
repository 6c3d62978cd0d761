"""Which operators are taken apart before lowering, and which stay whole.

torch's core decompositions reduce softmax, norms, losses and most backward formulas to pointwise
operators, views and reductions, which fuse.  Kept whole: what a library call does better (matrix
products, convolution, attention, embedding), and what has a lowering that beats its decomposition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

# Library calls, and operators lowered whole (pointwise.py, reductions.py).
_KEEP = [
    "addmm",
    "mm",
    "bmm",
    "baddbmm",
    "addmv",
    "mv",
    "dot",
    "convolution",
    "convolution_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "embedding",
    "embedding_dense_backward",
    "gelu",
    "silu",
    "sigmoid",
    "relu",
    "clamp",
    "clamp_min",
    "clamp_max",
    "masked_fill",
    "rsub",
    "square",
    "native_dropout",
    "bernoulli",
    "rand_like",
    "randn_like",
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "grid_sampler_2d",
    "index_add",
    "index_copy",
    "index_put",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "cumsum",
    "cumprod",
    "sort",
    "topk",
    "tril",
    "triu",
    "select_scatter",
    "slice_scatter",
    "lift_fresh",
    "max_unpool2d",
    "max_unpool3d",
    "unbind",
    "split",
    "split_with_sizes",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "t",
    "transpose",
    "var",
    "var_mean",
    "mean",
    "full",
    "zeros",
    "ones",
    "full_like",
    "zeros_like",
    "ones_like",
    "new_zeros",
    "new_ones",
    "new_full",
]

_ALSO = [
    "native_layer_norm",
    "native_layer_norm_backward",
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "gelu_backward",
    "silu_backward",
    "sigmoid_backward",
    "tanh_backward",
    "threshold_backward",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update_functional",
    "native_batch_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "nll_loss_forward",
    "nll_loss_backward",
    "mse_loss",
    "mse_loss_backward",
    "smooth_l1_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "addcmul",
    "addcdiv",
    "lerp",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "leaky_relu",
    "elu",
    "softplus",
    "mish",
    "_unsafe_index",
    "stack",
    "rot90",
    "embedding_renorm",
    "linalg_vector_norm",
    "logsumexp",
]


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    table = dict(core_aten_decompositions())
    also = [getattr(aten, name) for name in _ALSO if hasattr(aten, name)]
    table.update(get_decompositions(also))
    kept = {f"aten::{name}" for name in _KEEP}
    table = {op: rule for op, rule in table.items() if _base_name(op) not in kept}
    table[aten.native_batch_norm.default] = _native_batch_norm
    return table


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


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table for tracing graphs that this package compiles: op -> function."""
    return dict(_table())
