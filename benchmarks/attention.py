"""Attention that programs spell out: time, and peak memory above what lived, with its gradients.

    python benchmarks/attention.py [--device cuda] [--length 512] [--torch]

Compares eager, weft as spelled out (`fuse_attention=False`), weft with the fused operator, and with
`--torch` torch.compile; 8 x 12 heads of width 64, bfloat16 on a GPU and float32 on the CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import weft
from loss_memory import peak, seconds
from torch import Tensor
from torch.nn import functional as F

BATCH, HEADS, WIDTH = 8, 12, 64


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Without a mask."""
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(WIDTH), -1) @ v


def buffered(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A causal mask in a buffer."""
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(WIDTH))
    return F.softmax(scores.masked_fill(mask == 0, float("-inf")), -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A causal mask that the program makes."""
    length = q.shape[-2]
    ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(WIDTH)
    scores = scores.masked_fill(ones.triu(1), torch.finfo(scores.dtype).min)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


SPELLINGS = {"plain": plain, "buffered mask": buffered, "causal": causal}


def measure(function: Any, args: argparse.Namespace, fused: bool, training: bool) -> str:
    """Milliseconds and MiB of a call, with its backward in training."""
    device = args.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = BATCH, HEADS, args.length, WIDTH
    tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=training)]
    tensors += [torch.randn_like(tensors[0], requires_grad=training) for _ in range(2)]
    mask = torch.ones(args.length, args.length, device=device).tril()

    def step() -> None:
        out = function(*tensors, mask)
        if training:
            torch.autograd.grad(out, tensors, out.detach())

    with weft.config.patch(fuse_attention="auto" if fused else False):
        for _ in range(8 if device == "cuda" else 2):
            step()
        most = peak(step, device)
        return f"{seconds(step, device, args.runs) * 1e3:9.2f} {most:8.0f}"


def main() -> None:
    """Print a table for each spelling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    compilers: dict[str, tuple[Callable[[Any], Any], bool]] = {
        "eager": (lambda function: function, False),
        "weft, spelled out": (weft.compile, False),
        "weft, fused": (weft.compile, True),
    }
    if args.torch:
        compilers["torch.compile"] = (torch.compile, False)
    for name, function in SPELLINGS.items():
        print(f"{name}, length {args.length}:   ms, MiB of inference   ms, MiB of training")
        for label, (compile_, fused) in compilers.items():
            weft.reset()
            cells = (measure(compile_(function), args, fused, kind) for kind in (False, True))
            print(f"  {label:24}", *cells, flush=True)


if __name__ == "__main__":
    main()
