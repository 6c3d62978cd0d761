"""Lines of C: indentation, blocks, and the comments that say where a loop comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from weft_codegen.loops.index import Axis
from weft_codegen.loops.lower.origins import by_line

NOTE = "/* @ "


def without_notes(text: str) -> str:
    """C text without the lines that `CText.notes` wrote: what the compiler gets."""
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(NOTE))


class CText:
    """Lines of C with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 0

    def line(self, text: str) -> None:
        """One line at the current depth."""
        self.lines.append("    " * self._depth + text)

    def notes(self, origins: Iterable[str]) -> None:
        """Comments that say where a loop comes from (`without_notes` takes them out again)."""
        for text in by_line(origins):
            self.line(f"{NOTE}{text.replace('*/', '* /')} */")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A block with what is written inside: a function at depth zero, else a statement."""
        if self._depth == 0:
            self.lines += [*head.splitlines(), "{"]
        else:
            self.line(f"{head} {{" if head else "{")
        self._depth += 1
        yield
        self._depth -= 1
        self.line("}")
        if self._depth == 0:
            self.lines.append("")


def for_head(axis: Axis, start: str, end: str) -> str:
    """`for (axis from start to end)`"""
    return f"for (int64_t {axis.key} = {start}; {axis.key} < {end}; {axis.key}++)"
