"""Two gloo processes: DistributedDataParallel reduces buckets while a compiled backward runs."""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import weft
from processes import on_processes, run_file
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """A residual network with a layer that some calls leave out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.spare = nn.Linear(16, 7)

    def forward(self, x, spare=False):
        x = self.embedding(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return F.cross_entropy(self.spare(x) if spare else x[..., :7], torch.arange(len(x)) % 3)


def train(place, options, backend, hooked=False):
    """Gradients of four steps, and the buckets in the order in which they were reduced.

    Without options sizes vary.
    """
    torch.manual_seed(0)
    model = Model()
    varies = options.get("find_unused_parameters", False)
    model.spare.requires_grad_(varies)
    inner = weft.compile(model, backend=backend) if place == "inside" else model
    parallel = DistributedDataParallel(inner, bucket_cap_mb=0.002, **options)
    run = weft.compile(parallel, backend=backend) if place == "outside" else parallel
    reduced, found = [], []

    def reduce(state, bucket):
        reduced.append((bucket.index(), len(arrived)))
        return default_hooks.allreduce_hook(None, bucket)

    if hooked:
        parallel.register_comm_hook(None, reduce)
    arrived = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: arrived.append(p.shape))
    for step in range(4):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        x = torch.randint(7, (9 - (0 if options else step),), generator=generator)
        if step == 2:
            with parallel.no_sync():
                run(x, varies).backward()
        arrived.clear()
        run(x, varies and step % 2 == 1).backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    return found, reduced


def check(options, hooked, *places):
    wanted, order = train(None, options, None, hooked)
    for place in places:
        weft.reset()
        weft.counters.clear()
        backend = "codegen" if place == "inside" and not options else "aot_eager"
        found, reduced = train(place, options, backend, hooked)
        torch.testing.assert_close(found, wanted, msg=f"{options} {place}: {{}}".format)
        assert not weft.counters["graph_break"], weft.counters
        assert weft.counters["aot"]["gradient_buckets"] >= 3, weft.counters
        assert [index for index, _ in reduced] == [index for index, _ in order]
        # Buckets are not all reduced at the end, when all gradients have arrived.
        assert not reduced or len({count for _, count in reduced}) >= 3, reduced


def second_derivatives_are_refused():
    parallel = DistributedDataParallel(
        weft.compile(Model(), backend="aot_eager"), bucket_cap_mb=0.002
    )
    loss = parallel(torch.arange(7), True)
    weight = parallel.module.spare.weight
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="optimize_ddp"):
        grad.sum().backward()


def worker(rank):
    check({}, True, "inside", "outside")
    check({"find_unused_parameters": True}, False, "inside", "outside")
    check({"static_graph": True, "gradient_as_bucket_view": True}, True, "inside")
    second_derivatives_are_refused()
    weft.config.optimize_ddp = False
    weft.counters.clear()
    train("inside", {}, "aot_eager")
    assert weft.counters["aot"]["gradient_buckets"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs gloo")
@pytest.mark.parametrize("count", [2, 4])
def test_data_parallel_training_on_processes(count):
    run_file(__file__, str(count))


if __name__ == "__main__":
    on_processes(worker, int(sys.argv[1]))
