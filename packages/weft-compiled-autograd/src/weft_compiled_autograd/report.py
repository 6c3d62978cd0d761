"""What this package tells: captured graphs, why the engine's cache missed, why it was not used.

The miss reasons come from the engine, through a logger object that it calls; torch versions word
the one about sizes differently, so it is put here in the documented words:

    Cache miss due to new autograd node: SubBackward0 (NodeCall 2) with key size 56, previous ...
    Cache miss due to changed shapes: marking size idx 0 of SumBackward0 (NodeCall 1) as dynamic
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule
from weft_core.events import enabled, logger

from weft_compiled_autograd.tape import ORIGIN

graph_log = logger("compiled_autograd", "compiled_autograd")
verbose_log = logger("compiled_autograd", "compiled_autograd_verbose")

_SIZE = re.compile(r"sizes\[(\d+)\]")
_NATIVE = re.compile(r"Cache miss due to changed shapes: marking size idx")
_COMMENT = re.compile(r"^(\s*)# File: autograd:0 in backward, code: (.*)$", re.MULTILINE)

EAGER = "backward not captured, it runs on the eager engine"
TAPE = "backward not captured, it runs node by node"
IN_PART = "backward captured, but one node of it runs as it is"


@functools.cache
def report_once(reason: str, what: str = EAGER) -> None:
    """Log why a backward does not run as one graph, once for each reason."""
    graph_log.warning("%s: %s", what, reason)


def first_line(problem: Exception) -> str:
    """An exception's type and the first line of its text."""
    return f"{type(problem).__name__}: {problem}".strip().split("\n", 1)[0]


def is_verbose() -> bool:
    """Whether the engine should be asked for miss reasons."""
    return enabled("compiled_autograd_verbose")


class MissLog:
    """The logger that the engine calls. Messages about sizes wait until their nodes are known."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def debug(self, message: str) -> None:
        """Take one message from the engine."""
        if "changed" in message and "shapes" in message and not _NATIVE.match(message):
            self._sizes = [int(text) for text in _SIZE.findall(message)]
        else:
            verbose_log.info("%s", message)

    info = warning = error = critical = debug

    def name_sizes(self, origins: Sequence[tuple[int, str]]) -> None:
        """Log the sizes that changed; `origins` gives each dynamic size's autograd node."""
        changed, self._sizes = self._sizes, []
        report_sizes(changed, origins)


def report_sizes(changed: Sequence[int], origins: Sequence[tuple[int, str]]) -> None:
    """Log that these of the backward's sizes changed."""
    for size in changed:
        if size >= len(origins):  # a size that an autograd.Function saved: no node is known for it
            continue
        call, name = origins[size]
        position = sum(1 for other in origins[:size] if other[0] == call)
        verbose_log.info(
            "Cache miss due to changed shapes: marking size idx %d of %s (NodeCall %d) as dynamic",
            position,
            name.removeprefix("struct "),
            call,
        )


miss_log = MissLog()
"""The one logger that the engine is given; it must outlive the process's last backward."""


def show_graph(module: GraphModule) -> None:
    """Log a captured graph: plain as `compiled_autograd`, with layouts as the verbose artifact."""
    if enabled("compiled_autograd"):
        graph_log.info("%s", readable(module, verbose=False))
    if is_verbose():
        verbose_log.info("%s", readable(module, verbose=True))


def readable(module: GraphModule, *, verbose: bool) -> str:
    """Print a graph with the autograd node of each part as a comment.

    Args:
        module: a captured backward.
        verbose: add dtype, sizes, strides and device of each value.
    """
    for node in module.graph.nodes:
        if ORIGIN in node.meta:
            node.meta["stack_trace"] = (
                f'  File "autograd", line 0, in backward\n    {node.meta[ORIGIN]}\n'
            )
    text: Any = module.print_readable(
        print_output=False, include_stride=verbose, include_device=verbose, colored=False
    )
    text = text.replace("        # No stacktrace found for following nodes\n", "")
    return f"Compiled autograd graph\n{_COMMENT.sub(lambda m: f'{m[1]}# {m[2]}', text)}"
