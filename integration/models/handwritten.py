"""Models in plain PyTorch: each holds something that the transformers library's do not."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.case import Case

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class ResidualBlock(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        before = width // stride
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(before, width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Convolutions and BatchNorm, whose running statistics are mutated in training."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(
            ResidualBlock(width), ResidualBlock(2 * width, 2), ResidualBlock(4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A GPT on fused attention, with tied embeddings, returning its own loss."""

    def __init__(self, vocabulary: int = 512, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(GPTBlock(width, 6) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class RotaryBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        shape = (batch, length, self.heads, self.size)
        q, k, v = (f(h).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        scores = q @ k.transpose(-2, -1) / self.size**0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class HandLlama(nn.Module):
    """Rotary embedding, RMSNorm, SwiGLU and masked softmax attention, all written out."""

    def __init__(self, vocabulary: int = 512, width: int = 192, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(RotaryBlock(width, 4) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.size = width // 4

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        positions = torch.arange(tokens.shape[1], device=x.device, dtype=x.dtype)
        exponents = torch.arange(0, self.size, 2, device=x.device, dtype=x.dtype) / self.size
        angles = torch.outer(positions, 10000.0**-exponents).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class UnrolledCell(nn.Module):
    """An LSTM-like cell in a Python loop of 16 steps."""

    def __init__(self, width: int = 64, steps: int = 16) -> None:
        super().__init__()
        self.steps = steps
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = c = torch.zeros_like(x[:, 0])
        outputs = []
        for step in range(self.steps):
            i, f, g, o = (self.inner(x[:, step]) + self.outer(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, dim=1), c


class Branch(nn.Module):
    """Takes a dict, and branches on the value of a tensor in the middle."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.first(batch["x"]) + batch["bias"])
        if h.sum() > 0:
            y = self.second(h).relu()
        else:
            y = self.second(-h).sigmoid()
        return {"y": y, "h": h * 2}


class TinyMLP(nn.Module):
    """So small that what is measured is the cost of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class PointwiseChain(nn.Module):
    """Pointwise work, softmax and a norm on a large tensor: what fusion is for."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x * self.scale) + torch.sigmoid(x) * 0.5
        return self.norm(F.gelu(y) + x).softmax(dim=-1)


def _images() -> Inputs:
    return (torch.randn(8, 3, 32, 32),), {}


def _tokens_and_targets() -> Inputs:
    return tuple(torch.randint(0, 512, (4, 64)) for _ in range(2)), {}


def _tokens() -> Inputs:
    return (torch.randint(0, 512, (4, 64)),), {}


def _sequence() -> Inputs:
    return (torch.randn(16, 16, 64),), {}


def _batch() -> Inputs:
    return ({"x": torch.randn(8, 32), "bias": torch.ones(32)},), {}


HANDWRITTEN = (
    Case("resnet", ResNet, _images),
    Case("gpt", GPT, _tokens_and_targets),
    Case("hand_llama", HandLlama, _tokens),
    Case("unrolled_cell", UnrolledCell, _sequence),
    Case("branch", Branch, _batch, benchmark=False),
    Case("tiny_mlp", TinyMLP, lambda: ((torch.randn(4, 16),), {})),
    Case("pointwise", PointwiseChain, lambda: ((torch.randn(256, 512),), {})),
)
