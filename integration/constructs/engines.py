"""Run a case eagerly and compiled, and judge what came of it.

pass     same outcome in one graph (fullgraph) or in several (default)
break    fullgraph only: an error that names the reason
wrong    another outcome than eager's
silent   the same outcome, but nothing was compiled and nobody said why
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import weft_capture
from weft_core.errors import Unsupported
from weft_core.events import notices

from constructs import Case
from constructs.observe import differences, observe

notices.addHandler(logging.NullHandler())  # they are no part of what a case prints


@dataclass(frozen=True)
class Verdict:
    """What came of a case: `status` as in the module's text, and reason codes or differences."""

    status: str
    detail: str = ""
    codes: tuple[str, ...] = ()


def _run_graph(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    return graph.forward  # type: ignore[no-any-return]


def weft(case: Case, *, fullgraph: bool) -> Verdict:
    """Run a case with weft's capture and plain graphs."""
    with contextlib.redirect_stdout(None):
        expected = observe(case.function, case)
    optimised = weft_capture.capture(case.function, _run_graph, fullgraph=fullgraph)
    state = optimised._weft_capture  # type: ignore[attr-defined]
    try:
        with weft_capture.settings.patch(capture_scalar_outputs=case.reads_data):
            got = observe(optimised, case)
        breaks = [record for record in state.breaks if record.code != "uncaught-exception"]
        codes = tuple(record.code for record in state.breaks)
        refused = next((o.error for o in got if isinstance(o.error, Unsupported)), None)
        if refused is not None:
            return Verdict("break", str(refused), (refused.code,))
        wrong = differences(expected, got)
        if wrong:
            return Verdict("wrong", "; ".join(wrong), codes)
        if not state.graphs and not codes:
            return Verdict("silent")
        detail = "; ".join(f"{record.code} ({record.detail})" for record in breaks)
        return Verdict("pass", detail, tuple(record.code for record in breaks))
    finally:
        state.forget()
