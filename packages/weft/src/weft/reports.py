"""`weft.report()`: what became of every frame, as text, as a page and as a trace.

The page and its scripts are files in `weft/report_page`; `report_data.py` makes the data in it.
With `config.record` on, or under `python -m weft report`, it shows the graphs and their code too.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import weft_capture
from torch import distributed
from weft_core import events
from weft_core.arguments import checked
from weft_core.recording import Recording, current

from weft import report_data

_HEIGHT = 760  # pixels of the page in a notebook


@dataclass(frozen=True)
class Report(weft_capture.Report):
    """The frames since the last reset; `print` it, save it as a page, or look at it in a notebook.

    Args:
        stages: seconds that each stage of compiling took, without the stages inside of it.
        recording: the graphs and moments that were kept; None without `config.record`.
    """

    stages: tuple[tuple[str, float, int], ...] = ()
    recording: Recording | None = None

    @cached_property
    def html(self) -> str:
        """The report as one HTML page, which needs no other file and no network."""
        parts = report_data.page_parts(self, self.stages, self.recording)
        page = resources.files("weft").joinpath("report_page")
        text = page.joinpath("page.html").read_text("utf-8")
        for name in ("page.css", "page.js"):
            text = text.replace(f"/*{name}*/", page.joinpath(name).read_text("utf-8"))
        scripts = (
            f'<script type="application/json" id="{name}">{_script_json(data)}</script>'
            for name, data in parts
        )
        return text.replace("<!--data-->", "\n".join(scripts))

    @checked
    def save(self, path: str | Path) -> Path:
        """Write the page to a file; returns its path.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        path.write_text(self.html, "utf-8")
        return path

    @checked
    def save_trace(self, path: str | Path) -> Path:
        """Write the recorded time of compiling in Chrome's trace format, for ui.perfetto.dev.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        path.write_text(json.dumps(report_data.trace_of(self.recording)), "utf-8")
        return path

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{_HEIGHT}px;border:1px solid #ccc"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}"></iframe>'


def report() -> Report:
    """Report the outcome of every frame that was captured since the last reset."""
    outcome = weft_capture.report()
    with events.timings_lock:
        stages = [(name, t.seconds, t.count) for name, t in events.timings.items()]
    stages.sort(key=lambda row: -row[1])
    return Report(outcome.frames, outcome.told, tuple(stages), current())


@dataclass(frozen=True)
class RankReports:
    """The reports of all ranks; printed, what differs between them.

    Args:
        texts: for each rank, by function, what `Report` says of it.
    """

    texts: tuple[dict[str, str], ...]

    @property
    def differing(self) -> dict[str, dict[str, list[int]]]:
        """For each function that ranks compiled differently, the ranks with each outcome."""
        found: dict[str, dict[str, list[int]]] = {}
        for name in dict.fromkeys(name for texts in self.texts for name in texts):
            outcomes: dict[str, list[int]] = {}
            for rank, texts in enumerate(self.texts):
                outcomes.setdefault(texts.get(name, "not called"), []).append(rank)
            if len(outcomes) > 1:
                found[name] = outcomes
        return found

    def __str__(self) -> str:
        lines = [f"{len(self.texts)} ranks, {len(self.differing)} functions differ"]
        for name, outcomes in self.differing.items():
            lines.append(name)
            for text, ranks in outcomes.items():
                lines.append(f"  rank {', '.join(map(str, ranks))}: {text}")
        return "\n".join(lines)


@checked
def report_by_rank(group: Any = None) -> RankReports:
    """Collect the reports of all ranks of a process group, each of which has to call it.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    own: dict[str, str] = {}
    for f in weft_capture.report().frames:
        breaks = sorted(f"{record.code} ({record.detail})" for record in f.breaks)
        lost = sorted(record.code for record in f.lost)
        own[f"{f.name} ({f.filename}:{f.line})"] = (
            f"{f.graphs} graphs, {f.ops} ops, {len(f.recompiles)} recompiles"
            + "".join(f", break {text}" for text in breaks)
            + "".join(f", eager {text}" for text in lost)
        )
    texts: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(texts, own, group)
    return RankReports(tuple(texts))


def _script_json(data: Any) -> str:
    """JSON that an HTML parser takes as one text: `<` would end the script."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
