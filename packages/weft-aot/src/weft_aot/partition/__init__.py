"""Cut a joint graph into forward and backward so that little memory lives between them.

`network.py` explains the idea; `classify`, `policy`, `network` (with `maxflow`) and `extract` are
the four steps, in this order.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from weft_core.collectives import REGATHER

from weft_aot.config import settings
from weft_aot.partition.budget import save_within
from weft_aot.partition.classify import classify
from weft_aot.partition.extract import extract
from weft_aot.partition.policy import (
    CheckpointPolicy,
    MemoryPolicy,
    Policy,
    RegatherPolicy,
    SavingPolicy,
)
from weft_aot.records import JointGraph, Partition

PolicyFactory = Callable[[set[fx.Node], set[fx.Node]], Policy]

__all__ = [
    "CheckpointPolicy",
    "MemoryPolicy",
    "Policy",
    "PolicyFactory",
    "SavingPolicy",
    "partition",
]


def partition(joint: JointGraph, policy: PolicyFactory | None = None) -> Partition:
    """Choose what to save by minimum cut and split `joint` there.

    Args:
        joint: a joint graph with at least one gradient.
        policy: called with the input nodes and the value nodes; decides costs and recomputation.
            Default: `MemoryPolicy`, or `SavingPolicy` without ``settings.recompute``.

    Raises:
        ValueError: the joint graph has no gradients, so there is nothing to cut; or
            ``settings.activation_memory_budget`` is not between 0 and 1.
    """
    if not joint.gradients:
        raise ValueError("the joint graph is inference only: nothing to partition")
    classes = classify(joint)
    values = {node for node in classes.values if node is not None}
    policy = policy or (MemoryPolicy if settings.recompute else SavingPolicy)
    base = policy(set(classes.inputs), values)

    def wrap(rules: Policy) -> Policy:
        if any("recompute" in node.meta for node in classes.order):
            rules = CheckpointPolicy(rules)
        if any(REGATHER in node.meta for node in classes.order):
            rules = RegatherPolicy(rules)
        return rules

    budget = settings.activation_memory_budget
    return extract(joint, classes, save_within(classes, base, wrap, budget))
