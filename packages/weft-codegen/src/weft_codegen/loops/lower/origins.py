"""Where an fx node comes from, as one short text: `gelu at model.py:31: y = F.gelu(x)`."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import fx
from weft_core.errors import user_frame


@functools.lru_cache(maxsize=4096)
def _location(trace: str) -> str:
    frame = user_frame(trace)
    if not frame:
        return ""
    path, line, code = frame
    return f" at {path.rsplit('/', 1)[-1]}:{line}{': ' if code else ''}{code.strip()}"


def origin_text(node: fx.Node) -> str:
    """The node's operator and the user's line that called it, if known."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return f"{name.removesuffix('.default')}{_location(node.meta.get('stack_trace') or '')}"


def by_line(origins: Iterable[str]) -> list[str]:
    """Origins grouped by source line: `model.py:31: y = ...  [mul, add]`."""
    lines: dict[str, list[str]] = {}
    for origin in origins:
        operator, _, place = origin.partition(" at ")
        lines.setdefault(place, []).append(operator)
    texts = ((place, ", ".join(operators)) for place, operators in lines.items())
    return [f"{place}  [{operators}]" if place else operators for place, operators in texts]
