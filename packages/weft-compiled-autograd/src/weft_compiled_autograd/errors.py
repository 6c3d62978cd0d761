"""Why a backward is not captured. Raised inside a capture, caught before the user could see it.

A backward that meets this runs on the eager engine, or node by node from its tape; the reason is
logged once.
"""

from __future__ import annotations


class NotCapturable(Exception):
    """This backward holds something that cannot be put in a graph.

    Args:
        reason: one line that names what it is.
        replayable: whether running the tape node by node is still exact.
    """

    def __init__(self, reason: str, *, replayable: bool = True) -> None:
        super().__init__(reason)
        self.replayable = replayable
