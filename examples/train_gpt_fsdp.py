"""Sharded training (FSDP2) of a small GPT, eager and weft side by side: `nox -s fsdp`.

    torchrun --nproc-per-node 2 examples/train_gpt_fsdp.py

gloo on CPUs, NCCL on GPUs. Each block's parameters are gathered in the graph before it runs, and
again in the backward; gradients are reduced there to the shards.
"""

import torch
from distributed_gpt import train
from gpt import GPT
from torch import nn
from torch.distributed.fsdp import fully_shard


def wrap(model: GPT, device: torch.device) -> nn.Module:
    """Shard every block, and the rest of the model."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


if __name__ == "__main__":
    train(wrap, __doc__)
