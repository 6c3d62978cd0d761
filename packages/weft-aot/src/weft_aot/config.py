"""Settings of weft_aot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft_core.settings import Settings


@dataclass
class AotSettings(Settings):
    """Process-wide settings.

    Args:
        lazy_backward: compile a backward when it is first called, so that a program that never
            calls it does not pay; errors of its compiler then appear there.
        recompute: let the backward compute cheap values again; without it all it needs is saved.
        optimize_ddp: hand gradients over in buckets, so that DistributedDataParallel reduces some
            while others are made.
        activation_memory_budget: share of the memory between forward and backward that may be used,
            from 1 (what the backward would take long to compute is saved) to 0 (everything is
            computed again); the backward computes again what costs the least.
        chunk_cross_entropy: compute a linear layer and its cross entropy in chunks of rows, so that
            the logits are never in memory all at once; `"auto"` where they are large, on a CPU.
        fuse_attention: compute attention that the program spells out by torch's fused operator;
            `True` also where it has dropout, for which that draws other numbers than eager, and
            where it trains with unknown numbers added to the scores, whose gradients differ for a
            query that numbers such as `finfo.min` leave without a key.
    """

    lazy_backward: bool = False
    recompute: bool = True
    optimize_ddp: bool = True
    chunk_cross_entropy: bool | Literal["auto"] = "auto"
    activation_memory_budget: float = 1.0
    fuse_attention: bool | Literal["auto"] = "auto"


settings = AotSettings()
