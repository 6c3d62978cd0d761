"""Forget everything that was compiled in this process."""

from __future__ import annotations

import weft_capture
import weft_compiled_autograd
from weft_core import events

from weft import failures


def reset() -> None:
    """Drop compiled code, counters and timings; the disk cache and the settings stay."""
    weft_capture.reset()
    weft_compiled_autograd.reset()
    failures.reset()
    events.reset()
