"""Region marks: nodes of equal calls, which may be compiled once.

`meta["regions"]` of a node lists its calls, outermost first: a number, the callee, and how many
variants may be compiled, None for an unmarked module's call. `meta["left_as"]` has the state of a
result when the next call began or ended, as it may be written later. Calls of modules are marked on
request.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import Node
from weft_core.tensor_versions import version_of

from weft_capture.model.protocol import Tracer

_CALLS = itertools.count()


@contextmanager
def mark_call(tx: Tracer, callee: str, limit: int | None = None) -> Iterator[None]:
    """Mark the operations of the block as one call, if it restores the modes.

    Args:
        tx: the capture.
        callee: the function or class that is called.
        limit: how many variants may be compiled; None for a module's call.
    """
    if limit is None and not tx.marks_modules:
        yield
        return
    last, before = next(iter(reversed(tx.graph.graph.nodes)), None), modes_of(tx)
    _note_results(tx)
    yield
    _note_results(tx)
    if not tx.transforms and modes_of(tx) == before:
        mark = next(_CALLS), callee, limit
        for node in nodes_after(tx, last):
            inner = node.meta.get("regions", ())
            node.meta["regions"] = (mark, *inner)
            tx.journal.on_rollback(functools.partial(node.meta.update, regions=inner))


def _note_results(tx: Tracer) -> None:
    for node in reversed(tx.graph.graph.nodes):
        if "left_as" in node.meta:
            return
        if node.op != "placeholder":
            node.meta["left_as"] = result_state(node)


def result_state(node: Node) -> object:
    """Return the state of a tensor that later operations may change."""
    result = node.meta.get("example_value")
    return (version_of(result), result.requires_grad) if isinstance(result, torch.Tensor) else None


def modes_of(tx: Tracer) -> tuple[object, ...]:
    """Return the current modes of the program."""
    return torch.is_grad_enabled(), tuple(tx.open_contexts), len(tx.transforms)


def nodes_after(tx: Tracer, last: Node | None) -> list[Node]:
    """Return the operations added since `last` was the newest node of the graph."""
    nodes: list[Node] = []
    for node in reversed(tx.graph.graph.nodes):
        if node is last:
            break
        if node.op != "placeholder":
            nodes.append(node)
    return nodes[::-1]
