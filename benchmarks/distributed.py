"""Steps of distributed training: eager, weft and torch.compile in turn, in one run.

    torchrun --nproc-per-node 2 benchmarks/distributed.py                  # gloo, small models
    torchrun --nproc-per-node 2 benchmarks/distributed.py --device cuda    # NCCL, bf16

For each model, and for DistributedDataParallel and fully_shard (FSDP2), every system trains a model
of its own from the same weights. The first steps show that the losses are equal; then all systems
are timed in rounds, one after the other in each, and the quickest round of each counts. Memory is
the most that a system's model, optimizer and step had allocated on this process's GPU.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import weft
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

CHECKED = 3  # steps whose losses are compared


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of a process's batch."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    batch: int


SHAPES = {
    "cuda": {
        "gpt2": Shape(12, 768, 12, 3072, 50304, 1024, 8),
        "llama": Shape(16, 1024, 16, 2816, 32000, 1024, 8),
    },
    "cpu": {
        "gpt2": Shape(4, 128, 4, 512, 512, 64, 4),
        "llama": Shape(4, 128, 4, 352, 512, 64, 4),
    },
}


class GPTBlock(nn.Module):
    """GPT-2's: LayerNorm, attention and a perceptron with biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length, width)` to the same shape."""
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x)), approximate="tanh"))


class LlamaBlock(nn.Module):
    """Llama's: RMSNorm, rotary attention and a gated perceptron."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        size = width // shape.heads
        rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(shape.length), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([-second, first], -1) * self.sin.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length, width)` to the same shape."""
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """Embeddings, blocks, and the loss of the next token."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        gpt = name == "gpt2"
        self.positions = nn.Parameter(torch.zeros(shape.length, shape.width)) if gpt else None
        block = GPTBlock if gpt else LlamaBlock
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width) if gpt else nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of `targets`."""
        x = self.tokens(tokens)
        x = x if self.positions is None else x + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def wrap_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model in DistributedDataParallel."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def wrap_fsdp(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard every block and the rest; on a GPU the graph computes in bfloat16."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if device.type == "cuda" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


WRAPPERS = {"ddp": wrap_ddp, "fsdp": wrap_fsdp}
SYSTEMS: dict[str, Callable[[nn.Module], Callable[..., torch.Tensor]]] = {
    "eager": lambda model: model,
    "weft": weft.compile,
    "torch": torch.compile,
}


class Trainer:
    """One system with a model and an optimizer of its own."""

    def __init__(self, system: str, wrapper: str, name: str, device: torch.device) -> None:
        self.shape, self.device = SHAPES[device.type][name], device
        torch.manual_seed(0)
        self.before = self._allocated()
        with device:
            model = LanguageModel(name, self.shape)
        model = WRAPPERS[wrapper](model, device)
        self.run = SYSTEMS[system](model)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        self.cast = torch.autocast(
            device.type, torch.bfloat16, enabled=wrapper == "ddp" and device.type == "cuda"
        )
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        size = (self.shape.batch, self.shape.length + 1)
        self.batch = torch.randint(self.shape.vocabulary, size, generator=generator, device=device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self.losses = [self.step().item()]
        self.first = time.perf_counter() - start
        self.losses += [self.step().item() for _ in range(CHECKED - 1)]

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def step(self) -> torch.Tensor:
        """Take one step and return its loss."""
        with self.cast:
            loss = self.run(self.batch[:, :-1], self.batch[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> float:
        """Take the steps in which systems still tune, and measure memory; returns MiB."""
        for _ in range(8):
            self.step()
        if self.device.type == "cpu":
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        # What lived before this model was made belongs to other systems.
        return (torch.cuda.max_memory_allocated() - self.before) / 2**20 if others else 0.0

    def seconds(self, steps: int) -> float:
        """Return the seconds of a step, as the slowest process has them."""
        self._synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._synchronize()
        passed = torch.tensor((time.perf_counter() - start) / steps, device=self.device)
        dist.all_reduce(passed, dist.ReduceOp.MAX)
        return passed.item()

    def communication(self) -> tuple[float, float]:
        """Return milliseconds of a step that gloo worked, and that the graphs waited for it."""
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu]) as profile:
            self.step()
        rows = [(row.key, row.cpu_time_total / 1e3) for row in profile.key_averages()]
        work = sum(time for key, time in rows if key.startswith("gloo:"))
        return work, sum(time for key, time in rows if key == "_c10d_functional::wait_tensor")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def say(text: str) -> None:
    """Print a line once for all processes."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def compare(name: str, wrapper: str, systems: list[str], device: torch.device, rounds: int) -> None:
    """Train one model under one wrapper with every system, and print a row for each."""
    trainers: dict[str, Trainer] = {}
    memory: dict[str, float] = {}
    for system in systems:
        weft.counters.clear()
        try:
            trainers[system] = Trainer(system, wrapper, name, device)
            memory[system] = trainers[system].settle()
        except Exception as error:  # the others are still worth a row; all processes fail alike
            say(f"{name:6} {wrapper:5} {system:6} failed: {type(error).__name__}: {error}"[:600])
            trainers.pop(system, None)
            continue
        if system == "weft":
            breaks = dict(weft.counters["graph_break"])
            graphs = weft.counters["stats"]["unique_graphs"]
            say(f"{name:6} {wrapper:5} weft: {graphs} graphs, breaks {breaks or 'none'}")
            if wrapper == "fsdp" and device.type == "cpu":
                work, waited = trainers[system].communication()
                say(f"{name:6} {wrapper:5} weft: gloo worked {work:.0f} ms, waited {waited:.0f} ms")
        say(f"{name:6} {wrapper:5} {system:6} first step {trainers[system].first:.1f} s")
    best = dict.fromkeys(trainers, float("inf"))
    steps = 10 if device.type == "cuda" else 4
    for _ in range(rounds):
        for system, trainer in trainers.items():
            best[system] = min(best[system], trainer.seconds(steps))
    wanted = trainers["eager"].losses if "eager" in trainers else None
    for system, trainer in trainers.items():
        tokens = trainer.shape.batch * trainer.shape.length * dist.get_world_size() / best[system]
        pairs = zip(trainer.losses, wanted or trainer.losses, strict=True)
        apart = max(abs(a - b) for a, b in pairs)
        ratio = best["eager"] / best[system] if wanted else float("nan")
        say(
            f"{name:6} {wrapper:5} {system:6} {best[system] * 1e3:9.2f} ms/step "
            f"{tokens:12,.0f} tokens/s  {ratio:5.2f}x eager  {memory[system]:8,.0f} MiB  "
            f"losses differ by {apart:.1e}"
        )


def main() -> None:
    """Run what the command line asks for, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--wrappers", default="ddp,fsdp")
    parser.add_argument("--systems", default="eager,weft,torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=360, help="seconds after which none begins")
    options = parser.parse_args()
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    started = time.perf_counter()
    say(f"{dist.get_world_size()} processes, {device.type}, torch {torch.__version__}")
    for name in options.models.split(","):
        for wrapper in options.wrappers.split(","):
            late = torch.tensor(time.perf_counter() - started, device=device)
            dist.broadcast(late, 0)
            if late.item() > options.budget:
                say(f"{name} {wrapper}: left out, {options.budget:.0f} s are over")
                continue
            compare(name, wrapper, options.systems.split(","), device, options.rounds)
            weft.reset()
            torch.compiler.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
