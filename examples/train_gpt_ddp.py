"""Data parallel training of a small GPT, eager and weft side by side: `nox -s ddp`.

    torchrun --nproc-per-node 2 examples/train_gpt_ddp.py

gloo on CPUs, NCCL on GPUs. The compiled backward hands gradients over in buckets, so that
DistributedDataParallel reduces some while others are made.
"""

import torch
from distributed_gpt import train
from gpt import GPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrap(model: GPT, device: torch.device) -> nn.Module:
    """Return the model in DistributedDataParallel."""
    return DistributedDataParallel(model, device_ids=None if device.index is None else [device])


if __name__ == "__main__":
    train(wrap, __doc__)
