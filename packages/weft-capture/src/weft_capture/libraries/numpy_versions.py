"""Functions of NumPy in torch, where those of `torch._numpy` give other results."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def _sign(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), x, x.sign())


def _angle(z: torch.Tensor, deg: bool = False) -> torch.Tensor:
    parts = (z.imag, z.real) if z.is_complex() else (torch.zeros_like(z), z)
    return torch.atan2(*parts).rad2deg() if deg else torch.atan2(*parts)


def _quantile(
    a: torch.Tensor, q: Any, axis: Any = None, *, keepdims: bool = False, of: int = 1
) -> torch.Tensor:
    dtype = torch.float64 if isinstance(q, list | tuple) else a.dtype  # as NumPy's arrays of levels
    levels = torch.as_tensor(q, dtype=dtype) / of
    return torch.quantile(a.to(dtype), levels, axis, keepdim=keepdims)


def _percentile(a: torch.Tensor, q: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _quantile(a, q, *args, of=100, **kwargs)


def _median(a: torch.Tensor, axis: Any = None, *, keepdims: bool = False) -> torch.Tensor:
    return _quantile(a, 0.5, axis, keepdims=keepdims)


VERSIONS: dict[str, Callable[..., Any]] = {
    "sign": _sign,
    "angle": _angle,
    "median": _median,
    "quantile": _quantile,
    "percentile": _percentile,
}
"""Name -> a function of plain tensors; others differ for NaN, -0, in rounding, or in shape."""


@functools.cache
def target_of(path: str) -> Callable[..., Any]:
    """Return the function of `torch._numpy` on plain tensors, for a node of the graph."""

    if path.startswith("fft."):
        return _transform(getattr(torch.fft, path[4:]))
    if path in VERSIONS:
        return VERSIONS[path]

    def call(*args: Any, **kwargs: Any) -> Any:
        tnp: Any = importlib.import_module("torch._numpy")  # only where NumPy is used
        arguments = tree_map_only(torch.Tensor, tnp.ndarray, (args, kwargs))
        result = operator.attrgetter(path)(tnp)(*arguments[0], **arguments[1])
        return tree_map_only(tnp.ndarray, operator.attrgetter("tensor"), result)

    call.__name__ = call.__qualname__ = f"numpy_{path.replace('.', '_')}"
    return call


def _transform(function: Any) -> Callable[..., Any]:
    """Return a Fourier transform of torch, which keeps the precision as NumPy 2 does."""
    wide = {"dtype": torch.float64} if "freq" in function.__name__ else {}

    def call(*args: Any, **kwargs: Any) -> Any:
        renamed = {"dim" if name[:2] == "ax" else name: value for name, value in kwargs.items()}
        return function(*args, **renamed, **wide).resolve_conj()  # which NumPy does not know

    return call
