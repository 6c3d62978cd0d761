"""Gradients as Python sees them: `tensor.grad` read and written, `grad_fn`, leaf or not, hooks.

A gradient that is read is an input of the graph like any other tensor; one that is written is
set for real after the graph. What autograd does while the program runs (`backward`) stays outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft_guards.sources import AttrSource

from weft_capture.breaks import Break
from weft_capture.rules.table import rule
from weft_capture.values import floats
from weft_capture.values.base import Value, method
from weft_capture.values.constant import NONE, TRUE, constant
from weft_capture.values.tensor import TensorValue, tensor_attribute

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


def _is_leaf(tx: Tracer, tensor: TensorValue) -> bool:
    """Say whether a tensor is a leaf; no tensor guard tells for those that require grad."""
    if tensor.source is not None and tensor.fake.requires_grad:
        tx.guard(AttrSource(tensor.source, "is_leaf"), "CONST", tensor.fake.is_leaf)
    return tensor.fake.is_leaf


@tensor_attribute("is_leaf")
def _leaf(tx: Tracer, self: TensorValue) -> Value:
    return constant(_is_leaf(tx, self))


@tensor_attribute("grad_fn")
def _grad_fn(tx: Tracer, self: TensorValue) -> Value:
    if _is_leaf(tx, self):
        return NONE
    raise Break("unsupported-value", "the grad_fn of a tensor")


@tensor_attribute("grad")
def _grad(tx: Tracer, self: TensorValue) -> Value:
    if not _is_leaf(tx, self):
        raise Break("unsupported-value", "the gradient of a tensor that is no leaf")
    if self.source is None or self.real is None:
        return NONE
    return tx.wrap(self.real.grad, AttrSource(self.source, "grad"))


@method(TensorValue, "set:grad")
def _set_grad(tx: Tracer, self: TensorValue, value: Value) -> Value:
    """Check the gradient as torch does, on fakes, and leave the setting for after the graph."""
    try:
        self.fake.grad = value.example()
    except (RuntimeError, TypeError) as error:
        raise Break("op-failed", f"setting .grad: {str(error)[:200]}") from None
    finally:
        self.fake.grad = None
    self.store(tx, "grad", value)
    return NONE


@method(TensorValue, "requires_grad_")
def _requires_grad(tx: Tracer, self: TensorValue, requires_grad: Value = TRUE) -> Value:
    wanted = requires_grad.truth(tx)
    if wanted is self.fake.requires_grad:
        return self
    if self.source is not None:
        raise Break("unsupported-value", "changing requires_grad of an existing tensor")
    tx.graph.made_at[self.node] = tx.steps.now  # as a leaf
    return tx.graph.emit("call_method", "requires_grad_", [self, constant(wanted)], {})


@method(TensorValue, "set:requires_grad")
def _set_requires_grad(tx: Tracer, self: TensorValue, value: Value) -> Value:
    return _requires_grad(tx, self, value)


@method(TensorValue, "detach_")
def _detach(tx: Tracer, self: TensorValue) -> Value:
    if not self.fake.requires_grad:
        return self
    if self.source is not None:
        raise Break("unsupported-value", "detaching an existing tensor from its history in place")
    return tx.graph.emit("call_method", "detach_", [self], {})


@method(TensorValue, "retain_grad")
def _retain_grad(tx: Tracer, self: TensorValue) -> Value:
    if _is_leaf(tx, self) and self.fake.requires_grad:
        return NONE
    raise Break("unsupported-method", "Tensor.retain_grad")


@method(TensorValue, "item", "__float__")
def _item(tx: Tracer, self: TensorValue) -> Value:
    if not self.fake.is_floating_point():
        raise Break("data-dependent-value", "Tensor.item")
    if self.fake.numel() != 1:
        raise Break("op-failed", "item of a tensor with more than one element")
    scalar = self.call_method(tx, "reshape", [tx.tuple_of([])], {}) if self.fake.dim() else self
    return floats.computed(tx, scalar)


@rule(torch.autograd.grad, torch.autograd.backward)
def _autograd(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    raise Break("unknown-call", "a backward pass inside the captured program")
