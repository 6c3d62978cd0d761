"""Settings of weft_capture; `weft.config` chains them with those of the other packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from weft_core.arguments import AtLeast
from weft_core.settings import Settings


@dataclass
class CaptureSettings(Settings):
    """Settings of symbolic execution.

    Args:
        inline_depth: how deeply calls are inlined before a call becomes a graph break.
        instruction_limit: how many instructions of one frame are executed in one capture.
        plain_limit: how many as long as no tensor was met; then the frame runs eagerly.
        unrolled_steps: how many steps (times layers, times directions) a recurrent network may
            have that is unrolled into the graph; a longer one breaks it.
        raise_internal_errors: raise errors of capture itself, instead of running the frame eagerly
            with one warning; for tests.
        capture_scalar_outputs: capture operations that read numbers and sizes from tensors
            (`item`, `tolist`, `nonzero`, `x[mask]`, `unique`) as symbols; False breaks there.
        capture_backward: capture `backward()`, so that a training step is one graph; False breaks
            there, and the tensors saved for the backward are chosen to save memory.
        caching_precompile: store captures in the cache folder, so that another process only tests
            guards and compiles the graphs.
        debug_code: a folder: the code that replaces a frame is written there as Python text, and
            that file is what runs, so that a debugger can step through it; "" for none.
    """

    inline_depth: Annotated[int, AtLeast(0)] = 200
    instruction_limit: Annotated[int, AtLeast(1)] = 1_000_000
    plain_limit: Annotated[int, AtLeast(1)] = 100_000
    unrolled_steps: Annotated[int, AtLeast(0)] = 256
    raise_internal_errors: bool = False
    capture_scalar_outputs: bool = False
    capture_backward: bool = True
    caching_precompile: bool = False
    debug_code: str = ""


settings = CaptureSettings()
