"""Compile seconds by stage, for models of more and more layers: every stage should grow linearly.

    python benchmarks/depth.py [--layers 2,12,48] [--device cuda] [--inference]

Each depth compiles in a process of its own with an empty cache folder. The last column is the
seconds a layer of the deepest model, divided by those of the shallowest: 1 where a stage is linear
and has no fixed cost, below 1 where it has one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
import weft
from gpu_models import Transformer
from weft_core import events

STAGES = 14  # that take longest


def measure(layers: int, device: str, training: bool) -> dict[str, float]:
    """Compile a GPT of so many layers and return the seconds of each stage, and of all."""
    torch.manual_seed(0)
    model = Transformer(128, 8, layers, 1000, "gpt", 64).to(device)
    ids = torch.randint(0, 1000, (2, 64), device=device)
    compiled = weft.compile(model)
    begin = time.perf_counter()
    with torch.set_grad_enabled(training):
        loss = compiled(ids)
        if training:
            loss.backward()
    seconds = time.perf_counter() - begin
    return {"all": seconds} | {name: total.seconds for name, total in events.timings.items()}


def in_own_process(layers: int, device: str, training: bool) -> dict[str, float]:
    """Measure in a new process with caches of its own."""
    command = [sys.executable, __file__, "--layers", str(layers), "--device", device, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "WEFT_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        done = subprocess.run(
            [*command, *([] if training else ["--inference"])],
            env=environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def table(depths: list[int], found: list[dict[str, float]]) -> str:
    """Return the stages as rows, the slowest first, and the depths as columns."""
    names = sorted({name for times in found for name in times}, key=lambda n: -found[-1].get(n, 0))
    lines = ["| stage | " + " | ".join(map(str, depths)) + " | growth a layer |"]
    lines += ["|---|" + "--:|" * (len(depths) + 1)]
    for name in names[:STAGES]:
        row = [times.get(name, 0.0) for times in found]
        growth = row[-1] / depths[-1] / (row[0] / depths[0]) if row[0] else float("nan")
        cells = " | ".join(f"{seconds:.2f}" for seconds in row)
        lines.append(f"| {name} | {cells} | {growth:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the depths and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="2,6,12,24,48,96")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--json", action="store_true", help="measure here and print one line")
    options = parser.parse_args()
    depths = [int(text) for text in options.layers.split(",")]
    if options.json:
        print(json.dumps(measure(depths[0], options.device, not options.inference)))
        return
    found = [in_own_process(n, options.device, not options.inference) for n in depths]
    print(table(depths, found))


if __name__ == "__main__":
    main()
