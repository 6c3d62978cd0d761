"""Python kernels of composite operators, which symbolic sizes need, where they differ from C++."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def correct_python_kernels() -> None:
    """Replace kernels whose results alias, or have gradients, otherwise than those of C++."""
    keys = torch._C.DispatchKey
    for key in (keys.CompositeImplicitAutograd, keys.Autograd):
        aten.dropout.default.py_kernels[key] = _dropout
    aten.dropout.default._dispatch_cache.clear()
    for shrink in (aten.hardshrink.default, aten.softshrink.default):
        if shrink.py_kernels.pop(keys.Autograd, None):  # it makes 0 * inf of gradients
            shrink._dispatch_cache.clear()
    lstm = aten.lstm.input.py_kernels[keys.CompositeImplicitAutograd]
    if lstm is not _lstm:
        _TORCHS["lstm"] = lstm
        aten.lstm.input.py_kernels[keys.CompositeImplicitAutograd] = _lstm
        aten.lstm.input._dispatch_cache.clear()
    matmul = aten.matmul.default.py_kernels[keys.CompositeImplicitAutograd]
    if matmul is not _matmul:
        _TORCHS["matmul"] = matmul
        aten.matmul.default.py_kernels[keys.CompositeImplicitAutograd] = _matmul
        aten.matmul.default._dispatch_cache.clear()


_TORCHS: dict[str, Any] = {}


def _dropout(x: Any, p: float, train: bool | None) -> Any:
    return aten.native_dropout(x, p, train)[0] if train and p != 0 else x  # torch's copies it


def _lstm(x: torch.Tensor, hidden: Any, weights: Any, *rest: Any) -> Any:
    """One operator a layer where eager has one: torch's steps would fix how many there are."""
    from weft_core import adapters, lstm  # noqa: PLC0415 - rarely needed

    supported = lstm.supports(x, hidden, weights)
    return (adapters.run_lstm if supported else _TORCHS["lstm"])(x, hidden, weights, *rest)


def _matmul(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _TORCHS["matmul"](one, other)
    # torch's returns a view of a product of other sizes, which nobody knows of.
    return aten._unsafe_view(product._base, product.shape) if product._is_view() else product
