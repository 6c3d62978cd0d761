"""The forward values of a joint trace, in the order in which the graph returns them."""

from __future__ import annotations

from typing import Any


class ValueTable:
    """The forward values of a trace: what the graph returns, each with the program's tensor."""

    def __init__(self) -> None:
        self.programs: list[Any] = []
        self.pures: list[Any] = []
        self._index: dict[int, int] = {}

    def add(self, program: Any, pure: Any) -> int:
        """Index of the value; `program` is what autograd knows, `pure` what the graph knows."""
        if id(program) not in self._index:
            self._index[id(program)] = len(self.programs)
            self.programs.append(program)
            self.pures.append(pure)
        return self._index[id(program)]
