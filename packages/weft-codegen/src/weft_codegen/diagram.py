"""A scheduled program as an SVG: a box a kernel or operator call, an arrow a buffer.

Boxes stand in layers, each below everything it reads from, so that all arrows point down.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import chain

from weft_codegen.loops.lower.origins import by_line
from weft_codegen.loops.printer import buffer_text
from weft_codegen.loops.program import Alias, BufferRef, Launch, Program, step_reads, step_writes

_LINE, _PAD, _GAP = 14, 8, 36
_CHARACTER = 6.3
_WIDEST = 60
_COLOURS = {"kernel": "#dbe9f6", "operator": "#fbe3c8", "end": "#e8e8e8"}


@dataclass
class _Box:
    """One step (or an input or output): its text, and the boxes it reads from by buffer."""

    kind: str
    lines: list[str]
    sources: list[tuple[_Box, str]]
    step: int | None = None
    x: float = 0.0
    y: float = 0.0

    def __post_init__(self) -> None:
        self.depth: int = 1 + max((source.depth for source, _ in self.sources), default=-1)
        self.width = max(map(len, self.lines)) * _CHARACTER + 2 * _PAD
        self.height = len(self.lines) * _LINE + 2 * _PAD

    def arrows(self) -> Iterator[str]:
        """The arrows to it."""
        for number, (source, name) in enumerate(self.sources, 1):
            start = f"{source.x + source.width / 2:.0f},{source.y + source.height:.0f}"
            end = f"{self.x + self.width * number / (len(self.sources) + 1):.0f},{self.y:.0f}"
            title = f"<title>{escape(name)}</title>"
            yield f'<path d="M{start} L{end}" stroke="#666" fill="none">{title}</path>'

    def svg(self) -> Iterator[str]:
        """The box."""
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" rx="4"'
        fill = f'fill="{_COLOURS[self.kind]}" stroke="#444"'
        step = "" if self.step is None else f' data-step="{self.step}"'
        yield f'<g{step}><rect x="{self.x:.0f}" y="{self.y:.0f}" {size} {fill}/>'
        for k, line in enumerate(self.lines):
            y = self.y + _PAD + _LINE * (k + 0.75)
            yield f'<text x="{self.x + _PAD:.0f}" y="{y:.0f}">{escape(line)}</text>'
        yield "</g>"


def svg_of(program: Program) -> str:
    """The diagram of `program` as the text of an SVG file."""
    layers: defaultdict[int, list[_Box]] = defaultdict(list)
    for box in _boxes(program):
        layers[box.depth].append(box)
    width, top = 0.0, float(_GAP)
    for _, layer in sorted(layers.items()):
        left = float(_GAP)
        for box in layer:
            box.x, box.y = left, top
            left += box.width + _GAP
        width = max(width, left)
        top += max(box.height for box in layer) + _GAP
    size = f'width="{width:.0f}" height="{top:.0f}" font-family="monospace" font-size="10.5"'
    boxes = [box for layer in layers.values() for box in layer]
    drawn = [*chain(*(box.arrows() for box in boxes)), *chain(*(box.svg() for box in boxes))]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, *drawn, "</svg>", ""])


def _boxes(program: Program) -> Iterator[_Box]:
    """Inputs, steps (views are no boxes: readers of one point at what it looks at), outputs."""
    makers: dict[str, _Box] = {}

    def box(kind: str, lines: Iterable[str], reads: Iterable[str] = ()) -> _Box:
        return _Box(kind, list(lines), [(makers[name], name) for name in reads if name in makers])

    for name in [*(item.name for item in program.inputs), *program.constants]:
        if name in program.buffers:
            makers[name] = box("end", [buffer_text(program.buffers[name])])
            yield makers[name]
    for position, step in enumerate(program.steps):
        if isinstance(step, Alias):
            makers[step.name] = makers[step.base]
            continue
        launch = isinstance(step, Launch)
        head = step.kernel if isinstance(step, Launch) else str(step.op)
        lines = [head, *(textwrap.shorten(line, _WIDEST) for line in by_line(step.origins))]
        reads = step_reads(step, program.kernels)
        made = box("kernel" if launch else "operator", lines, reads)
        made.step = position
        makers.update(dict.fromkeys(step_writes(step, program.kernels), made))
        yield made
    for position, output in enumerate(program.outputs):
        if isinstance(output, BufferRef):
            text = f"output {position}: {buffer_text(program.buffers[output.name])}"
            yield box("end", [text], [output.name])
