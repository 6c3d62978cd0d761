"""A backward in pieces, each a node of autograd, so that gradients arrive while others are made.

DistributedDataParallel reduces a bucket of gradients once the engine has accumulated them, which
it does after each node. So the pieces hand over what is finished:

    results ─► piece 0 ─► piece 1 ─► piece 2
                 │          │          │
                 ▼          ▼          ▼
              bucket 0   bucket 1   bucket 2

What a piece makes for later ones travels as gradients of tensors without memory (links), which the
forward adds to its values. The forward stays one graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from weft_core.errors import Unsupported
from weft_core.symnodes import SymbolTable, SymValue

from weft_aot.records import BackwardComponent, JointGraph
from weft_aot.walk import is_view

_FIRST = 2**20
"""Bytes of the first bucket, as DistributedDataParallel has it: the reduction begins early."""


def split_into_buckets(
    joint: JointGraph, part: BackwardComponent, capacity: int, count: int
) -> tuple[list[BackwardComponent], Callable[[Sequence[Any]], list[torch.Tensor]]]:
    """The pieces of a backward, the last to run first, and what makes the links of a call.

    Args:
        joint: what was traced.
        part: the whole backward.
        capacity: bytes of gradients in a bucket.
        count: how many values the forward returns, saved ones included; links come next.
    """
    cut = _Cut(joint, part, capacity)
    borders = [cut.border(piece) for piece in range(1, cut.count)]
    examples = [node.meta["val"] for border in borders for node in border]
    if part.inner or len(cut.ends) < 2 or not all(map(_is_linkable, examples)):
        return [part], no_links
    sizes = _sizes(joint, examples)
    if sizes is None:
        return [part], no_links
    pieces = []
    for piece in range(cut.count):
        taken = borders[piece - 1] if piece else []
        passed = borders[piece] if piece < len(borders) else []
        middle = count + len(taken)
        tangents = tuple(range(count, middle)) if piece else part.tangents
        made = cut.extract(piece, taken, passed)
        own_links = tuple(range(middle, middle + len(passed)))
        pieces.append(replace(made, tangents=tangents, links=own_links))
        count = middle
    layouts = [((0,) * e.dim(), e.dtype, e.device) for e in examples]

    def links(args: Sequence[Any]) -> list[torch.Tensor]:
        return [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, (stride, dtype, device) in zip(sizes(*args), layouts, strict=True)
        ]

    return pieces[::-1], links


def no_links(args: Sequence[Any]) -> list[torch.Tensor]:
    """What makes the links of a backward in one piece."""
    return []


def _is_linkable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _sizes(joint: JointGraph, examples: list[torch.Tensor]) -> Callable[..., Any] | None:
    """What makes the sizes of the links of a call's arguments; None where they are unknown."""
    shapes = [tuple(example.shape) for example in examples]
    if all(isinstance(size, int) for shape in shapes for size in shape):
        return lambda *args: shapes
    graph = fx.Graph()
    table = SymbolTable(graph)
    for node in joint.placeholders()[: joint.num_inputs]:
        table.bind_value(node.meta.get("val"), graph.node_copy(node))
    try:
        graph.output([[_size(table, size) for size in shape] for shape in shapes])
    except Unsupported:  # it depends on data
        return None
    return fx.GraphModule({}, graph).forward


def _size(table: SymbolTable, size: Any) -> Any:
    return table.node_of(size) if isinstance(size, SymValue) else size


def _is_light(node: fx.Node) -> bool:
    return is_view(node) or isinstance(node.meta.get("val"), SymValue)


class _Cut:
    """Which piece each node of a backward is in; `ends` are the positions behind the pieces."""

    def __init__(self, joint: JointGraph, part: BackwardComponent, capacity: int) -> None:
        self._part, graph = part, part.backward.graph
        self._given: list[fx.Node] = list(graph.find_nodes(op="placeholder"))
        self._nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        self._place = {node: place for place, node in enumerate(self._nodes)}
        results: Any = graph.output_node().args[0]
        self._results: list[fx.Node | None] = list(results)
        self.ends = self._fill(joint, capacity)
        self.count = len(self.ends)
        starts = [0, *self.ends[:-1]]
        self._piece = {
            node: piece
            for piece, (start, end) in enumerate(zip(starts, self.ends, strict=True))
            for node in self._nodes[start:end]
        }

    def _fill(self, joint: JointGraph, capacity: int) -> list[int]:
        pairs = zip(self._results, self._part.gradients, strict=True)
        made = {n for n, index in pairs if n in self._place and index in joint.leaves}
        ends, held, limit = [], 0, min(_FIRST, capacity)
        for place, node in enumerate(self._nodes):
            if node in made:
                held += node.meta["val"].nbytes
            # The results of one operator stay together.
            ready = getattr(node.next, "target", None) is not operator.getitem
            if held >= limit and ready:
                ends.append(place + 1)
                held, limit = 0, capacity
        return [*(ends if held else ends[:-1]), len(self._nodes)]

    def _piece_of(self, node: fx.Node) -> int:
        return self._piece.get(node, 0)

    def border(self, piece: int) -> list[fx.Node]:
        """What earlier pieces have, and this one or later ones use; of views the base."""
        tangents = self._given[len(self._part.saved) :]
        earlier = [*tangents, *(node for node in self._nodes if self._piece[node] < piece)]
        used = {s for n in self._nodes if self._piece[n] >= piece for s in self._sources(n)}
        return [node for node in earlier if node in used]

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """What a node takes; views and sizes of other pieces are computed again."""
        found, piece = list[fx.Node](), self._piece_of(node)
        pending = list(node.all_input_nodes)
        while pending:
            source = pending.pop()
            if source in self._place and self._piece[source] != piece and _is_light(source):
                pending += source.all_input_nodes
            else:
                found.append(source)
        return found

    def extract(self, piece: int, taken: list[fx.Node], passed: list[fx.Node]) -> BackwardComponent:
        """One piece; what it takes are its tangents, but for the first piece."""
        own = [node for node in self._nodes if self._piece[node] == piece]
        results = [
            r if r is not None and self._piece_of(r) == piece else None for r in self._results
        ]
        needed = {source for node in own for source in self._sources(node)} | set(results)
        number = len(self._part.saved)
        saved = [k for k, node in enumerate(self._given[:number]) if node in needed]
        given = [self._given[k] for k in saved] + (taken if piece else self._given[number:])
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in given:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in own:
            copy(node)
        outputs = [None if r is None else copies[r] for r in results]
        graph.output((*outputs, *(copies[node] for node in passed)))
        everything = tuple(range(len(taken))) if piece else tuple(range(len(self._part.tangents)))
        behind = self._part.behind if piece == 0 else (everything,) * len(results)
        pairs = zip(self._part.gradients, results, strict=True)
        return replace(
            self._part,
            backward=_LazyGraphModule(self._part.backward, graph, "Backward"),
            saved=tuple(self._part.saved[k] for k in saved),
            gradients=tuple(index if result is not None else None for index, result in pairs),
            behind=(*behind, *(everything for _ in passed)),
            chained=True,
        )
