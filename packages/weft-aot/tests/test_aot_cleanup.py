"""The simplifications before the cut, and what they must leave alone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from aot_helpers import Graphs, function_graph
from weft_aot import aot_compile, trace_joint

aten = torch.ops.aten


def calls(fn, *args):
    graph = trace_joint(fn, args).module.graph
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.view(3, 3).sin(),
        lambda x: (x * 1).sin(),
        lambda x: (x / 1.0).sin(),
        lambda x: x.t().t().sin(),
        lambda x: x.transpose(0, 1).transpose(1, 0).sin(),
        lambda x: x.expand(3, 3).sin(),
        lambda x: x.permute(0, 1).sin(),
        lambda x: x.to(torch.float32, copy=True).sin(),
        lambda x: (x.cos(), x.sin())[1],
    ],
)
def test_no_ops_disappear(fn):
    assert calls(fn, torch.randn(3, 3)) == [aten.sin.default]


@pytest.mark.parametrize(
    ("fn", "kept"),
    [
        (lambda x: x.t().sin(), aten.t.default),
        (lambda x: (x * 1.5).sin(), aten.mul.Tensor),
        (lambda x: x.double().sin(), aten._to_copy.default),
        (lambda x: x.permute(1, 0).sin(), aten.permute.default),
        (lambda x: x[None].transpose(0, 1).transpose(1, 2).sin(), aten.transpose.int),
        (lambda x: x.t().clone(memory_format=torch.contiguous_format).sin(), aten.clone.default),
        (lambda x: x.clone(), aten.clone.default),
        (lambda x: x.clone().view(9), aten.clone.default),
    ],
)
def test_what_matters_stays(fn, kept):
    assert kept in calls(fn, torch.randn(3, 3))


def test_common_subexpressions():
    found = calls(lambda x: x.sin() + x.sin() * x.sin().exp(), torch.randn(3))
    assert found.count(aten.sin.default) == 1


def test_a_part_of_one_result_does_not_share_memory_with_an_equal_one():
    def f(x):
        whole = x + 1
        return (x + 1).chunk(2)[0], whole

    x = torch.ones(4)
    part, whole = aot_compile(function_graph(f, 1), [x], fw_compiler=Graphs())(x)
    part.zero_()
    assert whole.tolist() == [2.0] * 4


def test_equal_results_of_equal_operators_with_several_are_two_tensors():
    def fn(x):
        return x.cummin(0).indices, x.cummin(0).indices, x.sort().values, x.sort().values.t()

    x = torch.randn(3, 3)
    results = aot_compile(function_graph(fn, 1), [x], fw_compiler=Graphs())(x)
    torch.testing.assert_close(tuple(results), fn(x))
    assert len({one.untyped_storage()._cdata for one in results}) == 4


def test_equal_reshapes_that_copy_do_not_share_memory():
    def f(x):
        return x.t().contiguous(), x.t().reshape(-1), x.t().reshape(-1).view(3, 2)

    x = torch.arange(6.0).view(2, 3)
    results = aot_compile(function_graph(f, 1), [x], fw_compiler=Graphs())(x)
    for result, expected in zip(results, f(x), strict=True):
        torch.testing.assert_close(result, expected)
        result.zero_()


def written_and_seen(cache, x):
    cache[0].add_(x)
    return cache.t() @ cache, cache.view(-1), x * 2


@pytest.mark.parametrize("inside", [(), (0,), (1,), (0, 1)], ids=str)
def test_writes_under_inference_mode_are_seen_through_views(inside):
    """Of tensors from outside of the mode and from inside, numbered in `inside`."""
    outcomes = []
    for compiled in (False, True):
        outside = [torch.ones(2, 3), torch.full((3,), 2.0)]
        with torch.inference_mode():
            given = [one.clone() if i in inside else one for i, one in enumerate(outside)]
            graph = function_graph(written_and_seen, 2)
            run = aot_compile(graph, given, fw_compiler=Graphs()) if compiled else written_and_seen
            outcomes.append([*run(*given), *given])
    for found, expected in zip(*outcomes, strict=True):
        assert found.is_inference() == expected.is_inference()
        assert found.is_inference() or found._version == expected._version
        assert torch.equal(found, expected)


def test_numbers_that_compare_equal_are_not_the_same_argument():
    def fn(x):
        return (x + 1).sum() + (x + True).sum() + torch.full((3,), 0.0) / torch.full((3,), -0.0)

    assert calls(fn, torch.randn(3)).count(aten.full.default) == 2


def test_random_numbers_are_not_common():
    found = calls(lambda x: torch.rand_like(x) + torch.rand_like(x), torch.randn(3))
    assert found.count(aten.rand_like.default) == 2


def test_a_dropped_function_frees_its_graphs():
    graphs = Graphs()
    x = torch.randn(3, requires_grad=True)
    compiled = aot_compile(function_graph(lambda x: (x.sin(),), 1), [x], fw_compiler=graphs)
    compiled(x)[0].sum().backward()
    alive = [weakref.ref(module) for module in graphs.modules]
    del compiled, graphs
    gc.collect()
    assert [module() for module in alive] == [None, None]
