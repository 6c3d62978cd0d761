"""Gradients that are zero whatever the tangents are: of `sgn`, of a product over no elements.

In eager an input has a gradient where autograd's nodes lead to it, and None elsewhere. The graph
tells what depends on what by its data, and a constant depends on nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from weft_core.tracing import Tracer


def tie_constants(
    tracer: Tracer,
    gradients: Sequence[Any],
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> list[Any]:
    """Gradients that depend on the tangents of the outputs that lead to their leaves."""
    recorder = tracer.recorder
    depending = {recorder.node_of(tracer.value(tangent)) for tangent in tangents}
    for node in recorder.graph.nodes:
        if not depending.isdisjoint(node.all_input_nodes):
            depending.add(node)
    tied = []
    for gradient, leaf in zip(gradients, leaves, strict=True):
        known = gradient is None or recorder.node_of(tracer.value(gradient)) in depending
        for output, tangent in () if known else zip(outputs, tangents, strict=True):
            if any(getattr(node, "variable", None) is leaf for node in _reached(output.grad_fn)):
                gradient = gradient + torch.full_like(tangent, 0, dtype=gradient.dtype).sum()
        tied.append(gradient)
    return tied


def _reached(node: Any) -> Iterator[Any]:
    """The autograd nodes that a backward from `node` comes to."""
    seen, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [after for after, _ in node.next_functions]
            yield node
