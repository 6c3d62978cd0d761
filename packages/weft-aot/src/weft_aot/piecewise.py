"""The backward of some of a graph's results: results differentiated apart, as eager does it.

One autograd function stands for the whole graph, and the engine frees what it saved after the
first backward that comes by. Results whose gradients meet in the backward graph are a *part*. A
backward that is given gradients of some parts runs these alone and keeps what the others saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from weft_aot.records import JointGraph, Partition
from weft_aot.walk import ancestors

Compiled = Callable[..., Any]
Bits = int
"""A set of tangents: bit `k` for the k-th."""


class Pieces:
    """The parts of one backward graph.

    Args:
        joint: what was traced.
        cut: how it was cut.
        compile_backward: makes a callable of an extract of the backward graph.
        arguments: the flat arguments of the backward graph, of a context and gradients.
    """

    def __init__(
        self,
        joint: JointGraph,
        cut: Partition,
        compile_backward: Callable[[fx.GraphModule], Compiled],
        arguments: Callable[..., list[Any]],
    ) -> None:
        self._module = cut.backward
        self._tangents = [(1 << k, place) for k, place in enumerate(joint.tangents)]
        self._compile, self.arguments = compile_backward, arguments
        self._symbols = sum(saved.symbolic for saved in cut.saved)
        self._behind, self.parts = _reach(cut.backward.graph, len(cut.saved))
        self.everything: Bits = sum(self.parts)
        self._extracts: dict[Bits, tuple[list[int], fx.GraphModule]] = {}
        self._compiled: dict[Bits, Compiled] = {}

    def given(self, grads: Sequence[Any]) -> Bits:
        """The tangents among the gradients of the forward's values that are there."""
        bits = 0
        for bit, place in self._tangents:
            if grads[place] is not None:
                bits |= bit
        return bits

    def touched(self, given: Bits) -> Bits:
        """All tangents of the parts of which some are given."""
        return sum(part for part in self.parts if part & given)

    def is_whole(self, given: Bits) -> bool:
        """Whether every part has a tangent."""
        return given == self.everything or self.touched(given) == self.everything

    def only_reached(self, outs: Sequence[Any], given: Bits) -> Sequence[Any]:
        """The results of the backward graph, None where no given tangent reaches them."""
        if given == self.everything:
            return outs
        return [out if bits & given else None for out, bits in zip(outs, self._behind, strict=True)]

    def reached(self, grads: Sequence[Any]) -> list[bool] | None:
        """Which results the gradients reach; None if parts stay untouched.

        Compiled autograd asks this before it inlines the graph.
        """
        given = self.given(grads)
        return [bool(bits & given) for bits in self._behind] if self.is_whole(given) else None

    def run(self, ctx: Any, grads: Sequence[Any], given: Bits) -> list[Any]:
        """Run the parts that have gradients and leave the others for later.

        Raises:
            RuntimeError: one of them ran before and its graph was not retained, or something that
                it saved was written since.
        """
        touched = self.touched(given)
        args = self.arguments(self._context(ctx, touched), *grads)
        places, module = self._extract(touched)
        if touched not in self._compiled:
            self._compiled[touched] = self._compile(module)
        found = iter(self._compiled[touched](*[args[place] for place in places]))
        return [next(found) if bits & touched else None for bits in self._behind]

    def _context(self, ctx: Any, touched: Bits) -> Any:
        """`ctx` with the saved tensors of the parts to run; those of waiting parts are kept."""
        waiting = getattr(ctx, "waiting", self.everything)
        try:
            saved = ctx.saved_tensors
        except RuntimeError:  # freed with the parts that ran before
            rest = getattr(ctx, "rest", None)
            if rest is None or touched & ~waiting:
                raise
            saved = [None if kept is None else _unchanged(*kept) for kept in rest]
        ctx.waiting = waiting & ~touched
        places = self._extract(ctx.waiting)[0] if ctx.waiting else ()
        needed = {place - self._symbols for place in places}
        # Detached, because a saved result would keep the context, and so itself, alive.
        ctx.rest = [
            (tensor.detach(), tensor._version) if k in needed else None
            for k, tensor in enumerate(saved)
        ]
        return SimpleNamespace(
            saved_tensors=saved,
            symbols=getattr(ctx, "symbols", ()),
            shapes=getattr(ctx, "shapes", ()),
        )

    def _extract(self, parts: Bits) -> tuple[list[int], fx.GraphModule]:
        """The places of the arguments that some parts need, and the graph of these parts."""
        if parts not in self._extracts:
            results: Any = self._module.graph.output_node().args[0]
            pairs = zip(results, self._behind, strict=True)
            wanted = [result for result, bits in pairs if bits & parts]
            self._extracts[parts] = _graph_of(wanted, self._module)
        return self._extracts[parts]


def _reach(graph: fx.Graph, saved: int) -> tuple[list[Bits], list[Bits]]:
    """The tangents behind each gradient, and the parts: tangents that meet in one node."""
    behind: dict[fx.Node, Bits] = {}
    for k, node in enumerate(graph.find_nodes(op="placeholder")):
        behind[node] = 1 << (k - saved) if k >= saved else 0
    parts = [bits for bits in behind.values() if bits]
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        bits = 0
        for argument in node.all_input_nodes:
            bits |= behind[argument]
        behind[node] = bits
        if node.op != "output" and bits & (bits - 1):  # more than one tangent
            joined = [part for part in parts if part & bits]
            parts = [part for part in parts if not part & bits] + [sum(joined)]
    results: Any = graph.output_node().args[0]
    return [behind[node] if isinstance(node, fx.Node) else 0 for node in results], parts


def _graph_of(results: list[fx.Node], module: fx.GraphModule) -> tuple[list[int], fx.GraphModule]:
    """A graph that makes `results` alone, and the places of its arguments among the module's."""
    needed = ancestors(results)
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node in needed:
            copies[node] = new.node_copy(node, copies.__getitem__)
    new.output(tuple(copies[node] for node in results))
    given = module.graph.find_nodes(op="placeholder")
    places = [k for k, node in enumerate(given) if node in needed]
    return places, _LazyGraphModule(module, new, "Backward")


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {version} instead"
        )
    return tensor
