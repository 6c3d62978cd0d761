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

from weft_codegen.loops.lower import install
from weft_codegen.loops.lower.table import LOWERINGS

# What a library call does better, and operators whose random numbers or strides are eager's.
_KEEP = [
    "baddbmm",
    "mv",
    "dot",
    "_scaled_dot_product_flash_attention_for_cpu",
    "bernoulli",
    "max_unpool2d",
    "max_unpool3d",
    "multilabel_margin_loss_forward",  # its decomposition counts what comes after a -1
]

# Taken apart although torch's core set has them.
_ALSO = [
    "native_layer_norm",
    "_softmax",
    "_log_softmax",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update_functional",
    "native_group_norm",
    "hardtanh",
    "leaky_relu",
    "elu",
    "linalg_vector_norm",
    "logsumexp",
]


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    install()
    table = dict(core_aten_decompositions())
    table.update(get_decompositions([getattr(aten, name) for name in _ALSO]))
    kept = {f"aten::{name}" for name in _KEEP} | {name.replace(".", "::") for name in LOWERINGS}
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
