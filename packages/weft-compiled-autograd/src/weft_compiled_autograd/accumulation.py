"""Where gradients add up: between autograd nodes, and into `.grad`.

These functions are what a tape's `accumulate` and `accumulate_grad` mean on real tensors; they
follow torch's AccumulateGrad node: an existing gradient is added to in place and stays the same
object; a first gradient takes the layout of its variable when that is dense.
"""

from __future__ import annotations

import torch
from torch._prims_common import make_contiguous_strides_for
from weft_core.inlinable import inlinable

Maybe = torch.Tensor | None


def accumulate(old: Maybe, new: Maybe) -> Maybe:
    """Return the sum of two gradients of one value; None stands for zero."""
    if old is None or new is None:
        return new if old is None else old
    return new + old if old.is_sparse and not new.is_sparse else old + new


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor whose elements fill its memory exactly once, else None.

    Such a tensor is a permutation of a contiguous one: sorted by stride, each dimension's stride
    is the product of the sizes inside it.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected = stride * size
    return tensor.stride()


def gradient_strides(variable: torch.Tensor, grad: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that a first gradient must be copied to, or None when it may stay as it is.

    A gradient has its variable's strides where that is dense, and is contiguous otherwise;
    strides of dimensions of size 1 do not matter.
    """
    strides = dense_strides(variable)
    if strides is None:
        return None if grad.is_contiguous() else make_contiguous_strides_for(grad.shape)
    pairs = zip(grad.shape, grad.stride(), strides, strict=True)
    return None if all(size == 1 or have == want for size, have, want in pairs) else strides


def first_gradient(variable: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a copy of `grad`, which others may share, in the layout that `.grad` has to have."""
    if grad.is_sparse or grad.layout is not torch.strided:
        return grad.detach().clone()
    strides = gradient_strides(variable, grad)
    if strides is None:
        dense = dense_strides(grad) is not None
        strides = grad.stride() if dense else make_contiguous_strides_for(grad.shape)
    out = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device)
    return out.copy_(grad)


@inlinable
def set_grad(variable: torch.Tensor, grad: torch.Tensor) -> None:
    """Make `grad` the gradient of `variable`; the graph has seen to its layout and ownership."""
    variable.grad = grad


@inlinable
def set_grad_copy(variable: torch.Tensor, grad: torch.Tensor) -> None:
    """`set_grad` of a value that something else may refer to: a hook may have kept its result."""
    variable.grad = grad.clone()


def accumulate_grad(
    variable: torch.Tensor, old: Maybe, new: Maybe, has_post_hooks: bool = False
) -> Maybe:
    """Add `new` to the gradient `old` of `variable`; return the gradient that it has then."""
    if new is None:
        return old
    if old is None:
        variable.grad = first_gradient(variable, new)
    elif old.is_sparse and not new.is_sparse:
        variable.grad = new + old
    else:
        old.add_(new)
    return variable.grad
