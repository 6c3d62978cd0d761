"""A program in eager, under weft and, where floats differ, in float64."""

from __future__ import annotations

import ast
import linecache
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import weft
import weft_aot.config
from weft_core import events

from .compare import differences
from .inputs import Makers
from .outcomes import observe
from .program import DOUBTFUL, EAGER, Program, Verdict
from .roundings import Roundings

_LOW = re.compile(r"torch\.(float32|float16|bfloat16|half|float)\b")
_REFUSED = ("[operator-error]", "[no-fake-kernel]")  # how the log of such breaks begins
_LOWERED = re.compile(r"\.(bfloat16|half|float)\(\)")

# Kinds of differences that may be roundings: float64 decides.
_ROUNDED = ("values", "mutation", "gradient", "state")


def namespace(source: str, makers: Makers) -> dict[str, Any]:
    """Execute the text of a program's module."""
    module = sys.modules["program"] = types.ModuleType("program")  # where dataclasses look
    found = vars(module)
    found.update(torch=torch, F=F, **makers.names())
    name = f"<program {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), found)
    return found


def arguments(call: str, space: dict[str, Any]) -> tuple[Any, ...]:
    """Run the lines of a call; the last one is the arguments."""
    tree = ast.parse(call)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    exec(compile(tree, "<call>", "exec"), space)
    return eval(compile(ast.Expression(last.value), "<call>", "eval"), space)


def outcomes(
    program: Program,
    makers: Makers,
    wrap: Callable[[Any], Any] = lambda f: f,
    after_call: Callable[[dict[str, Any]], None] = lambda seen: None,
) -> list[dict[str, Any]]:
    """What is seen of each call."""
    source = program.source
    if makers.floats is not None:
        source = _LOWERED.sub(".double()", _LOW.sub("torch.float64", source))
    space = namespace(source, makers)
    function, state, grad = wrap(space["f"]), space.get("state"), torch.is_grad_enabled()
    found = []
    try:
        for call in program.calls:
            found.append(observe(function, arguments(call, space), program.order, state))
            after_call(found[-1])
    finally:
        mock.patch.stopall()
        torch.set_grad_enabled(grad)
    return found


def run(
    program: Program, backend: str = "codegen", eager_done: Callable[[], None] = lambda: None
) -> Verdict:
    """Compare weft with eager, call by call; the first difference counts."""
    eager = outcomes(program, Makers())
    eager_done()
    log = _Log(eager)
    weft.reset()
    try:
        # A backward that is never called is not compiled.
        with log.listening(), weft_aot.config.settings.patch(lazy_backward=not program.order):
            ours = outcomes(
                program, Makers(), lambda f: _compiled(f, program, backend), log.after_call
            )
        told = tuple(events.notified)
    finally:
        weft.reset()
    verdict = _judge(program, eager, ours)
    wrong = [text for text in told if "[internal]" in text or "this is a bug" in text]
    if wrong and not verdict.fails:
        verdict = Verdict("internal error", wrong[0])
    if verdict.kind == "pass" and log.reruns:
        verdict = Verdict("run again", "\n".join(log.reruns))
    return replace(verdict, notices=(*told, *log.refused))


def _compiled(function: Any, program: Program, backend: str) -> Any:
    return weft.compile(function, backend=backend, dynamic=program.dynamic)


def _judge(program: Program, eager: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Verdict:
    lacking = (seen.get("error text", "") for seen in eager)
    if missing := next((text for text in lacking if "not implemented for" in text), ""):
        return Verdict(EAGER, missing)
    rows = enumerate(zip(eager, ours))
    found = [(kind, f"call {n}: {text}") for n, (a, b) in rows for kind, text in differences(a, b)]
    if not found or found[0][0] not in _ROUNDED:
        return Verdict(*found[0]) if found else Verdict()
    runs: list[list[dict[str, Any]]] = []
    try:
        runs.append(outcomes(program, Makers(torch.float64)))
        for nudge in (1, 2, 3):
            runs.append(outcomes(program, Makers(nudge=nudge)))
            runs.append(outcomes(program, Makers(torch.float64, nudge)))
        for seed in range(1, 9):
            with Roundings(seed):
                runs.append(outcomes(program, Makers()))
            runs.append(runs[0])
    except Exception:  # a program that float64 has not: every difference counts
        runs = [[{} for _ in eager]]
    doubts = []
    for number, (a, b, exact, *nudged) in enumerate(zip(eager, ours, *runs)):
        for kind, text in differences(a, b, exact, list(zip(nudged[::2], nudged[1::2]))):
            text = f"call {number}: {text}"
            if kind != DOUBTFUL:
                return Verdict(kind, text)
            doubts.append(text)
    return Verdict(DOUBTFUL, doubts[0]) if doubts else Verdict()


class _Log(logging.Handler):
    """What weft does outside of graphs although eager's call raises nothing.

    `reruns` are graphs that raised: their frame then runs in eager, which makes a wrong graph look
    right and slow. (Not checks: there the program raises, and may catch that.) `refused` are
    operators that capture leaves to eager.
    """

    def __init__(self, eager: list[dict[str, Any]]) -> None:
        super().__init__()
        self.eager = iter(eager)
        self.lines: list[str] = []
        self.reruns: list[str] = []
        self.refused: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage()[:500])

    def after_call(self, seen: dict[str, Any]) -> None:
        """Sort the lines of a call, unless eager raises in it, too."""
        if "error" not in next(self.eager):
            raised = (line for line in self.lines if line.startswith("a graph raised"))
            self.reruns += [line for line in raised if "CheckFailed" not in line]
            self.refused += [line for line in self.lines if line.startswith(_REFUSED)]
        self.lines.clear()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Read the log of graph breaks, and keep it and notices off stderr."""
        logs = events.notices, events.logger("capture", "graph_breaks")
        before = [log.propagate for log in logs]
        on = events.enabled("graph_breaks")
        events.set_logs(graph_breaks=True)
        for log in logs:
            log.propagate = False
        logs[1].addHandler(self)
        try:
            yield
        finally:
            logs[1].removeHandler(self)
            for log, propagate in zip(logs, before):
                log.propagate = propagate
            if not on:
                events.set_logs(graph_breaks=False)
