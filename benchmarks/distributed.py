"""Steps of distributed training: eager, weft and torch.compile in turn, in one run.

    torchrun --nproc-per-node 2 benchmarks/distributed.py                  # gloo, small models
    torchrun --nproc-per-node 2 benchmarks/distributed.py --device cuda    # NCCL, bf16

For each model, and for DistributedDataParallel and fully_shard (FSDP2), every system trains a model
of its own from the same weights. The first steps show that the losses are equal; then all systems
are timed in rounds, one after the other in each, and the quickest round of each counts. Memory is
the most that a system's model, optimizer and step had allocated on this process's GPU; on a CPU it
is what a step adds to the process.
"""

import argparse
import ctypes
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import weft
from gpu_models import Llama, Transformer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

CHECKED = 3  # steps whose losses are compared


# A model, the number of its tokens, and a process's batch.
MODELS: dict[str, dict[str, tuple[Callable[[], nn.Module], int, tuple[int, int]]]] = {
    "cuda": {
        "gpt2": (lambda: Transformer(768, 12, 12, 50304, "gpt", 1024), 50304, (8, 1024)),
        "llama": (lambda: Llama(1024, 16, 16, 2816, 32000), 32000, (8, 1024)),
    },
    "cpu": {
        "gpt2": (lambda: Transformer(128, 4, 4, 512, "gpt", 64), 512, (4, 64)),
        "llama": (lambda: Llama(128, 4, 4, 352, 512), 512, (4, 64)),
    },
}


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
        make, tokens, self.size = MODELS[device.type][name]
        self.device = device
        torch.manual_seed(0)
        self.before = self._allocated()
        with device:
            model = make()
        model = WRAPPERS[wrapper](model, device)
        self.run = SYSTEMS[system](model)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        self.cast = torch.autocast(
            device.type, torch.bfloat16, enabled=wrapper == "ddp" and device.type == "cuda"
        )
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        self.batch = torch.randint(tokens, self.size, generator=generator, device=device)
        start = time.perf_counter()
        self.losses = [self.step().item()]
        self.first = time.perf_counter() - start
        self.losses += [self.step().item() for _ in range(CHECKED - 1)]

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def step(self) -> torch.Tensor:
        """Take one step and return its loss."""
        with self.cast:
            loss = self.run(self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> float:
        """Take the steps in which systems still tune, and measure memory; returns MiB.

        On a GPU it is the most that was allocated since before this model was made, in a step. On a
        CPU it is what a step adds to the process's memory.
        """
        for _ in range(8):
            self.step()
        if self.device.type == "cpu":
            return _memory_of(self.step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        # What lived before this model was made belongs to other systems.
        return (torch.cuda.max_memory_allocated() - self.before) / 2**20

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
        """Trace a step; returns milliseconds in which collectives were on their way, and the share
        of them in which this process computed.
        """
        cuda = self.device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
        self._synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            self.step()
            self._synchronize()
        sent, computed, waited = Spans(), Spans(), Spans()
        for event in profile.events():
            on_gpu = event.device_type != torch.autograd.DeviceType.CPU
            if on_gpu == cuda and event.name.startswith(("gloo:", "ncclDevKernel", "ncclKernel")):
                sent.add(event)
            elif "wait_tensor" in event.name:
                waited.add(event)
            elif on_gpu or event.name.startswith(("aten::", "CompiledFunction")):
                computed.add(event)
        beside = sent.common(computed)
        return sent.length() / 1e3, beside.without(waited) / max(sent.length(), 1)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


class Spans:
    """Stretches of time in a trace, in microseconds."""

    def __init__(self, spans: Iterable[tuple[float, float]] = ()) -> None:
        self.spans = list(spans)

    def add(self, event: Any) -> None:
        """Add the time of a profiler's event."""
        self.spans.append((event.time_range.start, event.time_range.end))

    def union(self) -> list[tuple[float, float]]:
        """Return the stretches in order, those that overlap as one."""
        found: list[tuple[float, float]] = []
        for start, end in sorted(self.spans):
            if found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
        return found

    def length(self) -> float:
        """Return the time that is covered."""
        return sum(end - start for start, end in self.union())

    def common(self, other: "Spans") -> "Spans":
        """Return what both cover."""
        pairs = [(max(a, c), min(b, d)) for a, b in self.union() for c, d in other.union()]
        return Spans(pair for pair in pairs if pair[0] < pair[1])

    def without(self, other: "Spans") -> float:
        """Return the time that is covered here and not by `other`."""
        return self.length() - self.common(other).length()


def _memory_of(step: Callable[[], Any]) -> float:
    """Return by how many MiB a call raises this process's resident memory at most (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    step()
    return _resident("VmHWM") - before


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(name))


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
        sent, hidden = trainers[system].communication()
        say(
            f"{name:6} {wrapper:5} {system:6} first step {trainers[system].first:.1f} s, "
            f"collectives on their way for {sent:.1f} ms, {hidden:.0%} of it beside computation"
        )
    best = dict.fromkeys(trainers, float("inf"))
    steps = 10 if device.type == "cuda" else 4
    for _ in range(rounds):
        for system, trainer in trainers.items():
            best[system] = min(best[system], trainer.seconds(steps))
    wanted = trainers["eager"].losses if "eager" in trainers else None
    for system, trainer in trainers.items():
        tokens = math.prod(trainer.size) * dist.get_world_size() / best[system]
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
    parser.add_argument("--device", choices=MODELS, default="cpu")
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--wrappers", default="ddp,fsdp")
    parser.add_argument("--systems", default="eager,weft,torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=360, help="seconds after which none begins")
    parser.add_argument(
        "--separate-caches", action="store_true", help="ranks load nothing that others compiled"
    )
    options = parser.parse_args()
    if options.separate_caches:
        os.environ["WEFT_CACHE_DIR"] = tempfile.mkdtemp()
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
