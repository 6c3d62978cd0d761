"""What train_gpt_ddp.py and train_gpt_fsdp.py share: a small GPT, its text, and the training loop.

Every process trains on batches of its own. Eager and weft train a copy of the model each on the
same batches, in turn; rank 0 shows their losses and speeds, and at the end how far the losses are
apart. The text is the standard library's `pydoc_data.topics`, so nothing is downloaded.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import weft
from gpt import BATCH, BLOCK, GPT, Text
from torch import nn

TOLERANCE = 2e-2
"""How far the mean losses of the last steps may be apart: rounding grows over the steps."""


class Runner:
    """One copy of the model in training, eager or compiled."""

    def __init__(self, model: nn.Module, compile_it: bool) -> None:
        self.run = weft.compile(model) if compile_it else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Take one step; the loss that is kept is the mean over all processes."""
        start = time.perf_counter()
        logits = self.run(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        self.losses.append(mean.item())
        self.seconds.append(time.perf_counter() - start)

    @property
    def tokens_per_second(self) -> float:
        """The median speed of all processes together."""
        return BATCH * BLOCK * dist.get_world_size() / statistics.median(self.seconds)


def show(step: int, steps: int, eager: Runner, compiled: Runner) -> None:
    """Print where training is: in place on a terminal, a line now and then in a pipe."""
    terminal = sys.stdout.isatty()
    if dist.get_rank() or (step % (1 if terminal else max(steps // 10, 1)) and step != steps):
        return
    loss = f"eager {eager.losses[-1]:.4f}, weft {compiled.losses[-1]:.4f}"
    speed = f"eager {eager.tokens_per_second:,.0f}, weft {compiled.tokens_per_second:,.0f}"
    line = f"step {step:>4}/{steps}  loss: {loss}   tokens/s: {speed}"
    end = "" if terminal and step != steps else "\n"
    print(f"\r\x1b[K{line}" if terminal else line, end=end, flush=True)


def train(wrap: Callable[[GPT, torch.device], nn.Module], description: str) -> None:
    """Train eager and weft side by side; exit with 1 where their losses differ.

    Args:
        wrap: makes the model parallel.
        description: of the command line.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    text, runners = Text.load(), []
    for compile_it in (False, True):
        torch.manual_seed(0)
        with device:
            model = GPT(len(text.characters))
        runners.append(Runner(wrap(model, device), compile_it))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, options.steps + 1):
        tokens, targets = (part.to(device) for part in text.batch(generator))
        for runner in runners:
            runner.step(tokens, targets)
        show(step, options.steps, *runners)
    breaks = sum(weft.counters["graph_break"].values())
    last = [statistics.mean(runner.losses[-5:]) for runner in runners]
    if dist.get_rank() == 0:
        print(f"losses at the end: eager {last[0]:.4f}, weft {last[1]:.4f}; {breaks} graph breaks")
    dist.destroy_process_group()
    if abs(last[0] - last[1]) > TOLERANCE or breaks:
        sys.exit(1)
