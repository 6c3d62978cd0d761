"""How the schedule of FSDP2 behaves with many ranks: a cost model over the compiled graphs' steps.

    python benchmarks/collective_model.py --ranks 8,64,1024 --bandwidth 50 --latency 10

A Llama's blocks are sharded over ranks that do not exist (torch's fake process group), compiled,
and never run. Then the steps of the forward and the backward are walked as a process would run
them: kernels and products take time by their bytes and operations, collectives start where the
schedule starts them, run one after the other beside the kernels, and are waited for where the
schedule waits. A ring of N ranks takes (N - 1) (latency + bytes / N / bandwidth) for a gather or a
reduce-scatter of so many bytes, and twice that for an all-reduce; a tree pays the latency log2 N
times. The schedule is that for a CPU: a block's parameters are one message.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import weft
from gpu_models import Llama
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft_aot import aot_compile
from weft_codegen import decompositions, make_program
from weft_codegen.loops.program import BufferRef, Extern, Launch, Program, storage_roots


class Schedule:
    """A program's steps, each with its work, and what starts and waits."""

    def __init__(self, program: Program) -> None:
        self.program, self.roots = program, storage_roots(program.steps)
        self.steps = program.steps

    def bytes(self, name: str) -> int:
        """Return a buffer's size."""
        buffer = self.program.buffers[name]
        return math.prod(size.value for size in buffer.shape) * buffer.dtype.itemsize

    def shape(self, ref: BufferRef) -> list[int]:
        """Return a buffer's shape."""
        return [size.value for size in self.program.buffers[ref.name].shape]

    def root(self, ref: BufferRef) -> str:
        """Name the buffer whose memory is meant."""
        return self.roots.get(ref.name, ref.name)

    def operations(self, step: Extern) -> float:
        """Return the floating point operations of a product or of attention; 0 of others."""
        name = step.op._schema.name.partition("::")[2]
        shapes = [self.shape(a) for a in step.args if isinstance(a, BufferRef)]
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = shapes[-2:]
            return 2.0 * math.prod(left) * right[-1]
        if "attention" in name:
            batch, heads, length, width = shapes[1 if "backward" in name else 0]
            forward = 4.0 * batch * heads * length * length * width / 2  # causal
            return forward * (2.5 if "backward" in name else 1.0)
        return 0.0

    def traffic(self, step: Extern | Launch) -> int:
        """Return the bytes that a step reads and writes."""
        if isinstance(step, Launch):
            return sum(map(self.bytes, step.buffers))
        refs = [arg.name for arg in step.args if isinstance(arg, BufferRef)]
        return sum(
            map(self.bytes, [*refs, *(r for r in step.results if r in self.program.buffers)])
        )


def simulate(schedules: Sequence[Schedule], ranks: int, options: Any, tree: bool) -> list[float]:
    """Return seconds of a step, of its computation, and of its communication."""
    now = computed = sent = free = 0.0
    for schedule in schedules:
        done: dict[str, float] = {}
        for step in schedule.steps:
            name = step.op._schema.name if isinstance(step, Extern) else ""
            if name.endswith("::wait_tensor"):
                now = max(now, done.get(schedule.root(step.args[0]), now))
                done.update(dict.fromkeys(step.results, now))
            elif name.startswith("_c10d_functional"):
                names = [r for r in step.results if r in schedule.program.buffers]
                size = sum(map(schedule.bytes, names)) * (ranks if "scatter" in name else 1)
                hops = math.log2(ranks) if tree else ranks - 1
                cost = hops * options.latency * 1e-6
                cost += size * (ranks - 1) / ranks / (options.bandwidth * 1e9)
                cost *= 2 if "all_reduce" in name else 1
                free = max(free, now) + cost
                sent += cost
                done.update(dict.fromkeys(names, free))
            elif isinstance(step, Extern | Launch):
                work = schedule.operations(step) if isinstance(step, Extern) else 0.0
                cost = max(
                    work / (options.tflops * 1e12),
                    schedule.traffic(step) / (options.memory * 1e12),
                )
                now, computed = now + cost, computed + cost
        now = max(now, free)
    return [now, computed, sent]


def schedules(ranks: int, options: Any) -> list[Schedule]:
    """Compile a step of the model for so many ranks."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    found: list[Schedule] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(Schedule(make_program(gm, inputs)))
        (results,) = gm.graph.output_node().args
        values = [r.meta["val"] if isinstance(r, fx.Node) else r for r in results]
        return lambda *args: [*map(_untouched, values)]

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return aot_compile(gm, inputs, fw_compiler=keep, decompositions=decompositions())

    with torch.device("meta"):
        model = Llama(options.width, options.width // 128, options.layers, options.hidden, 32000)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    compiled = weft.compile(lambda ids: model(ids), backend=backend, fullgraph=True, dynamic=False)
    compiled(torch.zeros(options.tokens // 2048, 2048, dtype=torch.int64)).backward()
    dist.destroy_process_group()
    weft.reset()
    return found


def _untouched(value: Any) -> Any:
    """Return memory that is never touched, like a fake tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="8,64,1024")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=11008)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank, in rows of 2048")
    parser.add_argument("--bandwidth", type=float, default=50.0, help="GB/s between two ranks")
    parser.add_argument("--latency", type=float, default=10.0, help="microseconds of a message")
    parser.add_argument("--tflops", type=float, default=400.0, help="of products in bfloat16")
    parser.add_argument("--memory", type=float, default=2.5, help="TB/s of a rank's memory")
    options = parser.parse_args()
    for ranks in map(int, options.ranks.split(",")):
        found = schedules(ranks, options)
        for shape in ("ring", "tree"):
            step, computed, sent = simulate(found, ranks, options, shape == "tree")
            hidden = 1 - (step - computed) / sent
            print(
                f"{ranks:5} ranks, {shape}: step {step * 1e3:7.1f} ms, computation "
                f"{computed * 1e3:7.1f} ms, communication {sent * 1e3:7.1f} ms, {hidden:.0%} hidden"
            )


if __name__ == "__main__":
    main()
