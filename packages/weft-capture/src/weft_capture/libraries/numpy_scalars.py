"""Scalars of NumPy, which are constants; torch loads NumPy where it is installed."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from weft_capture.library_traits import ScalarLibrary

_LARGE = ("uint64", "longdouble", "float128", "float96")
"""Numbers that no tensor of int64 or float64 holds."""


def numpy_scalar(tensor: torch.Tensor) -> Any:
    """Return the value of a 0-dim tensor as a scalar of NumPy."""
    return tensor.numpy()[()]


def numpy_is_quiet() -> bool:
    """Say whether NumPy raises no floating point errors."""
    return all(action in ("warn", "ignore") for action in sys.modules["numpy"].geterr().values())


def _raising() -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = sys.modules["numpy"].errstate(all="raise")
    return context


def _fits_tensor(number: Any) -> bool:
    dtype = getattr(number, "dtype", None)
    return dtype is not None and dtype.kind in "fiu" and dtype.name not in _LARGE


SCALARS = ScalarLibrary(
    _raising,
    numpy_is_quiet,
    _fits_tensor,
    numpy_scalar,
    frozenset(("dtype", "ndim", "shape", "size", "itemsize")),
    "numpy",
)
