"""The state of the process: what is compiled, and whether anything may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import weft_capture
import weft_compiled_autograd
from weft_core import events, recording
from weft_core.arguments import checked

from weft.pipeline import CompileRequest, graph_compiler


def reset() -> None:
    """Drop compiled code, counters, timings and records; the disk cache and the settings stay."""
    weft_capture.reset()
    weft_compiled_autograd.reset()
    events.reset()
    if recording.current() is not None:
        recording.switch(False)
        recording.switch(True)


@checked
def set_stance(
    stance: str = "default",
    *,
    skip_guard_eval_unsafe: bool = False,
    force_backend: str | Callable[..., Any] | None = None,
) -> weft_capture.set_stance:
    """Set the stance of all compiled functions, as `weft_capture.set_stance` describes it.

    `force_backend` may be a backend's name here.

    Raises:
        InvalidOption: for an unknown stance.
        InvalidBackend: for an unknown backend.
    """
    backend = None if force_backend is None else graph_compiler(CompileRequest(force_backend))
    return weft_capture.set_stance(
        stance, skip_guard_eval_unsafe=skip_guard_eval_unsafe, force_backend=backend
    )
