"""Options of torch.compile that change nothing in weft, and why (inert_options.txt).

A program keeps its `options=` dictionary when it switches to weft: an option that weft has goes to
the code generator, one of these is accepted with a notice, and any other is an error that suggests
the nearest name.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources


@cache
def _reasons() -> list[tuple[str, list[str]]]:
    """Each reason with the patterns of names below it."""
    rows: list[tuple[str, list[str]]] = []
    for line in resources.files("weft").joinpath("inert_options.txt").read_text().splitlines():
        if line.startswith(" "):
            rows[-1][1].extend(line.split())
        elif line and not line.startswith("#"):
            rows.append((line, []))
    return rows


def why_inert(option: str) -> str | None:
    """Return why an option of torch.compile has no effect; None for a name that is not known."""
    for why, patterns in _reasons():
        if any(re.fullmatch(pattern, option) for pattern in patterns):
            return why
    return None
