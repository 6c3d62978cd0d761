"""Processes that talk over gloo: a test file runs itself in several of them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch.distributed as dist
import torch.multiprocessing as mp


def on_processes(body: Callable[[int], None], count: int = 2) -> None:
    """Call `body` with the rank in each of `count` processes of one group, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WEFT_CACHE_DIR"] = f"{folder}/cache"
        mp.spawn(_run, (body, count, f"{folder}/group"), nprocs=count)


def _run(rank: int, body: Callable[[int], None], count: int, path: str) -> None:
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=count)
    body(rank)
    dist.barrier()
    dist.destroy_process_group()
    # A thread of gloo that asks for the interpreter while that shuts down aborts the process.
    os._exit(0)


def run_file(file: str, *arguments: str) -> None:
    """Run a Python file in a process of its own, which must succeed."""
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
