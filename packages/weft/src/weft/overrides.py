"""Another backend for some graphs: `WEFT_OVERRIDES="0-3:aot_eager,5:eager"`, `config.overrides`.

To find the graph that goes wrong, compile half of them and run the others eagerly. Graphs are
numbered from 0 in the order of capture, as the logs `graph` and `graph_breaks` and `weft.report()`
number them; `weft.reset()` begins again.
"""

from __future__ import annotations

import re

from weft_core.errors import InvalidArgument

from weft.settings import umbrella

_ENTRY = re.compile(r"\s*(\d*)\s*(-?)\s*(\d*)\s*:\s*(\S+)\s*")


def override(number: int) -> str | None:
    """Return the name of the backend that `config.overrides` gives to a graph, or None.

    Raises:
        InvalidArgument: for a text that is no list of `number:backend` and `first-last:backend`.
    """
    for entry in filter(None, umbrella.overrides.split(",")):
        found = _ENTRY.fullmatch(entry)
        if found is None or not (found[1] or found[2]):
            detail = f"overrides takes entries like 3:eager, 0-3:eager and 7-:eager, not {entry!r}."
            raise InvalidArgument("overrides", detail=detail)
        first = int(found[1] or 0)
        last = (int(found[3]) if found[3] else number) if found[2] else first
        if first <= number <= last:
            return found[4]
    return None
