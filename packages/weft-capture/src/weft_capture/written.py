"""What an operation that writes to fake tensors changes of them, to be put back with its step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from weft_core.versions import version_of

State = tuple[torch.Tensor, int, bool]
"""A fake, how often it was written, and whether it requires grad."""


def states(values: Iterable[Any]) -> list[State]:
    """Return the states of the tensors among values, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append((value, version_of(value), value.requires_grad))
        elif isinstance(value, list | tuple):
            found += states(value)
    return found


def restore(before: list[State]) -> None:
    """Put tensors back; a view whose base has a history now keeps that."""
    for one, version, requires_grad in before:
        if one.requires_grad and not requires_grad:
            with suppress(RuntimeError):
                _ = one.requires_grad_(False) if one.is_leaf else one.detach_()
        if version_of(one) != version:
            torch._C._autograd._unsafe_set_version_counter((one,), (version,))
