"""Train a small GPT on English prose, in eager and with weft side by side: `nox -s demo`.

The text is the documentation in the standard library's `pydoc_data.topics`, so nothing is
downloaded. Two copies of one model see the same batches in turn; each step of each is timed. At
the end: the two loss curves in a PNG, what weft did, and text that the model writes.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import weft
from gpt import BATCH, BLOCK, GPT, Text
from matplotlib.figure import Figure


@dataclass
class Runner:
    """One copy of the model in training."""

    name: str
    model: GPT
    compile_it: bool
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loss = weft.compile(self.model.loss) if self.compile_it else self.model.loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, fused=True)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Take one training step and time it."""
        start = time.perf_counter()
        loss = self.loss(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    @property
    def tokens_per_second(self) -> float:
        """The median speed; the first step, which compiles, counts like any other."""
        return BATCH * BLOCK / statistics.median(self.seconds)

    @property
    def compile_seconds(self) -> float:
        """What the first step took beyond a usual one."""
        return self.seconds[0] - statistics.median(self.seconds)


def show(step: int, steps: int, eager: Runner, compiled: Runner, started: float) -> None:
    """Print where training is: in place on a terminal, a line now and then in a pipe."""
    terminal = sys.stdout.isatty()
    every = 5 if terminal else max(steps // 10, 1)
    if step % every and step != steps:
        return
    loss = f"eager {eager.losses[-1]:.4f}, weft {compiled.losses[-1]:.4f}"
    speed = f"eager {eager.tokens_per_second:,.0f}, weft {compiled.tokens_per_second:,.0f}"
    passed = time.perf_counter() - started
    line = f"step {step:>4}/{steps}  loss: {loss}   tokens/s: {speed}   {passed:.0f} s"
    print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", flush=True)
    if terminal and step == steps:
        print()


def write_text(model: GPT, text: Text, length: int) -> str:
    """Let the model continue the beginning of the text, through a compiled forward."""
    forward = weft.compile(model.eval())
    generator = torch.Generator().manual_seed(0)
    window = text.data[None, :BLOCK].clone()
    written = []
    with torch.no_grad():
        for _ in range(length):
            weights = F.softmax(forward(window)[0, -1] / 0.7, dim=-1)
            character = torch.multinomial(weights, 1, generator=generator)
            written.append(character)
            window = torch.cat((window[:, 1:], character[None]), dim=1)
    return text.decode(torch.cat(written))


def draw(eager: Runner, compiled: Runner, path: Path) -> None:
    """Write the two loss curves as a PNG."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    left.plot(eager.losses, label="eager", linewidth=4, color="#b9c4d0")
    left.plot(compiled.losses, label="weft", linewidth=1.2, color="#c2410c")
    left.set(xlabel="step", ylabel="loss (nats per character)", title="A small GPT, same batches")
    left.legend(frameon=False)
    speeds = [eager.tokens_per_second, compiled.tokens_per_second]
    bars = right.bar(["eager", "weft"], speeds, color=["#b9c4d0", "#c2410c"])
    right.bar_label(bars, [f"{speed:,.0f}" for speed in speeds])
    right.set(title="tokens per second")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def summary(eager: Runner, compiled: Runner) -> str:
    """Say what weft did, in a few lines."""
    stats = weft.counters["stats"]
    apart = max(abs(a - b) for a, b in zip(eager.losses, compiled.losses, strict=True))
    ratio = compiled.tokens_per_second / eager.tokens_per_second
    return "\n".join(
        (
            f"loss            eager {eager.losses[0]:.3f} -> {eager.losses[-1]:.3f}, "
            f"weft {compiled.losses[0]:.3f} -> {compiled.losses[-1]:.3f}, "
            f"never further apart than {apart:.4f}",
            f"tokens/s        eager {eager.tokens_per_second:,.0f}, "
            f"weft {compiled.tokens_per_second:,.0f} ({ratio:.2f}x)",
            f"cold compile    {compiled.compile_seconds:.1f} s",
            f"graphs          {stats['unique_graphs']} captured, "
            f"{weft.counters['graph_break'].total()} breaks, "
            f"{weft.counters['codegen']['kernels']} fused kernels",
        )
    )


def train(text: Text, steps: int, budget: float) -> tuple[Runner, Runner]:
    """Train both copies on the same batches; stop after `budget` seconds at the latest."""
    torch.manual_seed(0)
    eager = Runner("eager", GPT(len(text.characters)), compile_it=False)
    torch.manual_seed(0)
    compiled = Runner("weft", GPT(len(text.characters)), compile_it=True)
    generator = torch.Generator().manual_seed(1)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        batch = text.batch(generator)
        # In turn, and each first every other time, so that neither has the warmer caches.
        for runner in (eager, compiled) if step % 2 else (compiled, eager):
            runner.step(*batch)
        if time.perf_counter() - started > budget:
            print(f"\nstopping at step {step}: {budget:.0f} s are over")
            break
        show(step, steps, eager, compiled, started)
    return eager, compiled


def main() -> None:
    """Train, compare, draw, and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--budget", type=float, default=200, help="seconds of training at most")
    parser.add_argument("--characters", type=int, default=400, help="length of the text to write")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--warm", action="store_true", help="use the disk cache of earlier runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if not options.warm:
            os.environ["WEFT_CACHE_DIR"] = folder
        text = Text.load()
        print(
            f"{len(text.data):,} characters of prose, {len(text.characters)} different ones; "
            f"{torch.get_num_threads()} threads; {options.steps} steps of {BATCH} x {BLOCK}"
        )
        eager, compiled = train(text, options.steps, options.budget)
        print(summary(eager, compiled))
        picture = options.out / "loss.png"
        draw(eager, compiled, picture)
        print(f"loss curves     {picture}")
        print(f"\nThe model that weft trained writes:\n{'-' * 60}")
        print(write_text(compiled.model, text, options.characters))


if __name__ == "__main__":
    main()
