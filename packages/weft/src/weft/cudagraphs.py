"""Backend `cudagraphs`: run the captured graph op by op inside a recorded CUDA graph.

CUDA graphs exist on CUDA devices alone, so on this machine's CPU the backend says so at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from weft_core.errors import BackendCompilerError

from weft.backends import Compiled


def cudagraphs(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Compiled:
    """Compile nothing yet: recording is not built.

    Raises:
        BackendCompilerError: always; it says what to use instead.
    """
    devices = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    cause = "CUDA graphs need inputs on a CUDA device; these are on " + ", ".join(sorted(devices))
    if devices == {"cuda"}:
        cause = "recording CUDA graphs is not built yet"
    raise BackendCompilerError("cudagraphs", cause, remedy='use backend="codegen"')


def cudagraph_mark_step_begin() -> None:
    """Mark the start of a step, as torch.compiler's function does; nothing is recorded yet."""
