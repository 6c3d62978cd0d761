"""A scheduled program as an SVG: a box a kernel or operator call, an arrow a buffer.

Boxes stand in layers, each below everything it reads from, so that all arrows point down.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from weft_codegen.loops.lower.origins import by_line
from weft_codegen.loops.printer import buffer_text
from weft_codegen.loops.program import Alias, BufferRef, Launch, Program, step_reads, step_writes

_LINE, _PAD, _GAP = 14, 8, 36
_CHARACTER = 6.3
_WIDEST = 60
_COLOURS = {"kernel": "#dbe9f6", "operator": "#fbe3c8", "end": "#e8e8e8"}


@dataclass(frozen=True)
class _Box:
    """One step (or an input or output): its text, and the boxes it reads from by buffer."""

    kind: str
    lines: tuple[str, ...]
    sources: tuple[tuple[int, str], ...]
    step: int | None = None

    @property
    def width(self) -> float:
        return max(map(len, self.lines)) * _CHARACTER + 2 * _PAD

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + 2 * _PAD


def svg_of(program: Program) -> str:
    """The diagram of `program` as the text of an SVG file."""
    boxes = list(_boxes(program))
    depth: list[int] = []
    for box in boxes:
        depth.append(1 + max((depth[source] for source, _ in box.sources), default=-1))
    place: dict[int, tuple[float, float]] = {}
    width, top = 0.0, float(_GAP)
    for layer in range(max(depth, default=-1) + 1):
        row = [number for number, found in enumerate(depth) if found == layer]
        left = float(_GAP)
        for number in row:
            place[number] = (left, top)
            left += boxes[number].width + _GAP
        width = max(width, left)
        top += max(boxes[number].height for number in row) + _GAP
    drawn = [*_arrows(boxes, place), *(_drawn(boxes[k], *place[k]) for k in place)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{top:.0f}" font-family="monospace" font-size="10.5">\n' + "\n".join(drawn)
    ) + "\n</svg>\n"


def _boxes(program: Program) -> Iterable[_Box]:
    """Inputs, steps (views are no boxes: readers of one point at what it looks at), outputs."""
    maker: dict[str, int] = {}
    count = 0
    for name in [*(item.name for item in program.inputs), *program.constants]:
        if name in program.buffers:
            maker[name] = count
            count += 1
            yield _Box("end", (buffer_text(program.buffers[name]),), ())
    for position, step in enumerate(program.steps):
        if isinstance(step, Alias):
            maker[step.name] = maker[step.base]
            continue
        sources = _sources(step_reads(step, program.kernels), maker)
        for name in step_writes(step, program.kernels):
            maker[name] = count
        count += 1
        kind = "kernel" if isinstance(step, Launch) else "operator"
        head = step.kernel if isinstance(step, Launch) else str(step.op)
        lines = (textwrap.shorten(line, _WIDEST) for line in by_line(step.origins))
        yield _Box(kind, (head, *lines), sources, position)
    for position, output in enumerate(program.outputs):
        if isinstance(output, BufferRef):
            text = f"output {position}: {buffer_text(program.buffers[output.name])}"
            yield _Box("end", (text,), _sources([output.name], maker))


def _sources(names: Iterable[str], maker: dict[str, int]) -> tuple[tuple[int, str], ...]:
    return tuple((maker[name], name) for name in names if name in maker)


def _arrows(boxes: list[_Box], place: dict[int, tuple[float, float]]) -> Iterable[str]:
    for number, box in enumerate(boxes):
        x, y = place[number]
        for position, (source, name) in enumerate(box.sources):
            left, top = place[source]
            start = left + boxes[source].width / 2, top + boxes[source].height
            end = x + box.width * (position + 1) / (len(box.sources) + 1), y
            yield (
                f'<path d="M{start[0]:.0f},{start[1]:.0f} L{end[0]:.0f},{end[1]:.0f}" '
                f'stroke="#666" fill="none"><title>{escape(name)}</title></path>'
            )


def _drawn(box: _Box, x: float, y: float) -> str:
    lines = "".join(
        f'<text x="{x + _PAD:.0f}" y="{y + _PAD + _LINE * (k + 0.75):.0f}">{escape(line)}</text>'
        for k, line in enumerate(box.lines)
    )
    step = "" if box.step is None else f' data-step="{box.step}"'
    return (
        f'<g{step}><rect x="{x:.0f}" y="{y:.0f}" width="{box.width:.0f}" '
        f'height="{box.height:.0f}" rx="4" fill="{_COLOURS[box.kind]}" stroke="#444"/>{lines}</g>'
    )
