"""Puts a tape into the order in which the eager engine would have run its nodes.

The engine describes a backward depth first. Eagerly it keeps ready nodes in a heap and runs the
newest (by sequence number) first, AccumulateGrad before all others. It names nodes only by the
position at which it describes them, so its walk is repeated here over `next_functions`; should the
names ever disagree, the tape stays as it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from weft_compiled_autograd import accumulation
from weft_compiled_autograd.tape import BLOCK, Tape

Edges = Sequence[tuple[Any, int]]


def graph_node(root: Any) -> Any:
    """The autograd node behind a tensor or GradientEdge that was given to `backward`."""
    if isinstance(root, torch.Tensor):
        return root.grad_fn or torch.autograd.graph.get_gradient_edge(root).node
    return root.node


class _Backward:
    """The part of an autograd graph that one backward runs; None stands for its root."""

    def __init__(self, roots: Iterable[Any], inputs: Iterable[Any]) -> None:
        self.roots = [graph_node(root) for root in roots]
        self.dependencies: Counter[Any] = Counter()
        self.wanted: set[Any] = set()
        self.wanted = self._lead_to({graph_node(value) for value in inputs})

    def children(self, node: Any) -> list[Any]:
        """Nodes that receive this node's gradients, in order, as often as there are edges."""
        found = self.roots if node is None else [child for child, _ in node.next_functions]
        return [c for c in found if c is not None and (not self.wanted or c in self.wanted)]

    def _lead_to(self, targets: set[Any]) -> set[Any]:
        """Count the edges into every node; return the nodes from which a target is reached."""
        parents: dict[Any, list[Any]] = {}
        todo, seen = deque([None]), {None}
        while todo:
            node = todo.popleft()
            for child in self.children(node):
                self.dependencies[child] += 1
                parents.setdefault(child, []).append(node)
                if child not in seen:
                    seen.add(child)
                    todo.append(child)
        reached, back = set(targets), list(targets)
        while back:
            for parent in parents.get(back.pop(), ()):
                if parent is not None and parent not in reached:
                    reached.add(parent)
                    back.append(parent)
        return reached

    def described(self) -> list[Any]:
        """The nodes in the order in which the engine describes them to a capture."""
        missing, stack = Counter(self.dependencies), [None]
        out: list[Any] = []
        while stack:
            node = stack.pop()
            out.append(node)
            stack += self._now_ready(node, missing)
        return out

    def executed(self) -> list[Any]:
        """The nodes in the order in which the eager engine runs them."""
        missing, heap = Counter(self.dependencies), _Heap()
        out: list[Any] = []
        node: Any = None
        while True:
            out.append(node)
            for child in self._now_ready(node, missing):
                heap.push(child._sequence_nr() % 2**64, child)
            if not heap.items:
                return out
            node = heap.pop()

    def _now_ready(self, node: Any, missing: Counter[Any]) -> list[Any]:
        ready = []
        for child in self.children(node):
            missing[child] -= 1
            if missing[child] == 0:
                ready.append(child)
        return ready


class _Heap:
    """libstdc++'s priority queue, largest key first, ties as push_heap and pop_heap leave them."""

    def __init__(self) -> None:
        self.items: list[tuple[int, Any]] = []

    def push(self, key: int, value: Any) -> None:
        """Add a value."""
        self.items.append((key, value))
        self._rise(len(self.items) - 1)

    def _rise(self, hole: int) -> None:
        item = self.items[hole]
        while hole and self.items[(hole - 1) // 2][0] < item[0]:
            self.items[hole] = self.items[(hole - 1) // 2]
            hole = (hole - 1) // 2
        self.items[hole] = item

    def pop(self) -> Any:
        """Take out a value with the largest key."""
        top, last = self.items[0], self.items.pop()
        size, hole = len(self.items), 0
        if size:
            while (right := 2 * hole + 2) <= size:
                lower_right = right == size or self.items[right][0] < self.items[right - 1][0]
                child = right - 1 if lower_right else right
                self.items[hole] = self.items[child]
                hole = child
            self.items[hole] = last
            self._rise(hole)
        return top[1]


def _name(node: Any) -> str:
    return "torch::autograd::GraphRoot" if node is None else str(node.name())


def eager_order(tape: Tape, roots: Iterable[Any], inputs: Iterable[Any]) -> Tape:
    """Return the tape in the eager engine's order.

    Args:
        tape: as recorded.
        roots: what `backward` was called on: tensors or GradientEdges.
        inputs: what gradients were asked for; empty for all leaves.
    """
    backward = _Backward(roots, inputs)
    described = backward.described()
    if [_name(node) for node in described] != [n.removeprefix("struct ") for n in tape.names]:
        return tape
    position = {node: index for index, node in enumerate(described)}
    rank = {position[node]: index for index, node in enumerate(backward.executed())}
    tape.graph = _reordered(tape.graph, rank)
    return tape


def _reordered(graph: Graph, rank: dict[int, int]) -> Graph:
    """A graph anew, blocks by rank, sums of gradients where they are needed."""
    new, copies = Graph(), dict[Node, Node]()

    def place(node: Node) -> int:
        if node.op == "output":
            return len(rank)
        return rank[node.meta[BLOCK]] if BLOCK in node.meta else -1

    def copy_of(node: Node) -> Node:
        """What stands for a node; a sum adds the gradients in the order in which they arrive."""
        if node not in copies:
            first, *others = sorted(_terms(node), key=place)
            total = copies[first]
            for term in others:
                total = new.call_function(accumulation.accumulate, (total, copies[term]))
                total.meta.update(node.meta)
            copies[node] = total
        return copies[node]

    nodes = [node for node in graph.nodes if node.target is not accumulation.accumulate]
    for node in sorted(nodes, key=place):
        copies[node] = new.node_copy(node, copy_of)
    return new


def _terms(node: Any) -> Iterator[Node]:
    """The gradients that a node adds up."""
    todo = [node]
    while todo:
        term = todo.pop()
        if term.target is accumulation.accumulate:
            todo += reversed(term.args)
        else:
            yield term
