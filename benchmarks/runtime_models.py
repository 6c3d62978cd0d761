"""Models that runtimes.py measures: the widths of deployed models, few layers, random weights."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class First(nn.Module):
    """A model of transformers whose first output alone is of interest."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, return_dict=False)[0]


def _library(model: str, config: str, **settings: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    made = getattr(library, config)(**settings)
    path, _, name = model.rpartition(".")
    holder = importlib.import_module(f"transformers.models.{path}") if path else library
    return First(getattr(holder, name)(made))


def _tokens(batch: int, length: int = 128) -> tuple[torch.Tensor]:
    return (torch.randint(0, 1000, (batch, length)),)


def bert(layers: int, batch: int) -> Made:
    """BERT base's layers over 128 tokens."""
    model = _library("BertModel", "BertConfig", vocab_size=1000, num_hidden_layers=layers)
    return model, _tokens(batch)


def vit(layers: int, batch: int) -> Made:
    """ViT-B/16's layers over one picture of 224 by 224."""
    model = _library("ViTModel", "ViTConfig", num_hidden_layers=layers)
    return model, (torch.randn(batch, 3, 224, 224),)


def resnet(layers: int, batch: int) -> Made:
    """ResNet-50's stages with at most so many bottlenecks each."""
    depths = [min(layers, depth) for depth in (3, 4, 6, 3)]
    return _library("ResNetModel", "ResNetConfig", depths=depths), (
        torch.randn(batch, 3, 224, 224),
    )


def t5(layers: int, batch: int) -> Made:
    """T5 base's encoder layers over 128 tokens."""
    model = _library(
        "T5EncoderModel", "T5Config", vocab_size=1000, d_model=768, d_ff=3072, num_heads=12,
        num_layers=layers, use_cache=False,
    )  # fmt: skip
    return model, _tokens(batch)


def llama(layers: int, batch: int) -> Made:
    """Llama's layers (grouped heads, rotary positions, SwiGLU) over a prompt of 128 tokens."""
    model = _library(
        "LlamaModel", "LlamaConfig", vocab_size=1000, hidden_size=1024, intermediate_size=2816,
        num_attention_heads=16, num_key_value_heads=4, num_hidden_layers=layers, use_cache=False,
    )  # fmt: skip
    return model, _tokens(batch)


def whisper(layers: int, batch: int) -> Made:
    """Whisper base's encoder layers over 30 seconds of sound."""
    model = _library(
        "whisper.modeling_whisper.WhisperEncoder", "WhisperConfig", d_model=512,
        encoder_layers=layers, encoder_attention_heads=8, encoder_ffn_dim=2048,
    )  # fmt: skip
    return model, (torch.randn(batch, 80, 3000),)


class _Block(nn.Module):
    """GroupNorm, SiLU and convolution, twice, with a shortcut."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, before), nn.GroupNorm(8, width)
        self.conv1 = nn.Conv2d(before, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Conv2d(before, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(y))) + self.shortcut(x)


class UNet(nn.Module):
    """Three resolutions down and up again, with attention at the lowest."""

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        sizes = (width, 2 * width, 4 * width)
        pairs = list(itertools.pairwise(sizes))
        self.down = nn.ModuleList(_Block(before, after) for before, after in pairs)
        self.middle = nn.ModuleList(_Block(sizes[-1], sizes[-1]) for _ in range(layers))
        self.qkv, self.out = (
            nn.Conv2d(sizes[-1], 3 * sizes[-1], 1),
            nn.Conv2d(sizes[-1], sizes[-1], 1),
        )
        self.up = nn.ModuleList(_Block(2 * after, before) for before, after in pairs[::-1])

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, high, wide = x.shape
        parts = self.qkv(x).view(batch, 3, 4, width // 4, high * wide).transpose(-1, -2)
        y = F.scaled_dot_product_attention(*parts.unbind(1))
        return x + self.out(y.transpose(-1, -2).reshape(batch, width, high, wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.middle:
            x = self._attend(block(x))
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.head(x)


def unet(layers: int, batch: int) -> Made:
    """A UNet of diffusion models on 32 by 32 latents."""
    return UNet(layers), (torch.randn(batch, 4, 32, 32),)


def tiny_mlp(layers: int, batch: int) -> Made:
    """Two small layers: the cost of a call."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (torch.randn(batch, 16),)


class Step(nn.Module):
    """One step of a recurrent model."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return self.head(h), h


def recurrent(layers: int, batch: int) -> Made:
    """One step of a GRU and a linear layer."""
    return Step(), (torch.randn(batch, 32), torch.randn(batch, 64))


class Tabular(nn.Module):
    """Columns of categories and of numbers, as recommenders and forecasts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100, 8) for _ in range(12))
        self.layers = nn.Sequential(
            nn.Linear(12 * 8 + 13, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 1), nn.Sigmoid()
        )

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        columns = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        return self.layers(torch.cat([*columns, numbers], 1))


def tabular(layers: int, batch: int) -> Made:
    """Twelve embeddings and thirteen numbers through a small MLP."""
    return Tabular(), (torch.randint(0, 100, (batch, 12)), torch.randn(batch, 13))


MODELS: dict[str, Callable[[int, int], Made]] = {
    make.__name__: make
    for make in (bert, vit, resnet, t5, llama, whisper, unet, tiny_mlp, recurrent, tabular)
}


def make(name: str, layers: int, batch: int) -> Made:
    """A model in evaluation mode and its inputs, the same every time."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](layers, batch)
    return model.eval(), inputs
