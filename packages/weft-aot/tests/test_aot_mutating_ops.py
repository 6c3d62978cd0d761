"""Custom operators that write to their arguments are compiled with the rest of the program."""

from __future__ import annotations

import pytest
import torch
from aot_helpers import Graphs, check, function_graph
from weft_aot import aot_compile

OPS = torch.library.Library("aot_mutating", "FRAGMENT")
OPS.define("scale(Tensor(a!) x, float k=2.) -> ()")
OPS.define("both(Tensor x, *, Tensor(a!) y, Tensor(b!)? z=None) -> (Tensor, Tensor)")
OPS.define("each(Tensor(a!)[] xs) -> Tensor[]")
OPS.define("same(Tensor(a!) x) -> Tensor(a!)")


@torch.library.impl(OPS, "scale", "CompositeExplicitAutograd")
def _scale(x, k=2.0):
    x.mul_(k)


@torch.library.impl(OPS, "both", "CompositeExplicitAutograd")
def _both(x, *, y, z=None):
    y.add_(x)
    if z is not None:
        z.sub_(x)
    return x + y, x * 2


@torch.library.impl(OPS, "each", "CompositeExplicitAutograd")
def _each(xs):
    for x in xs:
        x.add_(1)
    return [x * 2 for x in xs]


@torch.library.impl(OPS, "same", "CompositeExplicitAutograd")
def _same(x):
    return x.mul_(2)


ops = torch.ops.aot_mutating


def on_view(x):
    ops.scale(x.t()[1:], 3.0)
    return x + 1, x.t()


def on_intermediate(x):
    y = x * 2
    ops.scale.default(y)
    return y, y.t().reshape(-1)


def with_results(x):
    y = x.clone()
    first, second = ops.both(x, y=y)
    third, _ = ops.both(y, y=x, z=first)
    return first, second, third, y


def on_lists(x):
    made = ops.each([x[0], x[1].clone()])
    return made[0] + made[1], x


@pytest.mark.parametrize("program", [on_view, on_intermediate, with_results, on_lists])
@pytest.mark.parametrize(
    "x", [torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(6, 8)[::2, :4]]
)
def test_results_and_writes(program, x):
    (graph,) = check(program, x)
    assert any("weft_functional" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_has_no_twin_runs_as_it_is(needs_grad):
    def program(x):
        y = x * 2
        with torch.no_grad():
            return ((ops.same(y) * 3).sum(),)

    x, graphs = torch.randn(3, requires_grad=needs_grad), Graphs()
    compiled = aot_compile(function_graph(program, 1), [x], fw_compiler=graphs)
    assert not graphs.modules
    torch.testing.assert_close(compiled(x), program(x))


@torch.library.custom_op("aot_mutating::past_autograd", mutates_args=("x",))
def past_autograd(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


def on_a_leaf(x, y):
    past_autograd(x, y)
    return (x * 2,)


def on_saved_later(x, y):
    z = x * 2
    past_autograd(z[1:], y[1:])
    return (z.exp() * z,)


def on_a_new_tensor(x, y):
    z = torch.ones(3)
    past_autograd(z, x)
    return (z * y,)


@pytest.mark.parametrize("program", [on_a_leaf, on_saved_later, on_a_new_tensor])
def test_operators_without_a_gradient_write_past_the_history(program):
    graphs = check(program, *(torch.randn(3, requires_grad=True) for _ in range(2)))
    assert len(graphs) == 2
