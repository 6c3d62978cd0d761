"""Two gloo processes: DistributedDataParallel with captured backwards gives eager's gradients."""

import subprocess
import sys

import pytest

WORKER = """
import os, sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import weft
from weft_compiled_autograd import graph_compiler


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
        self.spare = nn.Linear(4, 2)

    def forward(self, x, spare):
        y = self.body(x)
        return y + self.spare(x) if spare else y


def train(rank, options, compiled, compiler):
    torch.manual_seed(0)
    model = Model()
    if not options.get("find_unused_parameters"):
        model.spare.requires_grad_(False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)
    if compiled:
        model.body = weft.compile(model.body)
    log = []
    model.body[0].weight.register_hook(lambda g: log.append("hook") or g * 2)
    found = []
    for step in range(4):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp.zero_grad()

        def backward():
            loss = ddp(x, step % 2 == 1).square().sum()
            if compiler is None:
                loss.backward()
            else:
                with weft.compiled_autograd.enable(compiler):
                    loss.backward()

        if step == 2:
            with ddp.no_sync():
                backward()
        backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert len(log) == 5
    return found


def worker(rank, path):
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    cases = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
    for options in cases:
        want = train(rank, options, False, None)
        for compiled, compiler in (
            (False, lambda gm: gm),
            (True, graph_compiler(weft.lookup_backend("codegen"))),
        ):
            weft.reset()
            graphs = []
            got = train(rank, options, compiled, lambda gm: graphs.append(gm) or compiler(gm))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert weft.counters["compiled_autograd"]["eager"] == 0, weft.counters
            calls = [n.kwargs.get("hook_type") for g in graphs for n in g.graph.nodes]
            assert "post_hook" in calls and "tensor_pre_hook" in calls, calls
    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo that asks for the interpreter while that shuts down aborts the process.
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(worker, (tempfile.mktemp(),), nprocs=2)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork-safe gloo")
def test_data_parallel_on_two_processes(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
