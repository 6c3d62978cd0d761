"""Where an fx node comes from, as one short text: `gelu at model.py:31`."""

from __future__ import annotations

import functools
import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@functools.lru_cache(maxsize=4096)
def _place(trace: str) -> str:
    frames = _FRAME.findall(trace)
    if not frames:
        return ""
    path, line = frames[-1]
    return f" at {path.rsplit('/', 1)[-1]}:{line}"


def origin_text(node: fx.Node) -> str:
    """The node's operator and the user's line that called it, if known."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return f"{name.removesuffix('.default')}{_place(node.meta.get('stack_trace') or '')}"
