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
        chunk_cross_entropy: compute a linear layer and its cross entropy in chunks of rows, so that
            the logits are never in memory all at once; `"auto"` where they are large.
    """

    lazy_backward: bool = False
    recompute: bool = True
    optimize_ddp: bool = True
    chunk_cross_entropy: bool | Literal["auto"] = "auto"


settings = AotSettings()
