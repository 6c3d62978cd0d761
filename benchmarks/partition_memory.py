"""Bytes that live from forward to backward: weft's cut, torch's min-cut, and eager autograd.

    python benchmarks/partition_memory.py

Inputs and parameters do not count, they live anyway; tensors that share memory count once.
"""

from collections.abc import Callable
from typing import Any

import torch
import weft_codegen
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from weft_aot import aot_compile


class Block(nn.Module):
    """A GPT block with attention, layer norms and a GELU feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(batch, time, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gated(nn.Module):
    """RMS norm and a SwiGLU feed-forward, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class ResidualConv(nn.Module):
    """Two convolutions with batch norm in training mode."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(h)))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gpt block x2": (lambda: nn.Sequential(Block(192, 6), Block(192, 6)), (8, 64, 192)),
    "swiglu x2": (lambda: nn.Sequential(Gated(128), Gated(128)), (8, 64, 128)),
    "res conv x2": (lambda: nn.Sequential(ResidualConv(32), ResidualConv(32)), (8, 32, 16, 16)),
    "mlp softmax": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Softmax(-1)),
        (128, 64),
    ),
}


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd saves while it is active."""

    def __init__(self, free: list[torch.Tensor]) -> None:
        self.seen = {t.untyped_storage().data_ptr() for t in free}
        self.total = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def measure(program: Callable[..., Any], inputs: list[torch.Tensor]) -> int:
    """Bytes saved by one forward call."""
    saved = SavedBytes(inputs)
    with saved:
        result = program(*inputs)  # kept until here: freed memory could be counted as another's
    del result
    return saved.total


def main() -> None:
    """Print one row per case."""
    print(f"{'case':14} {'eager':>10} {'torch':>10} {'weft':>10}  weft / torch")
    for name, (make, shape) in CASES.items():
        torch.manual_seed(0)
        model, x = make(), torch.randn(shape)
        names = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
        inputs = [x, *model.parameters(), *model.buffers()]

        def program(*flat: torch.Tensor, model: nn.Module = model, names: Any = names) -> Any:
            named = dict(zip(names, flat[1:], strict=True))
            return (torch.func.functional_call(model, named, flat[:1]),)

        graph = fx.Graph()
        placeholders = [graph.placeholder(f"a{i}") for i in range(len(inputs))]
        graph.output(graph.call_function(program, tuple(placeholders)))
        ours = aot_compile(
            fx.GraphModule({}, graph),
            inputs,
            fw_compiler=lambda gm, _: gm.forward,
            decompositions=weft_codegen.decompositions(),
        )
        theirs = aot_function(
            program,
            fw_compiler=lambda gm, _: gm.forward,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        eager, torch_cut, weft_cut = (measure(fn, inputs) for fn in (program, theirs, ours))
        ratio = weft_cut / torch_cut
        print(f"{name:14} {eager:10,} {torch_cut:10,} {weft_cut:10,}  {ratio:.2f}")


if __name__ == "__main__":
    main()
