"""A budget for what is saved: bytes, results and what is computed again."""

from __future__ import annotations

import aot_helpers
import pytest
import torch
from torch import fx
from weft_aot import MemoryPolicy, partition, settings, trace_joint
from weft_aot.partition.budget import estimated_cost
from weft_core.node_effects import draws

F = torch.nn.functional
aten = torch.ops.aten
BUDGETS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def blocks(x, *weights):
    """Blocks of attention and a feed-forward with norms."""
    for q, up, down in zip(*[iter(weights)] * 3, strict=True):
        y = F.layer_norm(x, x.shape[-1:]) @ q
        heads = y.view(*x.shape[:-1], 2, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down
    return x.square().sum()


def arguments(depth=3, width=8):
    torch.manual_seed(0)
    shapes = [(width, width), (width, 4 * width), (4 * width, width)] * depth
    tensors = [torch.randn(2, 16, width), *(torch.randn(shape) * 0.2 for shape in shapes)]
    return [tensor.requires_grad_() for tensor in tensors]


def calls(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def saved_bytes(joint, parts):
    """Of what is neither an input nor a result."""
    placeholders = parts.backward.graph.find_nodes(op="placeholder")
    extra = [
        node.meta["val"].untyped_storage().nbytes()
        for node, saved in zip(placeholders, parts.saved, strict=False)
        if saved.source.kind == "value" and saved.source.index >= joint.num_values
    ]
    return sum(extra)


def split(joint, budget):
    with settings.patch(activation_memory_budget=budget):
        return partition(joint)


def test_saved_bytes_grow_with_the_budget_and_stay_below_it():
    joint = trace_joint(blocks, arguments())
    sizes = {budget: saved_bytes(joint, split(joint, budget)) for budget in BUDGETS}
    low, high = sizes[0.0], sizes[1.0]
    assert [*sizes.values()] == sorted(sizes.values())
    assert low < 0.05 * high
    assert len({*sizes.values()}) >= 5
    for budget, size in sizes.items():
        assert size <= low + budget * (high - low)


def test_more_is_computed_again_the_smaller_the_budget():
    joint = trace_joint(blocks, arguments())
    costs = []
    for budget in BUDGETS:
        parts = split(joint, budget)
        costs.append(sum(map(estimated_cost, parts.backward.graph.nodes)))
    assert costs == sorted(costs, reverse=True)
    products = [calls(split(joint, budget).backward).count(aten.mm.default) for budget in (0, 1)]
    assert products[0] > products[1]


def test_without_a_budget_the_cut_is_the_plain_one():
    joint = trace_joint(blocks, arguments())
    parts = split(joint, 1.0)
    again = partition(joint, MemoryPolicy)
    assert [s.name for s in parts.saved] == [s.name for s in again.saved]


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.7])
def test_gradients_do_not_depend_on_the_budget(budget):
    with settings.patch(activation_memory_budget=budget):
        aot_helpers.check(blocks, *arguments(depth=2))


def test_random_numbers_are_drawn_once():
    def fn(x, w):
        return F.dropout(F.gelu(x @ w), 0.5) @ w

    joint = trace_joint(fn, [torch.randn(4, 4, requires_grad=True) for _ in range(2)])
    parts = split(joint, 0.0)
    assert not any(map(draws, parts.backward.graph.nodes))
    assert aten.mm.default in calls(parts.backward)[:3]


def test_values_between_checkpointed_regions_are_saved():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    for region in range(3):
        x = graph.call_function(torch.matmul, (x, w))
        x.meta["recompute"] = region
        x = graph.call_function(torch.sigmoid, (x,))
        x.meta["recompute"] = region
    graph.output(x)
    module = fx.GraphModule({}, graph)
    joint = trace_joint(module, [torch.randn(4, 4, requires_grad=True) for _ in range(2)])
    for budget in (0.0, 0.5, 1.0):
        assert saved_bytes(joint, split(joint, budget)) == 2 * 4 * 4 * 4


def test_a_budget_outside_of_its_range_is_an_error():
    joint = trace_joint(lambda x: x.cos().sin(), [torch.randn(4, requires_grad=True)])
    for budget in (-0.1, 1.5):
        with pytest.raises(ValueError, match="activation_memory_budget"):
            split(joint, budget)
