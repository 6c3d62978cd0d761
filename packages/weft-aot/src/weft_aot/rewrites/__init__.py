"""Rewrites of a captured program before it is traced: autograd then sees the better form.

Each rewrite finds its patterns in a copy of the captured graph. The graph itself stays as it is,
because second derivatives and reports use it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from weft_core import events

from weft_aot.rewrites import attention, linear_loss
from weft_aot.rewrites.match import call_name, writes

Rewrite = Callable[[fx.Graph], int]
"""Changes a graph in place; returns in how many spots."""

_REWRITES: tuple[tuple[frozenset[str], Rewrite], ...] = (
    (linear_loss.ANCHORS, linear_loss.chunk_losses),
    (attention.ANCHORS, attention.fuse_attention),
)
"""The functions that a pattern ends in, and what rewrites it."""


def rewrite(gm: fx.GraphModule, fakes: list[object]) -> fx.GraphModule:
    """Return `gm`, or a copy with its patterns rewritten.

    Args:
        gm: torch-level graph.
        fakes: one per placeholder.
    """
    names = {call_name(node) for node in gm.graph.nodes}
    wanted = [change for anchors, change in _REWRITES if anchors & names]
    if not wanted:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if not _has_examples(graph) and not _propagate(gm, graph, fakes):
        return gm
    count = sum(change(graph) for change in wanted)
    if not count:
        return gm
    events.counters["aot"]["rewrites"] += count
    return _LazyGraphModule(gm, graph)


def _has_examples(graph: fx.Graph) -> bool:
    calls = (node for node in graph.nodes if node.op in ("call_function", "call_method"))
    return all("example_value" in node.meta for node in calls)


class _Examples(fx.Interpreter):
    """Notes what each node gives; a graph that another process captured has lost it."""

    def __init__(self, gm: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._copies = dict(zip(gm.graph.nodes, graph.nodes, strict=True))

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        self._copies[n].meta["example_value"] = result
        return result


def _propagate(gm: fx.GraphModule, graph: fx.Graph, fakes: list[object]) -> bool:
    """Set the examples of `graph`, a copy of that of `gm`.

    False where the program raises, or would change its inputs or a state by this run.
    """
    if any(map(writes, gm.graph.nodes)):
        return False
    mode = next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None)
    if mode is None:
        return False
    counted = (t for t in fakes if isinstance(t, torch.Tensor) and not t.is_inference())
    try:
        with torch.autograd._unsafe_preserve_version_counter(tuple(counted)), mode:  # type: ignore[attr-defined]
            _Examples(gm, graph).run(*fakes)
    except Exception:  # the trace will raise it, or explain it
        return False
    return True
