"""torch.func: vmap, grad, vjp, jvp and the transforms that are built on them.

Their Python is inlined. The C functions that enter a level, wrap tensors for it and leave it are
called on the fake tensors and become nodes of the graph, so that later stages go through the same
levels. A break inside a level rolls back the call of the transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch import eager_transforms, predispatch
from torch.autograd import forward_ad

from weft_capture.breaks import Break
from weft_capture.functions.table import decline, graph, rule
from weft_capture.model.constant import FALSE, NONE, TRUE, constant
from weft_capture.model.containers import TupleValue
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.tensor import TensorValue


def _both(name: str) -> list[Any]:
    """Return a C function of functorch, and its Python alias where there is one."""
    modules = (_functorch, predispatch)
    return [getattr(module, name) for module in modules if name and hasattr(module, name)]


# ---- levels


LEVELS: set[Any] = set()


def _level(enter: Any, leave: Any, *names: str) -> None:
    """Add the rules of the two functions that enter and leave a level."""
    LEVELS.add(enter)

    @rule(enter, *_both(names[0]))
    def begin(tx: Tracer, *args: Value) -> Value:
        if tx.depth <= 1:
            raise Break("function-transform", "a functorch level entered by the frame itself")
        real = tuple(arg.as_constant() for arg in args)
        level = enter(*real)
        depth = len(tx.transforms)
        tx.transforms.append(leave)
        tx.journal.on_rollback(lambda: _leave_down_to(tx, depth))
        tx.graph.node("call_function", enter, real, {}, None)
        return constant(level)

    @rule(leave, *_both(names[1]))
    def end(tx: Tracer, **kwargs: Value) -> Value:
        level = tx.transforms.pop()()
        tx.graph.node("call_function", leave, (), {}, None)
        return constant(level)


def _leave_down_to(tx: Tracer, depth: int) -> None:
    while len(tx.transforms) > depth:
        tx.transforms.pop()()


for _kind in ("vmap", "grad", "jvp"):
    _names = f"_{_kind}_increment_nesting", f"_{_kind}_decrement_nesting"
    _level(getattr(_functorch, _names[0]), getattr(_functorch, _names[1]), *_names)
_level(forward_ad.enter_dual_level, forward_ad.exit_dual_level, "", "")

# ---- wrapping tensors for a level, and taking them out

for _name in ("_add_batch_dim", "_remove_batch_dim", "_wrap_for_grad", "_unwrap_for_grad"):
    _in_graph = getattr(_functorch, _name)

    @rule(*_both(_name))
    def _wrap(tx: Tracer, *args: Value, _in_graph: Any = _in_graph) -> Value:
        return tx.graph.emit("call_function", _in_graph, list(args), {})


def differentiable(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor of a grad level require grad, which only functorch does."""
    allowed = _functorch.get_inplace_requires_grad_allowed()
    _functorch.set_inplace_requires_grad_allowed(True)
    try:
        return tensor.requires_grad_()
    finally:
        _functorch.set_inplace_requires_grad_allowed(allowed)


rule(eager_transforms._set_tensor_requires_grad)(
    lambda tx, tensor: tx.graph.emit("call_function", differentiable, [tensor], {})
)


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor] | None = None,
    retain_graph: bool = False,
    create_graph: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Differentiate the outputs that require grad; zeros for unused inputs."""
    seeds: Sequence[Any] = grad_outputs if grad_outputs is not None else [None] * len(outputs)
    pairs = [(out, seed) for out, seed in zip(outputs, seeds, strict=True) if out.requires_grad]
    grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
    if pairs:
        grads = torch.autograd.grad(
            [out for out, _ in pairs],
            inputs,
            [seed for _, seed in pairs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    return tuple(
        torch.zeros_like(p) if grad is None else grad for p, grad in zip(inputs, grads, strict=True)
    )


@rule(eager_transforms._autograd_grad)
def _autograd_grad(
    tx: Tracer,
    outputs: Value,
    inputs: Value,
    grad_outputs: Value = NONE,
    retain_graph: Value = FALSE,
    create_graph: Value = TRUE,
) -> Value:
    args = [outputs, inputs, grad_outputs, retain_graph, create_graph]
    args[:2] = [TupleValue(value.unpack(tx)) for value in args[:2]]
    return tx.graph.emit("call_function", gradients, args, {})


# ---- forward mode

graph(forward_ad.make_dual)


@rule(forward_ad.unpack_dual)
def _unpack_dual(tx: Tracer, tensor: Value, *, level: Value = NONE) -> Value:
    dual_class: Any = forward_ad.UnpackedDualTensor
    args = [tensor] if level is NONE else [tensor, level]
    target: Callable[..., Any] = _unpack
    primal_and_tangent = tx.graph.emit("call_function", target, args, {}).unpack(tx)
    return tx.const_object(dual_class).tp_call(tx, primal_and_tangent, {})


def _unpack(tensor: torch.Tensor, level: int | None = None) -> tuple[Any, Any]:
    primal, tangent = forward_ad.unpack_dual(tensor, level=level)
    return primal, tangent


# ---- questions and checks

decline("function-transform", "torch.func.linearize", eager_transforms.linearize)


@rule(predispatch.lazy_load_decompositions)
def _load(tx: Tracer) -> None:
    predispatch.lazy_load_decompositions()


@rule(*_both("is_batchedtensor"), _functorch.is_gradtrackingtensor)
def _is_wrapped(tx: Tracer, tensor: Value) -> Value:
    wrapped = isinstance(tensor, TensorValue) and _functorch.is_functorch_wrapped_tensor(
        tensor.fake
    )
    return constant(wrapped)


rule(torch._C._are_functorch_transforms_active)(lambda tx: constant(bool(tx.transforms)))
