"""Whether a compiled run agrees with an eager one, by a float64 run where rounding counts.

Generated code sums in another order than eager does, so last bits differ. Both are compared with
the same program in float64: the error may be some times eager's, plus some units of rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

FACTOR = 8.0
UNITS = 256  # of the dtype's rounding, of the largest element


@dataclass(frozen=True)
class Outcome:
    """What one run did: its tensors and other values by name, or the error that it raised.

    `spent`: the history of the result cannot be differentiated, since the program has done that.
    """

    values: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    spent: bool = False


def observe(call: Callable[[], tuple[Any, Any]], differentiate: bool = True) -> Outcome:
    """Run a program under a fixed seed.

    Args:
        call: returns a result, and the inputs whose contents and gradients count.
        differentiate: compute gradients of what requires them.
    """
    spent = False
    torch.manual_seed(0)
    try:
        result, inputs = call()
        leaves = pytree.tree_leaves(result)
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    except Exception as error:
        return Outcome(error=error)
    outputs = [t for t in tensors if differentiate and t.requires_grad and t.grad_fn is not None]
    try:
        if outputs:
            torch.autograd.backward(outputs, [_weights(t) for t in outputs])
    except Exception as error:
        if "backward through the graph a second time" not in str(error):
            return Outcome(error=error)
        spent = True
    values = {f"result {i}": _kept(value) for i, value in enumerate(leaves)}
    for i, value in enumerate(pytree.tree_leaves(inputs)):
        for name, tensor in _tensors(value):
            values[f"input {i}{name}"] = _kept(tensor)
            values[f"gradient of input {i}{name}"] = _kept(tensor.grad if tensor.is_leaf else None)
    return Outcome(values, spent=spent)


def _tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, nn.Module):
        own = [*value.named_parameters(), *value.named_buffers()]
        return [(f".{name}", tensor) for name, tensor in own]
    return [("", value)] if isinstance(value, torch.Tensor) else []


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient whose elements differ, so that sums that should vanish do not hide an error."""
    line = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64, device=tensor.device)
    return line.reshape(tensor.shape).to(tensor.dtype)


def difference(got: Outcome, eager: Outcome, exact: Outcome | None) -> str:
    """Return in words what is not as in eager, or an empty text.

    Args:
        got: the compiled run.
        eager: the eager one.
        exact: the same in float64; None where that could not be run.
    """
    if got.error is not None or eager.error is not None:
        kinds = (type(got.error), type(eager.error))
        return "" if kinds[0] is kinds[1] else f"raises {got.error!r}, and eager {eager.error!r}"
    for name, want in eager.values.items():
        reference = exact.values.get(name) if exact is not None and exact.error is None else None
        found = _compare(got.values.get(name), want, reference)
        if found:
            return f"{name}: {found}"
    return ""


def _compare(got: Any, want: Any, exact: Any) -> str:
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        plain = isinstance(want, bool | int | float | str | type(None))
        return f"{got!r} is not {want!r}" if plain and not (got == want or got != got) else ""
    about = [(name, getattr(got, name), getattr(want, name)) for name in ("dtype", "shape")]
    if wrong := [f"{name} {a} is not {b}" for name, a, b in about if a != b]:
        return wrong[0]
    if want.is_sparse or want.is_quantized or not want.numel():
        return ""
    if not (want.is_floating_point() or want.is_complex()):
        count = int((got != want).sum())
        return f"{count} of {want.numel()} elements differ" if count else ""
    wide = torch.complex128 if want.is_complex() else torch.float64
    reference = (want if exact is None or exact.shape != want.shape else exact).to(wide)
    error, allowed = _error(got.to(wide), reference), _error(want.to(wide), reference)
    finite = reference[torch.isfinite(reference)].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    units = UNITS * torch.finfo(want.dtype).eps * scale
    if error <= FACTOR * allowed + units:
        return ""
    return f"error {error:.3g}, eager's {allowed:.3g}, largest element {scale:.3g}"


def _error(got: torch.Tensor, reference: torch.Tensor) -> float:
    same = (got == reference) | (got.isnan() & reference.isnan())
    error = torch.where(same, torch.zeros_like(got), got - reference).abs()
    return error.nan_to_num(nan=float("inf")).max().item()


def widened(value: Any) -> Any:
    """Return a deep copy in float64."""

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return leaf.double()
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            double = leaf.detach().double()
            return double.requires_grad_(leaf.requires_grad)
        return leaf

    return pytree.tree_map(wide, copy.deepcopy(value))
