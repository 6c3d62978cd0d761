"""A GPT's training step under activation memory budgets: saved bytes, peak memory, time.

    python benchmarks/memory_budget.py [--device cuda] [--layers 12] [--width 768] [--batch 8]

Saved are the tensors that live from the forward to the backward and are neither inputs nor results.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import weft
import weft_aot
import weft_codegen
from gpu_models import Transformer
from loss_memory import peak, seconds

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


def measure(model: torch.nn.Module, ids: torch.Tensor, budget: float, runs: int) -> str:
    """A row of the table: MiB saved, milliseconds, MiB at the peak above what lived before."""
    device = ids.device.type
    sizes: list[int] = []

    def partition(joint: Any) -> Any:
        parts = weft_aot.partition(joint)
        placeholders = parts.backward.graph.find_nodes(op="placeholder")
        for node, saved in zip(placeholders, parts.saved, strict=False):
            if saved.source.kind == "value" and saved.source.index >= joint.num_values:
                sizes.append(node.meta["val"].untyped_storage().nbytes())
        return parts

    weft.reset()
    backend = weft.aot_autograd(
        fw_compiler=weft_codegen.compile_graph,
        decompositions=weft_codegen.decompositions(),
        partition_fn=partition,
    )
    compiled = weft.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = compiled(ids)
        loss.backward()

    with weft.config.patch(activation_memory_budget=budget):
        step()
        step()
        model.zero_grad()
        most = peak(step, device)
        return f"{sum(sizes) / 2**20:8.0f} {seconds(step, device, runs) * 1e3:9.1f} {most:9.0f}"


def main() -> None:
    """Print a row for each budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    heads = args.width // 64
    model = Transformer(args.width, heads, args.layers, args.tokens, "gpt", args.length)
    model = model.to(args.device)
    ids = torch.randint(0, args.tokens, (args.batch, args.length), device=args.device)
    print("budget   MiB saved   ms   MiB peak")
    for budget in BUDGETS:
        print(f"{budget:5.1f}", measure(model, ids, budget, args.runs), flush=True)


if __name__ == "__main__":
    main()
