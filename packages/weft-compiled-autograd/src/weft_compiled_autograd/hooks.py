"""Calls of the user's Python from inside a captured backward: hooks and autograd.Functions.

These functions are nodes of the captured graph, so they run on every backward, with the objects
that this backward's autograd graph holds (the engine passes them in the `hooks` list). They enforce
what the rest of the graph assumes of a result: same size, type and strides as what it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from weft_core.inlinable import inlinable

Maybe = torch.Tensor | None


@inlinable
def call_hook(hook: Any, *values: Any, hook_type: str) -> Any:
    """Call a hook on its values; return what replaces the first of them.

    Args:
        hook: the user's callable.
        values: a gradient, a tuple of gradients, a variable, or packed data, as `hook_type` has it.
        hook_type: `tensor_pre_hook`, `pre_hook`, `post_hook`, `post_acc_grad_hook`, `unpack_hook`.

    Raises:
        RuntimeError: when a hook returns what the autograd engine would refuse.
    """
    result = hook(*values)
    if hook_type == "unpack_hook":
        return result
    if hook_type == "post_acc_grad_hook":
        if result is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")
        return None
    if result is None:
        result = values[0]
    if hook_type == "tensor_pre_hook":
        return _fitted(hook, result, values[0])
    items = result if isinstance(result, tuple) else (result,)
    if len(items) != len(values[0]):
        raise RuntimeError(
            f"hook '{_name(hook)}' has returned an incorrect number of values "
            f"(got {len(items)}, but expected {len(values[0])})"
        )
    return tuple(_fitted(hook, new, old) for new, old in zip(items, values[0], strict=True))


@inlinable
def _name(hook: Any) -> str:
    return getattr(hook, "__name__", "<unknown>")


@inlinable
def _fitted(hook: Any, new: Any, old: Maybe) -> Maybe:
    """Check a hook's result as the engine does, and give it the strides that the graph expects."""
    if old is None:
        if new is not None:
            raise RuntimeError("can't replace a None gradient with a non-None value")
        return None
    unchanged: bool = new is old
    if unchanged:
        return old
    _check(hook, new, old)
    return restride(new, old)


@inlinable
def _check(hook: Any, new: Any, old: torch.Tensor) -> None:
    if new is None:
        raise RuntimeError(f"hook '{_name(hook)}' has replaced a gradient with None")
    if not isinstance(new, torch.Tensor):
        raise TypeError("expected Variable, but hook returned '" + type(new).__name__ + "'")
    if new.shape != old.shape:
        raise RuntimeError(f"hook '{_name(hook)}' has changed the size of value")
    if new.dtype != old.dtype or new.device != old.device:
        raise RuntimeError(f"hook '{_name(hook)}' has changed the type of value")


@inlinable
def restride(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy of it, with the strides of `like`.

    A graph passes only dense gradients to hooks; where `like` is an expanded one, nothing depends
    on the strides of what replaces it.
    """
    if tensor.stride() == like.stride() or 0 in like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)


def call_cpp_hook(hook: int, grad: Maybe) -> Maybe:
    """Call a hook that lives in C++, by its number in the backward that runs now."""
    if grad is None:
        return None
    result: torch.Tensor = torch._C._dynamo.compiled_autograd.call_cpp_tensor_pre_hooks(hook, grad)
    return restride(result, grad)


class ContextView:
    """An autograd.Function's context whose saved tensors come from the captured graph.

    The engine has taken them out of the real context by the time the backward runs; everything
    else is read from and written to the real one.
    """

    @inlinable
    def __init__(self, real: Any, saved: Sequence[Maybe]) -> None:
        object.__setattr__(self, "_real", real)
        object.__setattr__(self, "saved_tensors", tuple(saved))

    @property
    def saved_variables(self) -> tuple[Maybe, ...]:
        """The old name of `saved_tensors`."""
        return self.saved_tensors  # type: ignore[no-any-return]

    @inlinable
    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @inlinable
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


class OmittedGradient(Exception):
    """An autograd.Function returned None for a gradient that the graph counts on.

    Args:
        out: what it returned.
        position: where the tape has the function.
        rest: the values that the tape needs from there on.
    """

    def __init__(self, out: tuple[Maybe, ...], position: int, rest: tuple[Any, ...]) -> None:
        super().__init__("an autograd.Function that leaves out a gradient")
        self.out, self.position, self.rest = out, position, rest


@inlinable
def call_backward(
    context: Any, saved: Sequence[Maybe], metadata: Sequence[Any], symints: Any, grads: Any
) -> tuple[Maybe, ...]:
    """Run the backward of a Python autograd.Function.

    Args:
        context: the real context.
        saved: the tensors it saved.
        metadata: (layout, device, dtype, size) of each forward input, None where it is no tensor.
        symints: sizes that the function lifted; it reads them from its context.
        grads: the gradients of its outputs.

    Returns:
        One gradient per forward input, None where there is none.

    Raises:
        RuntimeError: for a wrong number of gradients, in the engine's words.
    """
    cls = context._forward_cls
    vjp = cls.vjp is not torch.autograd.Function.vjp
    function = cls.vjp if vjp else cls.backward
    result = function(ContextView(context, saved), *grads)
    out = list(result) if isinstance(result, (tuple, list)) else [result]
    while len(out) > len(metadata) and out[-1] is None:
        out.pop()
    if len(out) != len(metadata):
        raise RuntimeError(
            f"function {type(context).__name__} returned an incorrect number of gradients "
            f"(expected {len(metadata)}, got {len(out)})"
        )
    for position, (grad, meta) in enumerate(zip(out, metadata, strict=True)):
        if meta is None and grad is not None:
            raise RuntimeError(
                f"function {type(context).__name__} returned a gradient different from None at "
                f"position {position + 1}, but the corresponding forward input was not a Variable"
            )
    return tuple(out)


@inlinable
def call_backward_dense(
    context: Any,
    saved: Sequence[Maybe],
    metadata: Sequence[Any],
    symints: Any,
    grads: Any,
    position: int,
    rest: tuple[Any, ...],
) -> tuple[Maybe, ...]:
    """`call_backward` with results that a graph can rely on: full size, own dtype, contiguous.

    Raises:
        OmittedGradient: where the function gave None for an input that needs a gradient.
    """
    out = call_backward(context, saved, metadata, symints, grads)
    for grad, needed in zip(out, context.needs_input_grad, strict=True):
        if grad is None and needed:
            raise OmittedGradient(out, position, rest)
    return tuple(
        None if meta is None or grad is None else _dense(grad, meta)
        for grad, meta in zip(out, metadata, strict=True)
    )


@inlinable
def _dense(grad: Any, meta: tuple[Any, ...]) -> torch.Tensor:
    _, _, dtype, size = meta
    if grad.shape != tuple(size):
        grad = grad.sum_to_size(tuple(size))
    dense: torch.Tensor = grad.to(dtype).contiguous()
    return dense
