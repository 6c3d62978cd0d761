"""Gradients that are zero whatever a tangent is: of `sgn`, of a product over no elements.

In eager an input has a gradient where autograd's nodes lead to it, and None elsewhere. The graph
tells what depends on what by its data, and a constant depends on nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from weft_core.fake import Intermediate
from weft_core.tracing import AtenTracer

from weft_aot.walk import depending, reached


def tie_constants(
    tracer: AtenTracer,
    gradients: Sequence[Any],
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> list[Any]:
    """Gradients that depend on the tangents of the outputs that lead to their leaves."""
    recorder = tracer.recorder
    starts = [recorder.node_of(tracer.value(tangent)) for tangent in tangents]
    behind = depending(recorder.graph.nodes, starts)
    leads, surely = reached(outputs, leaves), reached(outputs, leaves, _defines)
    tied = []
    for place, gradient in enumerate(gradients):
        made: Any = None if gradient is None else recorder.node_of(tracer.value(gradient))
        known = behind.get(made, 0)  # a literal may have a node only now
        for k, tangent in enumerate(() if gradient is None else tangents):
            if known >> k & 1 or not (surely if known else leads)[k] >> place & 1:
                continue
            zero = torch.full_like(tangent, 0, dtype=gradient.dtype).sum()
            if known:  # a term by itself, which joins the histories of outputs no more than eager
                kind = {"dtype": gradient.dtype, "device": gradient.device}
                zero = torch.empty_strided(gradient.shape, gradient.stride(), **kind).fill_(zero)
            gradient, known = gradient + zero, known | 1 << k
        tied.append(gradient)
    return tied


def _defines(node: Any) -> bool:
    """Whether a node gives its inputs gradients; an autograd.Function of the program need not."""
    return getattr(node, "_forward_cls", Intermediate) is Intermediate
