"""What memory-bound kernels move a second, beside a plain copy of the same tensors.

    OMP_NUM_THREADS=2 python benchmarks/bandwidth.py

Bytes are those that have to move at least: every input and every output once. The results go to
memory that is there already, as the copy's do, so that the page faults of fresh memory hit
neither. The kernels take turns with the copy, once with tensors of 4 MB (they stay in the last
level cache) and once of 64 MB (they do not).
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import weft
from kernels import chain, measure
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

SIDES = {"4 MB": 1024, "64 MB": 4096}
# Each takes two square matrices (backwards: a gradient, and what the forward pass saved).
KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]] = {
    "x + y": torch.add,
    "pointwise chain": chain,
    "x + y.t": lambda x, y: x + y.t(),
    "softmax": lambda x, y: x.softmax(-1),
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[-1:], y[0], y[1]),
    "gelu": lambda x, y: F.gelu(x),
    "softmax backward": lambda x, y: aten._softmax_backward_data(x, y, -1, x.dtype),
    "layer norm backward": lambda x, y: aten.native_layer_norm_backward(
        x, y, x.shape[-1:], y[0][:, None], y[1][:, None], y[2], y[3], [True] * 3
    ),
    "gelu backward": lambda x, y: aten.gelu_backward(x, y),
    "row sums": lambda x, y: x.sum(1),
    "column sums": lambda x, y: x.sum(0),
}
# Those that read both matrices whole.
BINARY = {name for name in KERNELS if name.startswith("x + y") or "chain" in name}
BINARY |= {name for name in KERNELS if name.endswith("backward")}


def shares(side: int, rounds: int = 9) -> tuple[float, dict[str, float]]:
    """GB/s of the copy, and of each kernel, for float32 matrices of so many rows and columns."""
    x, y, out = (torch.randn(side, side) for _ in range(3))
    steps = {"copy": lambda: out.copy_(x)}
    moved = {"copy": 2 * x.nbytes}
    for name, fn in KERNELS.items():
        targets = [torch.empty_like(made) for made in tree_leaves(fn(x, y))]
        moved[name] = x.nbytes * (1 + (name in BINARY)) + sum(target.nbytes for target in targets)

        def into(x: Tensor, y: Tensor, *targets: Tensor, fn: Callable[..., Any] = fn) -> None:
            for target, made in zip(targets, tree_leaves(fn(x, y)), strict=True):
                target.copy_(made)

        compiled = weft.compile(into, options={"measure": False})
        steps[name] = lambda compiled=compiled, targets=targets: compiled(x, y, *targets)
    found = {name: moved[name] / took / 1e9 for name, took in measure(steps, rounds).items()}
    return found.pop("copy"), found


def main() -> None:
    """Print a table: a row a kernel, a pair of columns a size."""
    torch.set_grad_enabled(False)
    columns = {label: shares(side) for label, side in SIDES.items()}
    labels = [f"{label}: GB/s | of copy" for label in columns]
    print("| kernel | " + " | ".join(labels) + " |")
    print("|---" + "|--:|--:" * len(columns) + "|")
    print("| copy |" + "".join(f" {copy:.1f} | |" for copy, _ in columns.values()))
    for name in KERNELS:
        pairs = [(rates[name], rates[name] / copy) for copy, rates in columns.values()]
        print(f"| {name} |" + "".join(f" {rate:.1f} | {part:.0%} |" for rate, part in pairs))
    means = [statistics.geometric_mean([r / copy for r in rates.values()])
             for copy, rates in columns.values()]  # fmt: skip
    print("| geometric mean |" + "".join(f" | {mean:.0%} |" for mean in means))


if __name__ == "__main__":
    main()
