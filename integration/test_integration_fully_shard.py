"""Two gloo processes: modules of `fully_shard` gather and reduce in the graph, not in hooks."""

import os
import sys
import tempfile
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from weft_capture.libraries import fully_shard as fully_sharded


class Block(nn.Module):
    """A transformer block whose sizes do not divide by the number of processes."""

    def __init__(self, width=9, broken=False):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.wide, self.narrow = nn.Linear(width, 15), nn.Linear(15, width)
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


def sharded(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    if "mp_policy" in options:
        options["mp_policy"] = replace(options["mp_policy"], output_dtype=torch.float32)
    return fully_shard(model, **options)


def whole(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def train(model, run, accumulate=False, growth=0):
    """Losses, parameters and the optimizer's state of two steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, 0.9), []
    for step in range(2):
        for part in range(1 + accumulate):
            seed = 10 * step + 2 * part + dist.get_rank()
            x = torch.randint(
                11, (2 + growth * step, 5), generator=torch.Generator().manual_seed(seed)
            )
            model.set_requires_gradient_sync(part == accumulate)
            losses.append(F.cross_entropy(run(x).float().flatten(0, 1), x.flatten()))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(run(x))
    model.reshard()  # eager keeps the root's parameters after a forward without a backward
    state = [s["momentum_buffer"] for s in optimizer.state.values()]
    return losses, whole(model.parameters()), whole(state)


def make(options, **settings):
    torch.manual_seed(0)
    return sharded(Model(**settings), **options)


def check(name, options=MappingProxyType({}), tolerance=1e-5, root=False, growth=0, **settings):
    """Train as eager and compiled, and compare; returns how often each operator was called."""
    accumulate, backend = settings.pop("accumulate", False), settings.pop("backend", "aot_eager")
    breaks = accumulate or settings.get("broken", False)
    model = make(options, **settings)
    wanted = train(model, model, accumulate, growth)
    weft.reset()
    weft.counters.clear()
    model = make(options, **settings)
    function = (lambda x: model(x)) if root else model
    found = train(model, weft.compile(function, backend=backend), accumulate, growth)
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )
    reasons = weft.counters["graph_break"]
    assert (sum(reasons.values()) > 0) == breaks, (name, reasons)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0, name  # all were waited for
    assert all(isinstance(p, DTensor) for p in model.parameters()), name
    return weft.counters["extern"]


def count(calls, name):
    return sum(n for op, n in calls.items() if name in op)


def worker(rank):
    # A graph that another process has compiled would not be counted.
    os.environ["WEFT_CACHE_DIR"] = tempfile.mkdtemp()
    calls = check("blocks", backend="codegen", growth=1)
    # Graphs of training, for two sizes and for all, gather in the forward and in the backward; one
    # of inference gathers once.
    gathers, reductions = count(calls, "all_gather"), count(calls, "reduce_scatter")
    assert (gathers, reductions) == (2 * 2 * 2 + 2, 2 * 2), calls
    check("with its root", root=True)
    kept = check("kept after the forward", {"reshard_after_forward": False}, backend="codegen")
    assert count(kept, "all_gather") == 2 * 2, kept
    check("checkpointed blocks", checkpointed=True)
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    check("mixed precision", {"mp_policy": mixed}, tolerance=2e-2, backend="codegen")
    check("mixed precision of the root", {"mp_policy": mixed}, tolerance=2e-2, root=True)
    describe = fully_sharded._description
    listed = mock.patch.object(
        fully_sharded, "_description", lambda group: replace(describe(group), flat=False)
    )
    with listed:  # as on a GPU: lists of tensors, of which a backward gathers what it needs
        calls = check("lists", backend="codegen")
    assert count(calls, "all_gather_into_tensor_coalesced") == 2 * 2 + 2, calls
    check("a break inside", broken=True)
    check("gradients without a reduction", accumulate=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs gloo")
@pytest.mark.every(2)
@pytest.mark.parametrize("count", [2, 4])
def test_fully_sharded_modules_on_processes(count):
    run_file(__file__, str(count))


if __name__ == "__main__":
    on_processes(worker, int(sys.argv[1]))
