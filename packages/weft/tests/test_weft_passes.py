"""Passes of the program over aten graphs, patterns, and blocks compiled by themselves."""

import pytest
import torch
import weft
from weft_codegen.patterns import Patterns

F = torch.nn.functional


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def squares(x, w):
    return ((x @ w) * torch.sigmoid(x @ w)).sum()


def test_passes_see_the_graphs_that_they_are_for():
    seen = {"joint": [], "post_grad": []}
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    options = {
        "joint_custom_post_pass": lambda graph: seen["joint"].append(targets(graph)),
        "post_grad_custom_pre_pass": lambda graph: seen["post_grad"].append(targets(graph)),
    }
    compiled = weft.compile(squares, options=options)
    (expected,) = torch.autograd.grad(squares(x, w), w)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w), w)[0], expected)
    assert len(seen["joint"]) == 1
    assert len(seen["post_grad"]) == 2  # forward and backward
    assert "aten.sigmoid.default" in seen["joint"][0]


def test_a_pass_changes_the_graph():
    def doubles(graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default

    x = torch.randn(5)
    compiled = weft.compile(lambda x: x.sin() + 1, options={"post_grad_custom_post_pass": doubles})
    torch.testing.assert_close(compiled(x), x.cos() + 1)


def test_a_pattern_is_replaced_where_it_fits():
    patterns = Patterns()
    patterns.add(
        lambda a, b: a.relu() + b * 2,
        lambda a, b: torch.maximum(a, torch.zeros_like(a)) - b,
        [torch.empty(2, 3), torch.empty(2, 3)],
        check=lambda nodes: nodes["arg0"].meta["val"].dim() == 2,
    )

    def f(x, y):
        return (x.relu() + y * 2) * 3, x[0].relu() + y[0] * 2, x.abs() + y * 4

    x, y = torch.randn(4, 5), torch.randn(4, 5)
    options = {"post_grad_custom_pre_pass": patterns}
    first, *others = weft.compile(f, options=options)(x, y)
    torch.testing.assert_close(first, (x.relu() - y) * 3)
    torch.testing.assert_close(others, list(f(x, y)[1:]))
    assert patterns.count == 1


def test_a_pass_is_a_function():
    with pytest.raises(weft.WeftError, match="joint_custom_pre_pass takes a function"):
        weft.compile(squares, options={"joint_custom_pre_pass": 3})


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).relu()


def test_repeated_blocks_are_compiled_once():
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Sequential(*(Block() for _ in "abc")))
    x = torch.randn(2, 3)
    expected, before = net(x), weft.counters["capture"]["graphs"]
    assert weft.compile_repeated_blocks(net, fullgraph=True) is net
    torch.testing.assert_close(net(x), expected)
    assert weft.counters["capture"]["graphs"] == before + 1
    assert set(net.state_dict()) == {
        f"{name}.{kind}"
        for name in ("0", "1.0.linear", "1.1.linear", "1.2.linear")
        for kind in ("weight", "bias")
    }
    with pytest.raises(ValueError, match="no repeated blocks"):
        weft.compile_repeated_blocks(torch.nn.Linear(2, 2))


def test_the_lite_mode_calls_operators():
    before = dict(weft.counters["extern"])
    compiled = weft.compile(lambda x: (x.view(3, 1) * 2).sin().sum(), mode="lite")
    x = torch.randn(3)
    assert torch.equal(compiled(x), (x.view(3, 1) * 2).sin().sum())
    assert weft.counters["extern"]["aten.sin.default"] == before.get("aten.sin.default", 0) + 1
