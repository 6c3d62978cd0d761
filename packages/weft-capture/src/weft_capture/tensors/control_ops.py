"""Control flow on tensors as nodes of a graph.

`cond` and `while_loop` are call_function targets whose branches are submodules (`get_attr` nodes)
with flat arguments and flat results. On real tensors autograd differentiates the branch that ran.
On fakes, where the branch is unknown, the results have the right shape and depend on the inputs of
both branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Tensors = tuple[Any, ...]
Branch = Callable[..., Tensors]


def cond(pred: torch.Tensor, true_fn: Branch, false_fn: Branch, operands: Sequence[Any]) -> Tensors:
    """Return the results of one of two functions, which agree in shape, dtype and device.

    Args:
        pred: bool tensor of one element.
        true_fn, false_fn: called with `operands`; give a tuple of tensors.
        operands: tensors and numbers.
    """
    if _is_unbacked(pred):
        return _either(pred, true_fn(*operands), false_fn(*operands))
    return true_fn(*operands) if pred else false_fn(*operands)


def while_loop(
    cond_fn: Branch, body_fn: Branch, carried: Sequence[Any], extra: Sequence[Any]
) -> Tensors:
    """Apply a function to its own results for as long as a condition on them holds.

    Args:
        cond_fn: called with `carried` and `extra`; gives a tuple of one bool tensor.
        body_fn: called with the same; gives tensors of the shapes and dtypes of `carried`.
        carried: the tensors to begin with.
        extra: tensors and numbers that stay the same.
    """
    values = tuple(carried)
    (condition,) = cond_fn(*values, *extra)
    if _is_unbacked(condition):
        return _either(condition, body_fn(*values, *extra), values)
    while condition:
        values = body_fn(*values, *extra)
        (condition,) = cond_fn(*values, *extra)
    return values


def _is_unbacked(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _either(pred: torch.Tensor, left: Tensors, right: Tensors) -> Tensors:
    return tuple(map(torch.where, [pred.reshape(())] * len(left), left, right))


TARGETS = frozenset((cond, while_loop))
"""Targets of nodes that run in Python between the compiled graphs."""
