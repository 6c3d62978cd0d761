"""The C of ten small graphs, kept to be read: tests/golden/*.c.

After a wanted change run the tests with WEFT_UPDATE_GOLDEN=1 and read the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from weft_codegen.compile import make_program
from weft_codegen.kernels import emit_program

GOLDEN = Path(__file__).parent / "golden"


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


@pytest.mark.parametrize("name", GRAPHS)
def test_generated_c(name: str) -> None:
    function, inputs = GRAPHS[name]
    _, text = emit_program(make_program(fx.symbolic_trace(function), inputs))
    path = GOLDEN / f"{name}.c"
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
