"""Python kernels of composite operators, which symbolic sizes need, where they differ from C++."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def correct_python_kernels() -> None:
    """Replace kernels whose results alias otherwise than those of C++."""
    keys = torch._C.DispatchKey
    for key in (keys.CompositeImplicitAutograd, keys.Autograd):
        aten.dropout.default.py_kernels[key] = _dropout
    aten.dropout.default._dispatch_cache.clear()


def _dropout(x: Any, p: float, train: bool | None) -> Any:
    return aten.native_dropout(x, p, train)[0] if train and p != 0 else x  # torch's copies it
