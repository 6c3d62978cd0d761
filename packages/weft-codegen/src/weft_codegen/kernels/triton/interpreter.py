"""libdevice for Triton's interpreter, which has no extern functions: NumPy on the lanes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

_NUMPY: dict[str, Callable[..., Any]] = {
    "rint": np.rint,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "erfc": np.vectorize(math.erfc, otypes=[np.float64]),
}
"""Functions that NumPy calls otherwise, or does not have."""


class InterpretedLibdevice:
    """A namespace with libdevice's names."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _NUMPY.get(name) or getattr(np, name)

        def on_lanes(*args: Any) -> Any:
            first = args[0]
            with np.errstate(all="ignore"):
                data = function(*(arg.handle.data for arg in args))
            handle = type(first.handle)(data.astype(first.handle.data.dtype), first.handle.dtype)
            return tl.core.tensor(handle, first.type)

        return on_lanes
