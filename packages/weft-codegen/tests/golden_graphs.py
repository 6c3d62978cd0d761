"""Ten small graphs whose C is kept in golden/*.c: one idea each, in the order to read them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _pointwise(x: Tensor) -> Tensor:
    return (x * 2 + 1).relu() * x


def _bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (64,), w, b)


def _column_sum(x: Tensor) -> Tensor:
    return (x * x).sum(0)


def _total(x: Tensor) -> Tensor:
    return x.sum()


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x @ w + b)


def _transpose(x: Tensor) -> Tensor:
    return (x.t() + 1).contiguous()


def _concatenate(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y]) * 2


def _half(x: Tensor) -> Tensor:
    return x * 0.5 + 1


X = torch.zeros(32, 64)
ROW = torch.zeros(64)
GRAPHS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "pointwise": (_pointwise, (X,)),
    "bias_gelu": (_bias_gelu, (X, ROW)),
    "softmax": (_softmax, (X,)),
    "layer_norm": (_layer_norm, (X, ROW, ROW)),
    "column_sum": (_column_sum, (X,)),
    "total": (_total, (torch.zeros(1000, 1000),)),
    "linear": (_linear, (X, torch.zeros(64, 64), ROW)),
    "transpose": (_transpose, (X,)),
    "concatenate": (_concatenate, (X, X)),
    "half": (_half, (X.bfloat16(),)),
}
