"""What memory-bound kernels move a second, beside a plain copy of the same tensors.

    OMP_NUM_THREADS=2 python benchmarks/bandwidth.py

Bytes are those that have to move at least: every input and every output once. The results go to
memory that is there already, as the copy's do, so that the page faults of fresh memory hit
neither. The kernels take turns with the copy, once with tensors of 4 MB (they stay in the last
level cache) and once of 64 MB (they do not).
"""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
import weft
from kernels import chain, measure
from torch import Tensor

SIDES = {"4 MB": 1024, "64 MB": 4096}
# Each takes two square matrices and the side; the result has the shape of one, or is smaller.
KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + y": torch.add,
    "pointwise chain": chain,
    "x + y.t": lambda x, y: x + y.t(),
    "softmax": lambda x, y: x.softmax(-1),
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[-1:], y[0], y[1]),
    "row sums": lambda x, y: x.sum(1),
    "column sums": lambda x, y: x.sum(0),
}
# Those that read both matrices whole.
BINARY = {"x + y", "pointwise chain", "x + y.t"}


def shares(side: int, rounds: int = 9) -> tuple[float, dict[str, float]]:
    """GB/s of the copy, and of each kernel, for float32 matrices of so many rows and columns."""
    x, y, out = (torch.randn(side, side) for _ in range(3))
    steps = {"copy": lambda: out.copy_(x)}
    moved = {"copy": 2 * x.nbytes}
    for name, fn in KERNELS.items():
        target = torch.empty_like(fn(x, y))
        moved[name] = x.nbytes * (1 + (name in BINARY)) + target.nbytes

        def into(x: Tensor, y: Tensor, target: Tensor, fn: Callable[..., Tensor] = fn) -> None:
            target.copy_(fn(x, y))

        compiled = weft.compile(into, options={"measure": False})
        steps[name] = lambda compiled=compiled, target=target: compiled(x, y, target)
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
