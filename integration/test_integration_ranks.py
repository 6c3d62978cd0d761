"""Two gloo processes: ranks agree on guards, compare reports, share a cache, and save models."""

import functools
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
import weft
from processes import on_processes, run_file
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def double(x):
    return (x * 2).sin()


def guards_fail_on_all_ranks(rank):
    compiled = weft.compile(double, backend="eager", dynamic=False)
    for x in (torch.ones(3), torch.ones(3 + rank)):
        torch.testing.assert_close(compiled(x), double(x))
    assert weft.counters["guards"]["recompiles"] == rank  # rank 0 has met one size only
    differing = weft.report_by_rank().differing
    assert [sorted(ranks) for ranks in next(iter(differing.values())).values()] == [[0], [1]]
    assert "rank 1: 2 graphs" in str(weft.report_by_rank())

    weft.reset()
    weft.counters.clear()
    compiled = weft.compile(double, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    compiled(torch.ones(3))  # without asking
    assert not weft.compiler.set_enable_guard_collectives(True)
    for x in (torch.ones(3), torch.ones(3 + rank), torch.ones(3), torch.ones(3 + 2 * rank)):
        torch.testing.assert_close(compiled(x), double(x))
    assert weft.counters["stats"]["unique_graphs"] == 3, weft.counters["stats"]
    assert weft.counters["guards"]["recompiles"] == 2, weft.counters["guards"]
    assert weft.compiler.set_enable_guard_collectives(False)
    compiled(torch.ones(3 + 5 * rank))
    assert weft.counters["guards"]["recompiles"] == 2 + rank
    assert not weft.compiler.set_enable_guard_collectives(False)


def a_cache_serves_all_ranks(rank):
    compiled = weft.compile(lambda x: torch.softmax(x.exp() + 1, -1).sum(0))
    dist.barrier()
    compiled(torch.randn(5, 7))
    # One rank generates code, the other waits for it.
    known = torch.tensor(weft.counters["codegen"]["known_graphs"])
    dist.all_reduce(known)
    assert known == dist.get_world_size() - 1, weft.counters["codegen"]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def make():
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    compiled = weft.compile(model, backend="aot_eager")
    return compiled, torch.optim.Adam(model.parameters(), 0.1)


def step(compiled, optimizer, seed):
    torch.manual_seed(seed)
    loss = compiled(torch.randn(3, 6)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def checkpoints_hold_compiled_models(rank, folder):
    torch.manual_seed(0)
    compiled, optimizer = make()
    step(compiled, optimizer, rank)
    model_state, optimizer_state = get_state_dict(compiled, optimizer)
    assert set(model_state) == {f"layers.{i}.{n}" for i in range(2) for n in ("weight", "bias")}
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    wanted = [step(compiled, optimizer, 10 * i + rank) for i in range(2)]
    torch.manual_seed(1)
    compiled, optimizer = make()
    state = dict(zip(("model", "optimizer"), get_state_dict(compiled, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        compiled,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    found = [step(compiled, optimizer, 10 * i + rank) for i in range(2)]
    torch.testing.assert_close(found, wanted)


def stages_of_a_pipeline(rank):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2)]
    x, target = torch.randn(4, 6), torch.randn(4, 6)

    def loss_of(y, wanted):
        return (y - wanted).square().mean()

    whole = nn.Sequential(*layers)
    wanted = whole(x)
    loss_of(wanted, target).backward()
    gradient = layers[rank][0].weight.grad.clone()
    whole.zero_grad()
    compiled = weft.compile(layers[rank], backend="aot_eager", fullgraph=True)
    stage = PipelineStage(compiled, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
    losses = []
    found = schedule.step(x) if rank == 0 else schedule.step(target=target, losses=losses)
    torch.testing.assert_close(layers[rank][0].weight.grad, gradient)
    if rank:
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(sum(losses) / 2, loss_of(wanted, target))


def collectives(x):
    group = dist.group.WORLD
    y = fc.all_to_all_single(x.sin(), None, None, group)
    z = fc.broadcast(y * 2, 1, group)
    w = fc.permute_tensor((z + y).flatten(), [1, 0], group).view(4, 3)
    return fc.reduce_scatter_tensor(w, "sum", 0, group), fc.all_gather_tensor(w, 1, group)


def with_objects(x):
    y, found = x + 1, [None, None]
    dist.all_gather_object(found, dist.get_rank())
    return y * sum(found)


def collectives_are_nodes_but_for_objects(rank):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    compiled = weft.compile(collectives, fullgraph=True)
    torch.testing.assert_close(compiled(x), collectives(x))
    compiled = weft.compile(with_objects, backend="eager")
    torch.testing.assert_close(compiled(x), with_objects(x))
    assert list(weft.counters["graph_break"]) == ["communication"], weft.counters["graph_break"]


def many(x, y, w):
    group, size = dist.group.WORLD, dist.get_world_size()
    a, b = fc.all_reduce(x.sin(), "sum", group), fc.all_reduce(y * 2, "sum", group)
    c = fc.all_reduce(a + 1, "sum", group)  # after a
    d = fc.all_reduce(w.exp(), "max", group)
    e = fc.all_reduce(fc.all_gather_tensor(c.cos(), 0, group), "sum", group)  # after c
    rows = fc.all_gather_tensor(x, 0, group), fc.all_gather_tensor(y.view(5, 2), 0, group)
    parts = [
        fc.reduce_scatter_tensor(torch.cat([t] * size), "sum", 0, group) for t in (x.cos(), y + 3)
    ]
    return a, b, c, d, e.sum(0), *rows, *parts


def small_collectives_are_joined(rank):
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(size, generator=generator) for size in ((4, 3), (2, 5), (7,))]
    wanted = many(*inputs)
    for options, expected in (
        ({}, {"all_reduce": 5, "all_gather": 2, "reduce_scatter": 2}),
        # The first two sums; each other needs one before, or is a maximum.
        ({"bucket_collectives": True}, {"all_reduce": 4, "all_gather": 1, "reduce_scatter": 1}),
    ):
        weft.reset()
        weft.counters.clear()
        found = weft.compile(many, fullgraph=True, options=options)(*inputs)
        torch.testing.assert_close(found, wanted)
        calls = weft.counters["extern"]
        names = {kind: sum(n for op, n in calls.items() if kind in op) for kind in expected}
        assert names == expected, (options, calls)
        assert torch._C._distributed_c10d._get_work_registry_size() == 0


class Attention(nn.Module):
    """A block in tensor parallel: heads and hidden units are spread over the ranks."""

    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(y.flatten(-2))
        return x + self.narrow(F.silu(self.wide(x)) * 2)


def tensor_parallel_graphs_are_generated(rank):
    mesh = init_device_mesh("cpu", (2,))
    plan = dict.fromkeys(("q", "k", "v", "wide"), ColwiseParallel())
    plan |= dict.fromkeys(("o", "narrow"), RowwiseParallel())
    found = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = parallelize_module(Attention(), mesh, plan)
        run = weft.compile(model, fullgraph=True) if compile_it else model
        y = run(torch.randn(2, 5, 8))
        y.square().sum().backward()
        found.append([y, *(p.grad.full_tensor() for p in model.wide.parameters())])
    torch.testing.assert_close(found[1], found[0])
    calls = weft.counters["extern"]
    assert calls["_c10d_functional.all_reduce.default"] >= 2, calls
    products = ("mm", "attention", "_c10d_functional")  # all else is in generated kernels
    assert all(any(name in op for name in products) for op in calls), calls
    assert weft.counters["codegen"]["kernels"] > 0, weft.counters["codegen"]


def worker(folder, rank):
    for check, arguments in (
        (guards_fail_on_all_ranks, ()),
        (a_cache_serves_all_ranks, ()),
        (checkpoints_hold_compiled_models, (f"{folder}/saved",)),
        (stages_of_a_pipeline, ()),
        (collectives_are_nodes_but_for_objects, ()),
        (small_collectives_are_joined, ()),
        (tensor_parallel_graphs_are_generated, ()),
    ):
        weft.reset()
        weft.counters.clear()
        check(rank, *arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="needs gloo")
def test_ranks_work_together():
    run_file(__file__)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        on_processes(functools.partial(worker, made))
