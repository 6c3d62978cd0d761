"""Save at most a share of the bytes that the plain cut saves, for the least recomputation.

Items are what the plain policy never computes twice: products, attention, reductions. Each has a
cost, an estimate of its time, and a size. Those with the smallest cost for a byte are computed
again, as few as bring the minimum cut below the budget: the fractional solution of the knapsack
problem (Dantzig, 1957), rounded by less than one item. The cut itself says how many bytes are
saved, which items together determine: nothing else need be saved between two that are computed
again. A larger set of items only adds cuts, so the saved bytes grow with the budget.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection

import torch
from torch import fx
from weft_core.node_effects import has_effect
from weft_core.symnodes import hint
from weft_core.tracing import IN_FORWARD

from weft_aot.partition.classify import Classes
from weft_aot.partition.network import choose_saved
from weft_aot.partition.policy import SCALAR, Policy, byte_count, is_fusible
from weft_aot.walk import copies_input

_OPERATIONS_A_BYTE = {"cpu": 10, "cuda": 200}
"""How many operations take the time of moving one byte."""


class BudgetPolicy:
    """Lets the backward compute more nodes again than `base` does, and counts plain bytes.

    Args:
        base: what decides without a budget.
        again: further nodes that may be computed again.
    """

    def __init__(self, base: Policy, again: Collection[fx.Node]) -> None:
        self._base, self._again = base, again

    def recomputable(self, node: fx.Node) -> bool:
        return node in self._again or self._base.recomputable(node)

    def cost(self, node: fx.Node) -> int | None:
        cost, value = self._base.cost(node), node.meta.get("val")
        if cost is None or not isinstance(value, torch.Tensor):
            return cost
        return min(cost, 2 + byte_count(value))


def save_within(
    classes: Classes, base: Policy, wrap: Callable[[Policy], Policy], budget: float
) -> list[fx.Node]:
    """The nodes to save, in graph order.

    Args:
        classes: of the joint graph.
        base: decides where there is no budget.
        wrap: adds the rules that hold in any case, such as those of checkpointed regions.
        budget: 1 for the bytes of the plain cut, 0 for those where everything that can be is
            computed again.

    Raises:
        ValueError: the budget is not between 0 and 1.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"activation_memory_budget is {budget}, not between 0 and 1")
    plain = choose_saved(classes, wrap(base))
    if budget == 1:
        return plain
    items = sorted(filter(_may_run_twice, _items(classes, base)), key=_cost_of_a_byte)

    def saved_with(count: int) -> list[fx.Node]:
        return choose_saved(classes, wrap(BudgetPolicy(base, set(items[:count]))))

    least = saved_with(len(items))
    low, high = saved_bytes(least, base), saved_bytes(plain, base)
    limit = low + budget * (high - low)
    few, many = -1, len(items)  # the plain cut may save more bytes than that of no items
    best = least
    while many - few > 1:
        middle = (few + many) // 2
        saved = saved_with(middle)
        if saved_bytes(saved, base) <= limit:
            many, best = middle, saved
        else:
            few = middle
    return best


def saved_bytes(nodes: Collection[fx.Node], policy: Policy) -> int:
    """How much memory saving `nodes` takes that would be free otherwise."""
    costly = (node for node in nodes if (policy.cost(node) or 0) > 2)
    values = (node.meta.get("val") for node in costly)
    return sum(byte_count(value) for value in values if isinstance(value, torch.Tensor))


def _items(classes: Classes, base: Policy) -> list[fx.Node]:
    nodes = classes.wanted & classes.forward - set(classes.inputs)
    costly = {node for node in nodes if not (base.recomputable(node) or is_fusible(node))}
    return [node for node in classes.order if node in costly]


def _may_run_twice(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node) or source.op != "call_function" or has_effect(source):
        return False
    scalar = isinstance(node.meta.get("val"), SCALAR)
    return not scalar and not copies_input(node) and IN_FORWARD not in node.meta


def _cost_of_a_byte(node: fx.Node) -> float:
    size = sum(byte_count(value) for value in _tensors(node))
    return estimated_cost(node) / max(size, 1)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [value for value in values if isinstance(value, torch.Tensor)]


def estimated_cost(node: fx.Node) -> float:
    """The time of an operator, in the time that moving a byte takes."""
    inputs = [tensor for source in node.all_input_nodes for tensor in _tensors(source)]
    moved = sum(map(byte_count, [*inputs, *_tensors(node)]))
    device = inputs[0].device.type if inputs else "cpu"
    return moved + _operations(node, inputs) / _OPERATIONS_A_BYTE.get(device, 100)


def _operations(node: fx.Node, inputs: list[torch.Tensor]) -> int:
    """Multiplications and additions of products; little else takes time for its arithmetic."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    outputs = _tensors(node)
    if not outputs or len(inputs) < 2:
        return 0
    count = math.prod(map(hint, outputs[0].shape))
    if name in ("mm", "bmm"):
        return 2 * count * hint(inputs[0].shape[-1])
    if name in ("addmm", "baddbmm"):
        return 2 * count * hint(inputs[-1].shape[-2])
    if name == "convolution":
        return 2 * count * math.prod(map(hint, inputs[1].shape[1:]))
    if "scaled_dot_product" in name:
        return 4 * count * hint(inputs[1].shape[-2])
    return 0
