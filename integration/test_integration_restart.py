"""torchrun starts a job again after a process died: training goes on from its checkpoint, with the
code that the first attempt compiled."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import weft
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, DIES_IN = 2, 6, 3


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


def batch(step, rank):
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    return torch.randn(5, 6, generator=generator)


def loss_of(model, step, rank):
    return model(batch(step, rank)).square().mean()


def train(folder: Path):
    """What torchrun starts in each process: the second one dies in a step of the first attempt."""
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    began = time.time()
    model = DistributedDataParallel(weft.compile(make()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saved = folder / "saved"
    state = {"model": model.state_dict(), "step": 0}
    if saved.exists():
        checkpoint.load(state, checkpoint_id=saved)
        model.load_state_dict(state["model"])
    for step in range(state["step"], STEPS):
        if (step, rank, attempt) == (DIES_IN, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "step": step + 1}
        checkpoint.save(state, checkpoint_id=saved)
    if rank == 0:
        told = {
            "attempt": attempt,
            "began": began,
            "graphs": weft.counters["stats"]["unique_graphs"],
            "parameters": {n: p.tolist() for n, p in model.module.state_dict().items()},
        }
        (folder / "told.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo that asks for the interpreter while that shuts down aborts the process.
    os._exit(0)


def test_a_restarted_job_goes_on_from_its_checkpoint(tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--max-restarts=1", __file__, str(tmp_path)]
    environment = {**os.environ, "WEFT_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    # The store that torchrun shares with its processes does not always outlive one of them.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["attempt"] == 1 and told["graphs"] == 1
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        (sum(loss_of(model, step, rank) for rank in range(RANKS)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(told["parameters"][name]), expected)
    built = [path.stat().st_mtime for path in cache.rglob("*.so")]
    assert len(built) == 2 and max(built) < told["began"]  # the first attempt's


if __name__ == "__main__":
    train(Path(sys.argv[1]))
