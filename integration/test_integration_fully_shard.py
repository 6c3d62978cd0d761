"""Two gloo processes: modules of `fully_shard` gather and reduce in the graph, not in hooks."""

import operator
import sys
from dataclasses import replace
from types import MappingProxyType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import weft
from processes import on_processes, run_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from weft_capture.libraries import fully_shard as fully_sharded


class Block(nn.Module):
    """A transformer block whose sizes do not divide by the number of processes."""

    def __init__(self, width=9, broken=False):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.wide, self.narrow = nn.Linear(width, 14), nn.Linear(14, width)
        self.broken = broken

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (3, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.broken:
            weft.graph_break()
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Model(nn.Module):
    def __init__(self, checkpointed=False, broken=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 9), nn.Linear(9, 11)
        self.blocks = nn.ModuleList(Block(broken=broken and i == 1) for i in range(2))
        self.blocks[0].norm.requires_grad_(False)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


def sharded(model, together=False, **options):
    """Shard each block, or with `together` both in one call, and the rest."""
    for block in [list(model.blocks)] if together else model.blocks:
        fully_shard(block, **options)
    if "mp_policy" in options:
        options["mp_policy"] = replace(options["mp_policy"], output_dtype=torch.float32)
    return fully_shard(model, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, run, parts=None, growth=0, scaled=False, ranks=1):
    """Losses, gradients, parameters and the optimizer's state of two steps.

    Of `parts`, each is one forward and backward of a step, and sets how the model reduces. So many
    `ranks` have the same inputs.
    """
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1, 0.9), []
    scaler = torch.amp.GradScaler("cpu", 64.0, enabled=scaled)
    for step in range(2):
        for part, prepare in enumerate(parts or [lambda model: None]):
            seed = 10 * step + 2 * part + dist.get_rank() // ranks
            x = torch.randint(
                11, (2 + growth * step, 5), generator=torch.Generator().manual_seed(seed)
            )
            prepare(model)
            found.append(F.cross_entropy(run(x).float().flatten(0, 1), x.flatten()))
            scaler.scale(found[-1]).backward()
            found += [None if p.grad is None else whole(p.grad) for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(run(x))
    for module in model.modules():  # eager keeps parameters after a forward without a backward
        if isinstance(module, FSDPModule):
            module.reshard()
    state = [s["momentum_buffer"] for s in optimizer.state.values()]
    return found, [*map(whole, model.parameters())], [*map(whole, state)]


def make(options, parallel=None, **settings):
    torch.manual_seed(0)
    model = Model(**settings)
    if parallel is not None:
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, parallel, plan)
    return sharded(model, **options)


def check(name, options=MappingProxyType({}), tolerance=1e-5, root=False, **settings):
    """Train as eager and compiled, and compare; returns how often each operator was called."""
    backend = settings.pop("backend", "aot_eager")
    training = {key: settings.pop(key) for key in ("parts", "growth", "scaled") if key in settings}
    training["ranks"] = 2 if "parallel" in settings else 1
    model = make(options, **settings)
    wanted = train(model, model, **training)
    weft.reset()
    weft.counters.clear()
    model = make(options, **settings)
    function = (lambda x: model(x)) if root else model
    found = train(model, weft.compile(function, backend=backend), **training)
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )
    reasons = weft.counters["graph_break"]
    assert (sum(reasons.values()) > 0) == settings.get("broken", False), (name, reasons)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0, name  # all were waited for
    assert all(isinstance(p, DTensor) for p in model.parameters()), name
    return weft.counters["extern"]


def count(calls, name):
    return sum(n for op, n in calls.items() if name in op)


def synchronised(*turns):
    """Parts of a step: accumulate in all but the last turn."""
    return [operator.methodcaller("set_requires_gradient_sync", turn) for turn in turns]


MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HALF = MixedPrecisionPolicy(torch.float16)
ACCUMULATED = synchronised(False, True)


def on_one_mesh(rank):
    calls = check("blocks", backend="codegen")
    # A graph of training gathers both blocks at once in the forward and in the backward; one of
    # inference gathers once.
    gathers, reductions = count(calls, "all_gather"), count(calls, "reduce_scatter")
    assert (gathers, reductions) == (2 + 1, 2), calls
    check("checkpointed blocks", checkpointed=True)
    describe = fully_sharded._description
    listed = mock.patch.object(
        fully_sharded, "_description", lambda *group: replace(describe(*group), flat=False)
    )
    weft.config.collective_bucket = 0  # each block is gathered alone
    with listed:  # as on a GPU: lists of tensors, of which a backward gathers what it needs
        calls = check("lists", backend="codegen")
    assert count(calls, "all_gather_into_tensor_coalesced") == 2 * 2 + 2, calls
    check("a break inside", broken=True)
    half = {"mp_policy": replace(HALF, reduce_dtype=torch.float32)}
    check("float16", half, tolerance=2e-2, root=True, scaled=True)
    check("accumulated", {"mp_policy": MIXED}, tolerance=2e-2, parts=ACCUMULATED)
    check("several modules in a call", {"together": True}, parts=ACCUMULATED)


def with_further_options(rank):
    check("blocks, for two sizes and for all", backend="codegen", growth=1)
    kept = check("kept after the forward", {"reshard_after_forward": False}, backend="codegen")
    assert count(kept, "all_gather") == 2, kept
    check("checkpointed blocks, for two sizes and for all", checkpointed=True, growth=1)
    check("with its root", root=True)
    check("mixed precision", {"mp_policy": MIXED}, tolerance=2e-2, backend="codegen")
    check("parameters on the CPU", {"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    not_last = operator.methodcaller("set_is_last_backward", False)
    check("parts, then all", parts=[not_last, *ACCUMULATED])
    check("a factor", parts=[divided_by_three])
    split = {"shard_placement_fn": lambda p: Shard(1 if p.shape == (9, 14) else 0)}
    check("parameters split in the second dimension", split)


def divided_by_three(model):
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(3.0)


def on_two_meshes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    check("replicas", {"mesh": mesh, "mp_policy": HALF}, tolerance=2e-2)
    check("tensor parallel", {"mesh": mesh["outer"]}, parallel=mesh["inner"])


def on_two_meshes_with_further_options(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    alone = operator.methodcaller("set_requires_all_reduce", False)
    together = operator.methodcaller("set_requires_all_reduce", True)
    check("replicas", {"mesh": mesh}, backend="codegen")
    check("replicas", {"mesh": mesh}, parts=[alone, together])
    options = {"mesh": mesh["outer"]}
    check("tensor parallel", options, parallel=mesh["inner"], backend="codegen")
    check("tensor parallel", options, parallel=mesh["inner"], parts=ACCUMULATED)
    check("gathered by two", {"reshard_after_forward": 2})


PROGRAMS = {
    "one mesh": (2, on_one_mesh),
    "two meshes": (4, on_two_meshes),
    "one mesh of four": (4, on_one_mesh),
    "further options": (2, with_further_options),
    "two meshes, further options": (4, on_two_meshes_with_further_options),
}
EXHAUSTIVE = list(PROGRAMS)[2:]


@pytest.mark.skipif(sys.platform != "linux", reason="needs gloo")
@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[pytest.mark.exhaustive] * (p in EXHAUSTIVE)) for p in PROGRAMS],
)
def test_fully_sharded_modules_on_processes(program):
    run_file(__file__, program)


if __name__ == "__main__":
    number, body = PROGRAMS[sys.argv[1]]
    on_processes(body, number)
