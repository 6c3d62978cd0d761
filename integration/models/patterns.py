"""Single patterns rather than models: what a fused kernel, or the cost of a call, decides alone."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.case import Case

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Chain(nn.Module):
    """Pointwise operators only, with a scale to train."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = (x * self.scale + y).relu() * 0.5 - y
        return torch.sigmoid(z.clamp(-2, 2)) * x


class Norms(nn.Module):
    """softmax and layer norm along rows, then reductions along columns."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.norm(x).softmax(dim=-1)
        return y.sum(0), (x * y).mean(0), x.amax(0)


class MLP(nn.Module):
    """Linear, GELU, layer norm, linear: every layer as wide as the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


def _matrices(*shape: int, count: int = 1) -> Inputs:
    return tuple(torch.randn(shape) for _ in range(count)), {}


PATTERNS = (
    Case("chain_1024", Chain, lambda: _matrices(1024, 1024, count=2)),
    Case("norms_1024", Norms, lambda: _matrices(1024, 1024)),
    Case("mlp_64x256", lambda: MLP(256), lambda: _matrices(64, 256)),
    Case("mlp_4x32", lambda: MLP(32), lambda: _matrices(4, 32)),
)
