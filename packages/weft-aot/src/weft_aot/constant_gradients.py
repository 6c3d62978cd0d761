"""Gradients that are zero whatever a tangent is: of `sgn`, of a product over no elements.

In eager an input has a gradient where autograd's nodes lead to it, and None elsewhere. The graph
tells what depends on what by its data, and a constant depends on nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from weft_core.fake import Intermediate
from weft_core.tracing import AtenTracer

from weft_aot.walk import depending, leading, reached


def follow_zeros(
    tracer: AtenTracer, outputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> None:
    """Let zeros that autograd makes of nothing depend on what leads there: they may become NaN."""
    leads = functools.cache(lambda: leading(outputs))
    seeds = [tracer.value(tangent) for tangent in tangents]  # autograd runs above functional ones

    def tie(zeros: torch.Tensor, node: Any) -> torch.Tensor:
        behind = leads().get(node, 0)
        for k, tangent in enumerate(seeds):
            zeros = zeros + _zero(tangent, zeros.dtype) if behind >> k & 1 else zeros
        return zeros

    tracer.recorder.tie = tie


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
            zero = _zero(tangent, gradient.dtype)
            if known:  # a term by itself, which joins the histories of outputs no more than eager
                kind = {"dtype": gradient.dtype, "device": gradient.device}
                zero = torch.empty_strided(gradient.shape, gradient.stride(), **kind).fill_(zero)
            gradient, known = gradient + zero, known | 1 << k
        tied.append(gradient)
    return tied


def _zero(tangent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.full_like(tangent, 0, dtype=dtype).sum()


def _defines(node: Any) -> bool:
    """Whether a node gives its inputs gradients; an autograd.Function of the program need not."""
    return getattr(node, "_forward_cls", Intermediate) is Intermediate
