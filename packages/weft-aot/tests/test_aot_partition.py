"""What the min cut saves, and that the two halves compute what the joint graph does."""

from __future__ import annotations

import pytest
import torch
from weft_aot import MemoryPolicy, partition, settings, trace_joint
from weft_aot.partition.classify import classify
from weft_aot.partition.network import choose_saved
from weft_core.node_effects import draws, has_effect

F = torch.nn.functional
aten = torch.ops.aten


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def calls(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def extras(joint, parts):
    """Saved tensors that are neither inputs nor forward values."""
    limit = joint.num_values
    return [s for s in parts.saved if s.source.kind == "value" and s.source.index >= limit]


def split(fn, *args):
    joint = trace_joint(fn, args)
    return joint, partition(joint)


def assert_halves_equal_joint(joint, parts, args):
    tangent_nodes = joint.module.graph.find_nodes(op="placeholder")[joint.num_inputs :]
    tangents = [torch.randn(node.meta["val"].shape) for node in tangent_nodes]
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    expected = joint.module(*plain, *tangents)
    values = parts.forward(*plain)
    pools = {"input": plain, "value": values}
    saved = [pools[s.source.kind][s.source.index] for s in parts.saved]
    gradients = parts.backward(*saved, *tangents)
    torch.testing.assert_close(
        [*values[: joint.num_values], *gradients], list(expected), rtol=0, atol=0
    )


def test_cos_cos_saves_one_tensor():
    joint, parts = split(lambda x: x.cos().cos(), leaf(4))
    assert len(parts.saved) == 1
    assert parts.saved[0].source.kind == "input"
    assert calls(parts.backward).count(aten.cos.default) == 1


def test_cos_cos_of_a_matmul_saves_one_tensor_more_than_inputs():
    joint, parts = split(lambda x, w: (x @ w).cos().cos(), leaf(4, 4), leaf(4, 4))
    assert len(extras(joint, parts)) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: F.gelu(x @ w).sum(),
        lambda x, w: F.layer_norm(torch.tanh(x @ w), (6,)) * w.sum(),
        lambda x, w: torch.softmax(x @ w, -1) @ w.t(),
        lambda x, w: (F.relu(x @ w).view(-1)[3:] * 2, x.sum(), w.exp()),
        lambda x, w: F.dropout(x @ w, 0.0) @ w,
        lambda x, w: torch.cat([x @ w, x], 0).chunk(2)[0].sigmoid(),
        lambda x, w: torch.max(x @ w, dim=-1)[0] * (x @ w).argmax(-1),
    ],
)
def test_halves_equal_joint(fn):
    args = leaf(5, 6), leaf(6, 6)
    joint, parts = split(fn, *args)
    parts.forward.graph.lint()
    parts.backward.graph.lint()
    assert_halves_equal_joint(joint, parts, args)


def test_matmul_and_random_ops_are_never_repeated():
    def fn(x, w):
        return F.dropout(F.gelu(x @ w), 0.5) @ w

    joint, parts = split(fn, leaf(4, 4), leaf(4, 4))
    forward, backward = calls(parts.forward), calls(parts.backward)
    joint_calls = calls(joint.module)
    assert forward.count(aten.mm.default) + backward.count(aten.mm.default) == joint_calls.count(
        aten.mm.default
    )
    assert aten.bernoulli.p in forward
    assert aten.bernoulli.p not in backward


def test_views_are_recomputed_from_what_they_view():
    joint, parts = split(lambda x, w: (x @ w).view(-1).sin().view(4, 4) @ w, leaf(4, 4), leaf(4, 4))
    (saved,) = extras(joint, parts)
    assert saved.name == "mm_default"


def test_value_that_leaves_anyway_is_not_saved_twice():
    joint, parts = split(lambda x, w: (x @ w).exp(), leaf(4, 4), leaf(4, 4))
    assert not extras(joint, parts)
    assert {s.source.kind for s in parts.saved} == {"input", "value"}


def test_attention_saves_no_score_matrix():
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    args = [leaf(1, 2, 64, 8) for _ in range(3)]
    joint, parts = split(fn, *args)
    scores = 1 * 2 * 64 * 64
    placeholders = parts.backward.graph.find_nodes(op="placeholder")
    assert all(node.meta["val"].numel() < scores for node in placeholders)


def test_backward_inputs_are_symbols_saved_tangents():
    joint, parts = split(lambda x, w: (x @ w).cos(), leaf(4, 4), leaf(4, 4))
    names = [node.name for node in parts.backward.graph.find_nodes(op="placeholder")]
    assert names == [s.name for s in parts.saved] + ["tangents_1"]
    assert [s.symbolic for s in parts.saved] == sorted(
        [s.symbolic for s in parts.saved], reverse=True
    )


def test_recomputation_stands_before_its_use():
    def fn(x):
        for _ in range(3):
            x = x.sin()
        return x

    _, parts = split(fn, leaf(4))
    order = calls(parts.backward)
    assert order.count(aten.sin.default) == 2
    assert order.index(aten.mul.Tensor) < len(order) - 1


def test_states_of_a_recurrence_are_not_all_recomputed():
    def fn(x, w):
        h = c = x
        for _ in range(12):
            gate = h @ w
            c = torch.sigmoid(gate) * c + gate
            h = torch.tanh(c)
        return h

    joint, parts = split(fn, leaf(4, 4), leaf(4, 4))
    # The twelve gates, and a state every few steps: chains end there.
    assert 12 < len(extras(joint, parts)) < 18


def test_a_policy_of_ones_own():
    class SaveAll(MemoryPolicy):
        def recomputable(self, node):
            return False

    joint = trace_joint(lambda x: x.cos().cos(), [leaf(4)])
    parts = partition(joint, SaveAll)
    assert aten.cos.default not in calls(parts.backward)
    assert len(parts.saved) == 2


def test_without_recomputation():
    joint = trace_joint(lambda x: x.cos().cos().view(2, 2), [leaf(4)])
    with settings.patch(recompute=False):
        parts = partition(joint)
    assert aten.cos.default not in calls(parts.backward)
    assert len(parts.saved) == 2


def test_cut_cost_is_no_more_than_saving_everything():
    joint = trace_joint(lambda x, w: F.layer_norm(F.gelu(x @ w), (8,)), [leaf(8, 8), leaf(8, 8)])
    classes = classify(joint)
    policy = MemoryPolicy(set(classes.inputs), {v for v in classes.values if v is not None})
    saved = choose_saved(classes, policy)
    everything = classes.forward & classes.wanted
    total = sum(policy.cost(node) or 0 for node in everything)
    assert sum(policy.cost(node) for node in saved) <= total


def test_an_effect_of_the_backward_keeps_its_sources_there():
    """The backward of attention on a GPU counts as random."""

    @torch.library.custom_op(
        "aot_tests::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
    )
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)

    noisy.register_fake(torch.empty_like)

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return noisy(grad * ctx.saved_tensors[0].cumsum(0)), None

    _, parts = split(Noisy.apply, leaf(9), torch.randn(9))
    assert aten.cumsum.default in calls(parts.backward)
    assert aten.cumsum.default not in calls(parts.forward)
    assert {saved.source.kind for saved in parts.saved} == {"input"}


def test_attention_without_dropout_is_not_random():
    """It has the tag of random operators for its dropout."""
    attention = aten._scaled_dot_product_flash_attention.default
    for dropout, args in ((0.0, ()), (0.0, (0.0,)), (0.0, (0.0, True)), (0.1, (0.1, False))):
        graph = torch.fx.Graph()
        q = graph.placeholder("q")
        node = graph.call_function(attention, (q, q, q, *args))
        assert draws(node) == has_effect(node) == (dropout > 0)


def test_inference_graph_cannot_be_cut():
    with pytest.raises(ValueError, match="inference"):
        partition(trace_joint(lambda x: x.cos(), [torch.randn(3)]))


def test_origin_of_backward_nodes():
    joint = trace_joint(torch.fx.symbolic_trace(lambda x: x.sin().exp()), [leaf(4)])
    cos = next(n for n in joint.module.graph.nodes if n.target is aten.cos.default)
    assert cos.meta["from_node"] == "sin"
    assert cos.meta["in_backward"]


def marked(fn, *args):
    """The joint graph of `fn` through a captured graph whose nodes have regions."""
    graph = torch.fx.Graph()
    x, *ws = (graph.placeholder(f"a{i}") for i in range(len(args)))
    for region, w in enumerate(ws):
        first = graph.call_function(fn, (x, w))
        first.meta["recompute"] = region
        x = graph.call_function(torch.add, (x, first))
    graph.output((graph.call_method("sum", (x,)),))
    return trace_joint(torch.fx.GraphModule({}, graph), args)


def block(x, w):
    return torch.tanh(F.layer_norm(x @ w, (x.shape[1],)) @ w.t()).view(-1).view(x.shape)


def peak_bytes(gm):
    """Most bytes that the values of a graph, run in order, hold at one time."""
    nodes = list(gm.graph.nodes)
    last = {source: i for i, node in enumerate(nodes) for source in node.all_input_nodes}
    live, peak = 0, 0
    sizes = {}
    for i, node in enumerate(nodes):
        value = node.meta.get("val")
        view = getattr(node.target, "is_view", False)
        sizes[node] = value.nbytes if isinstance(value, torch.Tensor) and not view else 0
        live += sizes[node]
        peak = max(peak, live)
        live -= sum(sizes[n] for n in {*node.all_input_nodes, node} if last.get(n, i) == i)
    return peak


def test_checkpointed_regions_save_only_what_they_hand_on():
    args = leaf(16, 8), leaf(8, 8), leaf(8, 8), leaf(8, 8)
    joint = marked(block, *args)
    parts = partition(joint)
    inside = [n for n in joint.module.graph.nodes if "recompute" in n.meta]
    assert {n.meta["recompute"] for n in inside} == {0, 1, 2}
    saved = extras(joint, parts)
    assert len(saved) == 2  # what enters the second and the third region
    assert calls(parts.backward).count(aten.tanh.default) == 3
    assert_halves_equal_joint(joint, parts, args)
    for node in inside:
        del node.meta["recompute"]
    usual = partition(joint)
    assert len(extras(joint, usual)) > len(saved)
    assert peak_bytes(parts.backward) < peak_bytes(usual.backward)


def test_random_numbers_of_a_checkpointed_region_are_saved():
    args = leaf(16, 8), leaf(8, 8), leaf(8, 8)
    joint = marked(lambda x, w: torch.tanh(F.dropout(x @ w, 0.5) @ w), *args)
    parts = partition(joint)
    assert not any(torch.Tag.nondeterministic_seeded in t.tags for t in calls(parts.backward)
                   if isinstance(t, torch._ops.OpOverload))  # fmt: skip
    assert calls(parts.backward).count(aten.tanh.default) == 2
    torch.manual_seed(0)
    plain = [a.detach() for a in args]
    one = torch.ones(())
    expected = joint.module(*plain, one)
    torch.manual_seed(0)
    values = parts.forward(*plain)
    pools = {"input": plain, "value": values}
    saved = [pools[s.source.kind][s.source.index] for s in parts.saved]
    got = parts.backward(*saved, one)
    torch.testing.assert_close(list(got), list(expected[joint.num_values :]))


@pytest.mark.parametrize("fn", [torch.exp, torch.sigmoid, torch.cos])
def test_of_an_input_and_a_result_eagers_choice_is_saved(fn):
    joint = trace_joint(fn, [leaf(4) * 2])
    (saved,) = partition(joint).saved
    assert saved.source.kind == ("input" if fn is torch.cos else "value")
