"""What the cut may recompute, and what saving a value costs.

Recomputing is free where codegen fuses it into the kernel that uses it: pointwise ops, views,
casts, and tensors made from nothing. It is never free for matmuls, convolutions, attention,
reductions and sorts, and never right for random ops. A table of fusible ops is an allow-list: an op
that nobody thought of is saved, which is always correct.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch
from torch import fx
from torch._ops import OpOverload
from weft_core.collectives import REGATHER
from weft_core.node_effects import has_effect
from weft_core.symnodes import SymValue, hint

from weft_aot.walk import copies_input, is_view, view_chain

aten = torch.ops.aten

# Names of aten ops that codegen computes inside the loop of whoever uses them.
_POINTWISE = """
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min cos cosh
    copysign div elu eq erf erfc exp exp2 expm1 fill floor fmod gelu ge gt hardsigmoid hardswish
    hardtanh isinf isnan le leaky_relu lerp lt log log10 log1p log2 log_sigmoid_forward logical_and
    logical_not logical_or logical_xor masked_fill maximum minimum mish mul ne neg pow reciprocal
    relu remainder round rsqrt rsub sigmoid sign silu sin sinh softplus sqrt square sub tan tanh
    threshold trunc where _to_copy clone copy convert_element_type constant_pad_nd
    zeros_like ones_like full_like new_zeros new_ones new_full full zeros ones arange scalar_tensor
    empty empty_like new_empty new_empty_strided _unsafe_view cat
"""
_FUSIBLE = frozenset(_POINTWISE.split())
# How many matmuls or the like a chain of recomputed values may run past.
_STAGES = 3
SCALAR = SymValue | int | float | bool


class Policy(Protocol):
    """Two questions about a node of a joint graph."""

    def recomputable(self, node: fx.Node) -> bool:
        """Whether the backward may compute it again."""

    def cost(self, node: fx.Node) -> int | None:
        """What saving it costs; None when it cannot be saved."""


def is_fusible(node: fx.Node) -> bool:
    """Whether the node costs (almost) nothing where its inputs are at hand."""
    if node.op == "get_attr":
        return True
    target = node.target
    if isinstance(target, OpOverload):
        name = target._schema.name.split("::")[1]
        return (target.is_view or name in _FUSIBLE) and not has_effect(node)
    return target is operator.getitem or isinstance(node.meta.get("val"), SCALAR)


class MemoryPolicy:
    """Save the fewest bytes; recompute only what fuses.

    Args:
        joint_inputs: nodes that the caller keeps alive anyway; saving them is all but free.
        values: forward values; they leave the graph anyway.
    """

    def __init__(self, joint_inputs: set[fx.Node], values: set[fx.Node]) -> None:
        self._free = joint_inputs | values
        graph = next(iter(joint_inputs)).graph if joint_inputs else fx.Graph()
        self._kept = _far_from_saved(graph) | _compared(graph)

    def recomputable(self, node: fx.Node) -> bool:
        return is_fusible(node) and node not in self._kept and not copies_input(node)

    def cost(self, node: fx.Node) -> int | None:
        value = node.meta.get("val")
        if isinstance(value, SCALAR):
            return 1
        if not isinstance(value, torch.Tensor):
            return None
        if node in self._free:  # as eager chooses: the program may write to the other one
            return 2 if node.op == "placeholder" and not _used_in_backward(node) else 1
        # Reading a saved value costs what it holds; one that nothing else would have put in
        # memory costs the writing too.
        size = byte_count(value)
        in_memory = not is_fusible(node) or any(not is_fusible(user) for user in node.users)
        return 2 + (size if in_memory else 2 * size)


def _used_in_backward(node: fx.Node) -> bool:
    """Whether the backward, as it was traced, takes a node or a view of it."""
    return any(
        "in_backward" in user.meta or (is_view(user) and _used_in_backward(user))
        for user in node.users
    )


def _compared(graph: fx.Graph) -> set[fx.Node]:
    """What the backward looks for in a tensor, and the tensor: an extremum among its elements.

    Computed again, in another loop, an element may be off by a rounding; then none is found.
    """
    found: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        if "in_backward" in node.meta:
            found.update(base for operand in node.all_input_nodes for base in view_chain(operand))
    return {node for node in found if _is_rounded(node)}


def _is_rounded(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and not is_view(node)


def _far_from_saved(graph: fx.Graph) -> set[fx.Node]:
    """Fusible nodes at which a chain of recomputed values would have run past too many stages.

    The state of a recurrence could be computed again from its first one and what each step adds.
    But the backward takes the states last to first: all would be in memory when it begins.
    """
    depth: dict[fx.Node, int] = {}
    passed: dict[fx.Node, int] = {}
    for node in graph.nodes:
        sources, fusible = node.all_input_nodes, is_fusible(node)
        depth[node] = max((depth[s] for s in sources), default=0) + (not fusible)
        chains = [passed[s] + (depth[node] > depth[s]) for s in sources if s in passed]
        if fusible and max(chains, default=0) <= _STAGES:
            passed[node] = max(chains, default=0)
    return {node for node in graph.nodes if is_fusible(node) and node not in passed}


class SavingPolicy(MemoryPolicy):
    """Compute nothing twice but views; saving the fewest bytes under that rule."""

    def recomputable(self, node: fx.Node) -> bool:
        return is_fusible(node) and is_view(node)


class CheckpointPolicy:
    """What activation checkpointing asks for on top of `base`.

    A node of a region (`meta["recompute"]`) is computed again, never saved. Random numbers are
    not: a second draw would change them. Nor is what crosses a region's border, so that one
    region's backward does not compute another region: a value that another region or the backward
    of other code takes, and what other code makes of a region's values.
    """

    def __init__(self, base: Policy) -> None:
        self._base = base

    def recomputable(self, node: fx.Node) -> bool:
        return self._is_inner(node) or (self._base.recomputable(node) and not _crosses(node))

    def cost(self, node: fx.Node) -> int | None:
        return None if self._is_inner(node) else self._base.cost(node)

    def _is_inner(self, node: fx.Node) -> bool:
        made: Any = node.args[0] if node.target is operator.getitem else node
        if "recompute" not in made.meta or has_effect(made):
            return False
        return not _crosses(node) and not isinstance(node.meta.get("val"), SCALAR)


class RegatherPolicy:
    """Gather parameters of `base` that the forward frees again in the backward, never save them."""

    def __init__(self, base: Policy) -> None:
        self._base = base

    def recomputable(self, node: fx.Node) -> bool:
        return REGATHER in node.meta or self._base.recomputable(node)

    def cost(self, node: fx.Node) -> int | None:
        return None if REGATHER in node.meta else self._base.cost(node)


def _crosses(node: fx.Node) -> bool:
    """Whether a node hands on what a region holds, itself or through views."""
    region = node.meta.get("recompute")
    if region is None:
        return any("recompute" in source.meta for source in node.all_input_nodes)
    pending = [] if is_view(node) else list(node.users)
    while pending:
        user = pending.pop()
        other = user.meta.get("recompute")
        if other != region and (other is not None or "in_backward" in user.meta):
            return True
        pending += user.users if is_view(user) and other == region else ()
    return False


def byte_count(value: torch.Tensor) -> int:
    """Bytes of a tensor's elements; symbolic sizes have their example values."""
    count = value.element_size()
    for size in value.shape:
        count *= hint(size)
    return count
