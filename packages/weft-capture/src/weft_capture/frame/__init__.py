"""The frame-evaluation hook: replacement code for chosen functions, per thread.

docs/architecture/capture-frame.md tells what each function does and how frames go by.
"""

from __future__ import annotations

from ._hook import current, enter, forget, has_dict, is_active, run, set_lookup, skip, tail_call

__all__ = [
    "current", "enter", "forget", "has_dict", "is_active", "run", "set_lookup", "skip",
    "tail_call",
]  # fmt: skip
