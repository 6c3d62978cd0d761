"""weft on an NVIDIA GPU beside eager and torch.compile, in turn.

    python benchmarks/gpu.py [--only NAME ...]

Models: seconds to the first training step (caches as they are), and milliseconds of a training step
and of inference. Patterns: what a kernel moves a second. A star: mode="reduce-overhead".
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import weft
from torch import nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

Make = Callable[[], torch.Tensor]


class Block(nn.Module):
    """A transformer's block, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, length, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    """Blocks over tokens; the loss of the next ones."""

    def __init__(self, tokens: int = 8000, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, length) int64."""
        logits = self.head(self.norm(self.blocks(self.embed(ids))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Residual(nn.Module):
    """Two convolutions with batch norms, and what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        norms = [nn.BatchNorm2d(channels) for _ in range(2)]
        self.body = nn.Sequential(layers[0], norms[0], nn.ReLU(), layers[1], norms[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, channels, height, width)."""
        return F.relu(x + self.body(x))


def _images() -> nn.Module:
    blocks = (Residual(64) for _ in range(4))
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.Flatten(2))


def _mlp() -> nn.Module:
    layers = (nn.Linear(1024, 1024), nn.SiLU(), nn.Linear(1024, 1024), nn.SiLU())
    return nn.Sequential(*layers, nn.Linear(1024, 16), nn.Softmax(-1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "gpt": (Gpt, lambda: torch.randint(0, 8000, (8, 512), device="cuda")),
    "convolutions": (_images, lambda: torch.randn(32, 3, 64, 64, device="cuda")),
    "mlp": (_mlp, lambda: torch.randn(256, 1024, device="cuda")),
}
ROWS = (16384, 4096)
PATTERNS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "gelu": (F.gelu, [ROWS]),
    "softmax": (lambda x: torch.softmax(x, -1), [ROWS]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4096,), w, b), [ROWS, (4096,), (4096,)]),
    "x + y.t": (lambda x, y: x + y.t(), [(8192, 8192), (8192, 8192)]),
    "sum of columns": (lambda x: x.sum(0), [ROWS]),
    "sum of odd columns": (lambda x: x.sum(0), [(16383, 4099)]),
    "sum": (lambda x: x.sum(), [ROWS]),
    "chain": (lambda x, y: (x * y).sin() + x.exp() * 2, [ROWS, ROWS]),
    "batch norm, relu": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True).relu(),
        [(64, 64, 112, 112), (64,), (64,)],
    ),
    "cat, relu": (lambda x, y: torch.cat([x, y], 1).relu(), [(16384, 2048), (16384, 2048)]),
}
COMPILERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda program: program,
    "weft": weft.compile,
    "torch": torch.compile,
    "weft*": partial(weft.compile, mode="reduce-overhead"),
    "torch*": partial(torch.compile, mode="reduce-overhead"),
}


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward, from no gradients on."""
    model.zero_grad()
    loss = model(x)
    loss = loss if loss.dim() == 0 else loss.square().mean()
    loss.backward()
    return loss.detach()


def milliseconds(run: Callable[[], Any]) -> float:
    """The median time of a call among many, launches included."""
    return float(
        Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=0.4).median * 1e3
    )


def models(only: list[str]) -> None:
    """Print a row a model and compiler."""
    print("model          compiler  first step s  training ms  inference ms  loss off")
    for name in [name for name in MODELS if not only or name in only]:
        weft.reset()  # another model's sizes would make these dynamic
        torch.compiler.reset()
        make, data = MODELS[name]
        torch.manual_seed(0)
        model, x = make().cuda(), data()
        expected = step(copy.deepcopy(model), x)
        for compiler, compile_ in COMPILERS.items():
            copied = copy.deepcopy(model)
            compiled = compile_(copied)
            began = time.perf_counter()
            off = float((step(compiled, x) - expected).abs())
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            training = milliseconds(lambda compiled=compiled, x=x: step(compiled, x))
            with torch.no_grad():
                inference = milliseconds(lambda compiled=compiled, x=x: compiled(x))
            cells = f"{first:12.2f} {training:12.3f} {inference:13.3f}  {off:.1e}"
            print(f"{name:14} {compiler:9} {cells}")


def patterns(only: list[str]) -> None:
    """Print a row a pattern: GB/s by compiler (inputs read once, the result written once)."""
    source = torch.randn(ROWS, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6
    print(f"\nGB/s (a copy: {copied:.0f})   " + "  ".join(f"{name:>6}" for name in COMPILERS))
    for name in [name for name in PATTERNS if not only or name in only]:
        function, shapes = PATTERNS[name]
        inputs = [torch.randn(shape, device="cuda") for shape in shapes]
        expected = function(*inputs)
        moved = sum(t.nbytes for t in (*inputs, expected))
        cells = []
        for compile_ in COMPILERS.values():
            compiled = compile_(function)
            torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-4, atol=1e-1)
            cells.append(moved / milliseconds(lambda run=compiled, xs=inputs: run(*xs)) / 1e6)
        print(f"{name:22} " + "  ".join(f"{cell:6.0f}" for cell in cells))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    only = parser.parse_args().only
    models(only)
    patterns(only)


if __name__ == "__main__":
    main()
