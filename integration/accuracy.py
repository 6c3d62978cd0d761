"""Judge float32 results against float64: weft may err as much as eager does, not more.

Generated code sums in another order than eager, so results differ in their last bits. Both are
compared with the same model in float64; the error of weft must stay within a small factor of
eager's, plus some units of float32 rounding of the largest element: where eager happens to sum in
double (BatchNorm on CPU does), a sum in float of terms that cancel is what it is measured against.
"""

from dataclasses import dataclass
from typing import Any

import torch
from models.case import Case, loss_of, tensors_of
from torch import nn

FACTOR = 4.0
ROUNDING = 256 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Results:
    """What one run of a model gave, by name: outputs, gradients, buffers afterwards."""

    tensors: dict[str, torch.Tensor]


def run(case: Case, model: nn.Module, call: Any, dtype: torch.dtype, training: bool) -> Results:
    """Call a model, or its compiled twin `call`, once; with its backward when training."""
    args, kwargs = case.inputs(dtype)
    found: dict[str, torch.Tensor] = {}
    with torch.set_grad_enabled(training):
        output = call(*args, **kwargs)
    found |= {f"output {i}": t.detach() for i, t in enumerate(tensors_of(output))}
    if training:
        loss_of(output).backward()
        found |= {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b for n, b in model.named_buffers() if b.is_floating_point()}
    return Results(found)


def worst(results: Results, eager: Results, exact: Results) -> list[str]:
    """Return a line for each tensor that is further from float64 than eager's error allows."""
    assert results.tensors.keys() == eager.tensors.keys() == exact.tensors.keys()
    found = []
    for name, reference in exact.tensors.items():
        got, want = results.tensors[name], eager.tensors[name]
        assert got.dtype == want.dtype and got.shape == want.shape and got.stride() == want.stride()
        error, allowed = _error(got, reference), _error(want, reference)
        scale = reference.abs().max().item() if reference.numel() else 0.0
        if not error <= FACTOR * allowed + ROUNDING * scale:
            found.append(f"{name}: error {error:.2e}, eager's {allowed:.2e}, scale {scale:.2e}")
    return found


def _error(got: torch.Tensor, reference: torch.Tensor) -> float:
    return (got.double() - reference.double()).abs().max().item() if got.numel() else 0.0
