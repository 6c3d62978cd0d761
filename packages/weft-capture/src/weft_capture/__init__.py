"""Frame capture: from the bytecode of a running function to fx graphs, guards and new bytecode.

`capture` optimises a function with any torch.compile-style backend, `explain` tells what capture
makes of it. `convert` is the pipeline; docs/architecture/capture.md has the other folders.
"""

from typing import TYPE_CHECKING, Any

import weft_capture.libraries  # noqa: F401  fills the tables of library_traits
from weft_capture.api import Capture, Explanation, capture, explain, report, reset
from weft_capture.breaks import REASONS, Break, BreakRecord
from weft_capture.config import settings
from weft_capture.convert import CaptureLimit
from weft_capture.decorators import (
    allow_in_graph,
    assume_constant_result,
    disable,
    disallow_in_graph,
    error_on_graph_break,
    graph_break,
    is_compiling,
    nonstrict_trace,
    skip_frame,
    substitute_in_graph,
)
from weft_capture.effects.rehearsals import leave_backwards, running
from weft_capture.passes.graph_split import compile_split
from weft_capture.passes.region_dedup import compile_regions
from weft_capture.policy.rank_agreement import agree_on_guards
from weft_capture.policy.reports import FrameReport, Report
from weft_capture.policy.stance import set_stance

if TYPE_CHECKING:
    from weft_capture.output.frame_code import code_of, show_code

__all__ = [
    "REASONS",
    "Break",
    "BreakRecord",
    "Capture",
    "CaptureLimit",
    "Explanation",
    "FrameReport",
    "Report",
    "agree_on_guards",
    "allow_in_graph",
    "assume_constant_result",
    "capture",
    "code_of",
    "compile_regions",
    "compile_split",
    "disable",
    "disallow_in_graph",
    "error_on_graph_break",
    "explain",
    "graph_break",
    "is_compiling",
    "leave_backwards",
    "nonstrict_trace",
    "report",
    "reset",
    "running",
    "set_stance",
    "settings",
    "show_code",
    "skip_frame",
    "substitute_in_graph",
]


def __getattr__(name: str) -> Any:
    """Load what is for people when somebody asks for it."""
    if name not in ("code_of", "show_code"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weft_capture.output import frame_code  # noqa: PLC0415

    return getattr(frame_code, name)
