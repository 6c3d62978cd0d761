"""Where an fx node comes from, as one short text: `gelu at model.py:31: y = F.gelu(x)`."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+).*(?:\n +(.*))?')

_TORCH = os.path.dirname(torch.__file__)


@functools.lru_cache(maxsize=4096)
def _place(trace: str) -> str:
    frames = _FRAME.findall(trace)
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    path, line, code = (own or frames)[-1]
    return f" at {path.rsplit('/', 1)[-1]}:{line}{': ' if code else ''}{code.strip()}"


def origin_text(node: fx.Node) -> str:
    """The node's operator and the user's line that called it, if known."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return f"{name.removesuffix('.default')}{_place(node.meta.get('stack_trace') or '')}"


def by_line(origins: Iterable[str]) -> list[str]:
    """Origins grouped by source line: `model.py:31: y = ...  [mul, add]`."""
    lines: dict[str, list[str]] = {}
    for origin in origins:
        operator, _, place = origin.partition(" at ")
        lines.setdefault(place, []).append(operator)
    texts = ((place, ", ".join(operators)) for place, operators in lines.items())
    return [f"{place}  [{operators}]" if place else operators for place, operators in texts]
