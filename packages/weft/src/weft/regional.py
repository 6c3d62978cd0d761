"""Compile the blocks that a model repeats, instead of the whole model."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from weft.api import Arguments, compile


def compile_repeated_blocks(model: nn.Module, **arguments: Unpack[Arguments]) -> nn.Module:
    """Compile, in place, each module whose class a container of the model repeats.

    Blocks of one class share what is compiled, so that the compile time does not grow with their
    number. What is between the blocks runs eagerly.

    Args:
        model: its `_repeated_blocks` (diffusers), a list of names of classes, says which they are;
            else all modules are taken that a `ModuleList` or `Sequential` has twice or more.
        arguments: those of `compile`.

    Returns:
        The model.

    Raises:
        ValueError: nothing in it is repeated.
    """
    names = set(getattr(model, "_repeated_blocks", None) or ())
    blocks = (
        [m for m in model.modules() if type(m).__name__ in names] if names else _in_lists(model)
    )
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no repeated blocks")
    for block in blocks:
        inner: Any = block
        inner._compiled_call_impl = compile(inner._call_impl, **arguments)
    return model


def _in_lists(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that containers repeat."""
    found: list[nn.Module] = []
    for child in model.children():
        kinds = [type(block) for block in child.children()]
        of_container = isinstance(child, nn.ModuleList | nn.Sequential)
        repeated = [b for b in child.children() if kinds.count(type(b)) > 1 and [*b.parameters()]]
        if of_container and repeated:
            found += repeated
        else:
            found += _in_lists(child)
    return found
