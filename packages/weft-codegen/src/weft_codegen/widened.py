"""Convolutions of 16-bit floats, computed in float32 where the library has no kernel for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from weft_codegen.loops.lower.fxnodes import fake_call
from weft_codegen.tune import lacks_16_bit

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution.default


def is_slow(node: fx.Node) -> bool:
    """Whether a node is a convolution of 16-bit floats for which the library has no kernel."""
    if node.target is not _CONVOLUTION:
        return False
    fake = node.meta["val"]
    low = fake.dtype in (torch.bfloat16, torch.float16) and fake.device.type == "cpu"
    return low and lacks_16_bit()


def widen(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """Compute slow convolutions in float32, and round their results once.

    Yields:
        what takes the place of each, and the fake tensor that was there.
    """
    for node in filter(is_slow, graph.find_nodes(op="call_function", target=_CONVOLUTION)):
        before = node.meta["val"]
        with graph.inserting_before(node):
            for used in node.all_input_nodes:
                node.replace_input_with(used, _cast(graph, used, torch.float32))
        node.meta["val"] = fake_call(node)
        with graph.inserting_after(node):
            narrow = _cast(graph, node, before.dtype)
        node.replace_all_uses_with(narrow, lambda user, narrow=narrow: user is not narrow)
        yield narrow, before


def _cast(graph: fx.Graph, used: fx.Node, dtype: torch.dtype) -> fx.Node:
    made = graph.call_function(_aten._to_copy.default, (used,), {"dtype": dtype})
    made.meta = {**used.meta, "val": fake_call(made)}
    return made
