"""What a node of an aten graph does beside making its value, and whether it must run for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from weft_core.collectives import is_collective
from weft_core.eager_error_probe import divides, may_raise


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Remove nodes that nothing uses; those with an effect stay, random ops among them."""
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("call_function", "get_attr") and not must_run(node):
            graph.erase_node(node)


def must_run(node: fx.Node) -> bool:
    """Whether a node matters although nothing uses it: it has an effect, or may raise."""
    if not may_raise(node.target) or "in_backward" in node.meta:
        return has_effect(node)
    if divides(node.target):
        whole = not node.meta["val"].is_floating_point() and not node.meta["val"].is_complex()
        return whole and (isinstance(node.args[1], fx.Node) or not node.args[1])
    return True


def has_effect(node: fx.Node) -> bool:
    """Whether an aten node does more than make its value: it writes, checks or is random."""
    return is_effect(node.target) and not _drops_nothing(node)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return seeded and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    """Whether a node is random for its dropout alone (attention), which it was not asked for."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    if "dropout_p" not in names:
        return False
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p", 0.0) == 0.0)


def is_effect(target: Any) -> bool:
    """Whether a call of `target` does: then it matters although nobody uses what it makes.

    An operator that returns nothing is there for what it does, and others wait for a collective.
    """
    if not isinstance(target, OpOverload) or is_collective(target):
        return isinstance(target, OpOverload)
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    schema = target._schema
    return not schema.returns or schema.is_mutable or seeded
