"""Symbolic sizes and strides of fake tensors: which amounts of a tensor become which symbols."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import Source

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass(frozen=True)
class SizeSource(Source):
    """Where a symbolic size comes from, as a name; equal names are the same source."""

    text: str

    @property
    def name(self) -> str:
        """The printed form, such as ``L['x'].size()[0]``."""
        return self.text


def new_symint(
    shape_env: ShapeEnv, hint: int | None, name: str, *, duck: bool = True
) -> torch.SymInt | int:
    """A symbolic int for the value called `name` with example value `hint`.

    `duck` lets values with equal hints share a symbol. Hints 0 and 1 come back as plain ints,
    because broadcasting and emptiness give them a meaning of their own. Without a hint it is a
    size of which nothing is known but that it is neither, and which no node of a graph makes.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic  # noqa: PLC0415 - sympy

    if hint is None:
        size = shape_env.create_unbacked_symint()
        shape_env.pending_fresh_unbacked_symbols.clear()
        shape_env._constrain_range_for_size(size.node.expr, min=2)
        return size
    source = SizeSource(name)
    dynamic = DimDynamic.DUCK if duck else DimDynamic.DYNAMIC
    positive = True if hint >= 0 else None
    symbol = shape_env.create_symbol(hint, source, dynamic_dim=dynamic, positive=positive)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)


def limit(size: Any, least: int | None, greatest: int | None) -> None:
    """Tell a symbolic size that it lies in a range; None is no limit."""
    from torch.fx.experimental.symbolic_shapes import constrain_range  # noqa: PLC0415 - sympy

    constrain_range(size, min=least, max=greatest)


def packed_dims(tensor: torch.Tensor) -> list[tuple[int, bool]]:
    """Return the dimensions from the innermost out, and whether each lies densely on the last.

    The stride of such a dimension is the product of stride and size of the one before.
    """
    found, span = [], 1  # extent of the inner dimensions seen so far
    for dim in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d)):
        found.append((dim, tensor.stride(dim) == span))
        if tensor.stride(dim) > 0:
            span = tensor.stride(dim) * tensor.size(dim)
    return found


def symbolic_layout(
    tensor: torch.Tensor,
    shape_env: ShapeEnv,
    dims: Iterable[int],
    free_strides: Collection[int],
    name: str,
    unbacked: Collection[int],
) -> tuple[list[int | torch.SymInt], list[int | torch.SymInt]]:
    """Sizes with `dims` symbolic; strides as products of sizes wherever they are such products."""
    sizes: list[int | torch.SymInt] = [*tensor.shape]
    for dim in sorted(dims):
        hint = None if dim in unbacked else tensor.shape[dim]
        sizes[dim] = new_symint(shape_env, hint, f"{name}.size()[{dim}]")
    strides: list[int | torch.SymInt] = list(tensor.stride())
    span: int | torch.SymInt = 1
    for dim, packed in packed_dims(tensor):
        if dim in free_strides:
            label = f"{name}.stride()[{dim}]"
            strides[dim] = new_symint(shape_env, tensor.stride(dim), label, duck=False)
        elif packed:
            strides[dim] = span
        if tensor.stride(dim) > 0:
            span = strides[dim] * sizes[dim]
    return sizes, strides
