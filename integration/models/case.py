"""One model of the zoo: how to make it, what to call it with, and what to make a loss of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Case:
    """A model and its inputs.

    Args:
        name: the name in tables.
        make_model: makes the module, float32; called under a fixed seed.
        make_inputs: makes positional and keyword arguments; called under a fixed seed.
        benchmark: whether the case belongs in the table of figures.
        train: whether training it makes sense.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    benchmark: bool = True
    train: bool = True

    def model(self, dtype: torch.dtype = torch.float32, *, training: bool = False) -> nn.Module:
        """Return the module with the same weights every time."""
        torch.manual_seed(0)
        return self.make_model().train(training).to(dtype)

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)`, the same every time; floating-point tensors in `dtype`."""
        torch.manual_seed(1)

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        return pytree.tree_map(cast, self.make_inputs())


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in any output: a tensor, a tuple, a dict, a ModelOutput."""
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [t for part in output for t in tensors_of(part)]
    is_float = isinstance(output, torch.Tensor) and output.is_floating_point()
    return [output] if is_float else []


def loss_of(output: Any) -> torch.Tensor:
    """Return a scalar that depends on every element of the output."""
    return sum((t * t).mean() + t.mean() for t in tensors_of(output))
