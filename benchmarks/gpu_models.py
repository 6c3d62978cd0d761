"""Models of the sizes that people train, with random weights, for gpu.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Fused attention of a row of heads, causal or not, with rotary positions where asked for."""

    def __init__(self, width: int, heads: int, causal: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        """x: (batch, length, width); rotary: (2, length, width of a head)."""
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn pairs of x's last dimension by the angles whose cosines and sines are given."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * rotary[0] + turned * rotary[1]).to(x.dtype)


def angles(length: int, width: int) -> Tensor:
    """Cosines and sines of rotary positions: (2, length, width)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    turns = torch.arange(length)[:, None] * torch.cat([frequencies, frequencies])
    return torch.stack([turns.cos(), turns.sin()])


class GeluBlock(nn.Module):
    """A block of GPT-2, BERT (norms after) and ViT."""

    def __init__(self, width: int, heads: int, causal: bool, after: bool) -> None:
        super().__init__()
        self.attention, self.after = Attention(width, heads, causal, bias=True), after
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mlp(self, x: Tensor) -> Tensor:
        """Two products with a GELU between."""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, width)."""
        if self.after:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class RmsNorm(nn.Module):
    """Llama's norm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., width)."""
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, True) + 1e-5).rsqrt()).to(x.dtype)


class SwigluBlock(nn.Module):
    """A block of Llama."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=True, bias=False)
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """x: (batch, length, width)."""
        x = x + self.attention(self.norm1(x), rotary)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """GPT-2's, BERT's and ViT's skeleton: tokens or patches in, the loss out."""

    def __init__(
        self, width: int, heads: int, layers: int, tokens: int, kind: str, length: int
    ) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(tokens, width)
        if kind == "vit":
            self.embed = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.randn(1, length, width) * 0.02)
        causal, after = kind == "gpt", kind == "bert"
        self.blocks = nn.Sequential(
            *(GeluBlock(width, heads, causal, after) for _ in range(layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length) int64, or (batch, 3, height, width)."""
        h = self.embed(x)
        h = h.flatten(2).transpose(1, 2) if self.kind == "vit" else h
        logits = self.head(self.norm(self.blocks(h + self.place)))
        if self.kind == "vit":
            return logits.mean(1).float().square().mean()
        targets = x if self.kind == "bert" else x.roll(-1, 1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Llama(nn.Module):
    """Blocks of Llama over tokens, and the loss of the next ones."""

    def __init__(self, width: int, heads: int, layers: int, hidden: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
        self.blocks = nn.ModuleList(SwigluBlock(width, heads, hidden) for _ in range(layers))
        self.norm = RmsNorm(width)
        self.register_buffer("rotary", angles(2048, width // heads))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (batch, length) int64."""
        h, rotary = self.embed(ids), self.rotary[:, : ids.shape[1]]
        for block in self.blocks:
            h = block(h, rotary)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())


class Decoder(Llama):
    """Llama with a static key and value cache: one token in, the logits of the next out."""

    def __init__(self, *sizes: int, batch: int = 1, length: int = 512) -> None:
        super().__init__(*sizes)
        width, heads, layers = sizes[:3]
        for k in range(2 * layers):  # keys and values of each layer
            self.register_buffer(f"cache{k}", torch.zeros(batch, heads, length, width // heads))

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """ids: (batch, 1) int64; position: (1,) int64."""
        h, rotary = self.embed(ids), self.rotary[:, position]
        seen = torch.arange(self.cache0.shape[-2], device=ids.device)[None] <= position[:, None]
        for k, block in enumerate(self.blocks):
            caches = getattr(self, f"cache{2 * k}"), getattr(self, f"cache{2 * k + 1}")
            h = h + self._attend(block.attention, block.norm1(h), rotary, caches, position, seen)
            h = h + block.mlp(block.norm2(h))
        return self.head(self.norm(h))

    @staticmethod
    def _attend(
        layer: Attention, x: Tensor, rotary: Tensor, caches: tuple[Tensor, Tensor],
        position: Tensor, seen: Tensor,
    ) -> Tensor:  # fmt: skip
        batch, length, width = x.shape
        q, k, v = layer.qkv(x).view(batch, length, 3, layer.heads, -1).permute(2, 0, 3, 1, 4)
        keys = caches[0].index_copy_(2, position, rotate(k, rotary))
        values = caches[1].index_copy_(2, position, v)
        mixed = F.scaled_dot_product_attention(rotate(q, rotary), keys, values, attn_mask=seen)
        return layer.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Bottleneck(nn.Module):
    """ResNet-50's block."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([
            nn.Conv2d(before, width, 1, bias=False),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.Conv2d(width, 4 * width, 1, bias=False),
        ])  # fmt: skip
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, 4 * width))
        self.skip = nn.Identity()
        if stride > 1 or before != 4 * width:
            self.skip = nn.Sequential(
                nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, channels, height, width)."""
        h = x
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = norm(conv(h))
            h = F.relu(h) if k < 2 else h
        return F.relu(h + self.skip(x))


class ResNet50(nn.Module):
    """ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        blocks, before = [], 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for k in range(count):
                blocks.append(Bottleneck(before, width, 2 if k == 0 and width > 64 else 1))
                before = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(before, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 3, height, width)."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3))).float().square().mean()


class UNet(nn.Module):
    """A diffusion model's network: residual blocks with group norms, down and up, with skips."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, width, 3, 1, 1), nn.Conv2d(width, 4, 3, 1, 1)
        sizes = [width, 2 * width, 4 * width]
        pairs = list(itertools.pairwise(sizes))
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairs)
        self.up = nn.ModuleList(self._block(2 * b, a) for a, b in reversed(pairs))

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        norms = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        convs = nn.Conv2d(before, after, 3, 1, 1), nn.Conv2d(after, after, 3, 1, 1)
        return nn.Sequential(norms[0], nn.SiLU(), convs[0], norms[1], nn.SiLU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 4, height, width)."""
        h, skips = self.first(x), []
        for block in self.down:
            h = block(h)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        for block in self.up:
            h = F.interpolate(h, scale_factor=2.0)
            h = block(torch.cat([h, skips.pop()], 1))
        return self.last(h).float().square().mean()


class Recurrent(nn.Module):
    """A hand-written gated cell over a sequence."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (length, batch, width)."""
        h = torch.zeros_like(x[0])
        for step in x:
            reset, update, new = self.gates(torch.cat([step, h], 1)).chunk(3, 1)
            h = h + (torch.tanh(new + reset.sigmoid() * h) - h) * update.sigmoid()
        return h.float().square().mean()


@dataclass(frozen=True)
class Row:
    """A model, what it is given on the GPU, and whether it trains."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    trains: bool = True
    dtype: torch.dtype | None = None  # of the weights; None: float32 under autocast to bfloat16


def _ids(tokens: int, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, tokens, shape, device="cuda"),)


def _decoder(batch: int) -> Row:
    return Row(
        lambda: Decoder(1536, 12, 16, 4096, 32000, batch=batch),
        lambda: (*_ids(32000, batch, 1)(), torch.tensor([200], device="cuda")),
        trains=False, dtype=torch.bfloat16,
    )  # fmt: skip


ROWS: dict[str, Row] = {
    "gpt2-124m": Row(lambda: Transformer(768, 12, 12, 50304, "gpt", 1024), _ids(50304, 8, 1024)),
    "gpt2-50257": Row(  # as published: no multiple of eight
        lambda: Transformer(768, 12, 12, 50257, "gpt", 1024), _ids(50257, 8, 1024)
    ),
    "llama-0.2b": Row(lambda: Llama(1024, 16, 12, 2816, 32000), _ids(32000, 4, 1024)),
    "llama-small": Row(
        lambda: Llama(512, 8, 4, 1408, 8000), _ids(8000, 4, 256), dtype=torch.float32
    ),
    "bert-base": Row(lambda: Transformer(768, 12, 12, 30528, "bert", 256), _ids(30528, 16, 256)),
    "vit-b": Row(
        lambda: Transformer(768, 12, 12, 1000, "vit", 196),
        lambda: (torch.randn(32, 3, 224, 224, device="cuda"),),
    ),
    "resnet-50": Row(ResNet50, lambda: (torch.randn(64, 3, 224, 224, device="cuda"),)),
    "unet": Row(UNet, lambda: (torch.randn(4, 4, 64, 64, device="cuda"),)),
    "recurrent": Row(Recurrent, lambda: (torch.randn(32, 64, 512, device="cuda"),)),
    "decode-1": _decoder(1),
    "decode-8": _decoder(8),
}  # fmt: skip
