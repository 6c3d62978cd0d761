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
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import weft

from .compare import differences
from .inputs import Makers
from .outcomes import observe
from .program import DOUBTFUL, Program, Verdict

_LOW = re.compile(r"torch\.(float32|float16|bfloat16|half|float)\b")


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
    program: Program, makers: Makers, wrap: Callable[[Any], Any] = lambda f: f
) -> list[dict[str, Any]]:
    """What is seen of each call."""
    source = program.source
    if makers.floats is not None:
        source = _LOW.sub("torch.float64", source)
    space = namespace(source, makers)
    function, state, grad = wrap(space["f"]), space.get("state"), torch.is_grad_enabled()
    try:
        return [
            observe(function, arguments(call, space), program.order, state)
            for call in program.calls
        ]
    finally:
        mock.patch.stopall()
        torch.set_grad_enabled(grad)


def run(
    program: Program, backend: str = "codegen", eager_done: Callable[[], None] = lambda: None
) -> Verdict:
    """Compare weft with eager, call by call; the first difference counts."""
    eager = outcomes(program, Makers())
    eager_done()
    said: list[str] = []
    weft.reset()
    try:
        with _notices(said):
            ours = outcomes(program, Makers(), lambda f: _compiled(f, program, backend))
    finally:
        weft.reset()
    verdict = _judge(program, eager, ours)
    wrong = [text for text in said if "[internal]" in text or "this is a bug" in text]
    if wrong and not verdict.fails:
        verdict = Verdict("internal error", wrong[0])
    return Verdict(verdict.kind, verdict.detail, tuple(said))


def _compiled(function: Any, program: Program, backend: str) -> Any:
    return weft.compile(function, backend=backend, dynamic=program.dynamic)


def _judge(program: Program, eager: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Verdict:
    rows = enumerate(zip(eager, ours))
    found = [(kind, f"call {n}: {text}") for n, (a, b) in rows for kind, text in differences(a, b)]
    if not found or found[0][0] not in _ROUNDED:
        return Verdict(*found[0]) if found else Verdict()
    exact: list[Any] = [None] * len(eager)
    moved = exact
    try:
        exact = outcomes(program, Makers(torch.float64))
        moved = outcomes(program, Makers(torch.float64, nudge=True))
    except Exception:  # a program that float64 has not: every difference counts
        pass
    doubts = []
    for number, rows in enumerate(zip(eager, ours, exact, moved)):
        for kind, text in differences(*rows):
            text = f"call {number}: {text}"
            if kind != DOUBTFUL:
                return Verdict(kind, text)
            doubts.append(text)
    return Verdict(DOUBTFUL, doubts[0]) if doubts else Verdict()


class _Collector(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage()[:500])


@contextmanager
def _notices(said: list[str]) -> Iterator[None]:
    """Collect what weft tells of graphs that it does not compile, and keep it off stderr."""
    logger, handler = logging.getLogger("weft.notices"), _Collector(said)
    passed_on, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = passed_on
