"""Results of one graph that are differentiated apart: what eager gives, frees and refuses."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from aot_helpers import Graphs, function_graph
from torch._decomp import get_decompositions
from weft_aot import aot_compile


def three_results(x, a, b, c):
    """The first and the last have history in common, the second has its own."""
    h = torch.tanh(x @ a)
    return (h @ b).sin().sum(), torch.tanh(x @ c).pow(2).sum(), h * 2


def arguments():
    torch.manual_seed(0)
    return [torch.randn(4, 4), *(torch.randn(4, 4, requires_grad=True) for _ in range(3))]


def both(fn):
    """Yield (function, arguments) of eager and of the graph."""
    args = arguments()
    graphs = Graphs()
    compiled = aot_compile(function_graph(fn, len(args)), args, fw_compiler=graphs)
    yield fn, args
    yield compiled, arguments()


def gradients(args):
    return [None if arg.grad is None else arg.grad.clone() for arg in args]


def assert_same(pair):
    for ours, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_one_after_the_other(order):
    logs = []
    for function, args in both(three_results):
        results = function(*args)
        logs.append([])
        for index in order:
            results[index].sum().backward()
            logs[-1] += gradients(args)
    assert_same(logs)
    assert logs[0][1:4].count(None) in (1, 2)


def test_an_unused_result_gives_no_gradient_to_what_only_it_depends_on():
    for function, args in both(
        lambda x, a, b, c: ((x @ a).sum() + (x @ b).sum(), (x @ b @ c).sin())
    ):
        function(*args)[0].backward()
        assert [arg.grad is None for arg in args] == [True, False, False, True]


@pytest.mark.parametrize("again", [0, 2])
def test_a_part_runs_once(again):
    for function, args in both(three_results):
        results = function(*args)
        results[0].backward()
        results[1].backward()
        with pytest.raises(RuntimeError, match="a second time"):
            results[again].sum().backward()


def test_a_retained_part_runs_again():
    logs = []
    for function, args in both(three_results):
        results = function(*args)
        results[0].backward(retain_graph=True)
        results[0].backward(retain_graph=True)
        results[1].backward()
        logs.append(gradients(args))
    assert_same(logs)


def test_a_write_to_what_a_waiting_part_saved_is_noticed():
    for function, args in both(three_results):
        results = function(*args)
        results[0].backward()
        with torch.no_grad():
            args[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results[1].backward()


def test_nothing_outlives_the_last_part():
    (_, _), (function, args) = both(three_results)
    results = function(*args)
    nodes = [weakref.ref(result.grad_fn) for result in results]
    results[0].backward()
    del results
    gc.collect()
    assert [node() for node in nodes] == [None] * 3


def test_batched_gradients_of_one_part():
    found = []
    for function, args in both(three_results):
        hidden = function(*args)[2]
        seeds = torch.eye(16).reshape(16, 4, 4)
        found.append(torch.autograd.grad(hidden, args[1], seeds, is_grads_batched=True))
    assert_same(found)


def test_results_that_share_a_weight_only():
    logs = []
    for function, args in both(lambda x, a, b, c: ((x @ a).sin().sum(), (x @ b @ a).tanh().sum())):
        results = function(*args)
        logs.append([])
        for result in results:
            result.backward()
            logs[-1] += gradients(args)
    assert_same(logs)


def chained(second):
    """Gradients of `a` after backwards through the results of two graphs in a row."""
    found = []
    for compiled in (False, True):
        x, a, b, c = arguments()
        first = (x @ a).tanh()
        args = [first, a, b, c]
        run = second
        if compiled:
            run = aot_compile(function_graph(second, 4), args, fw_compiler=Graphs())
        one, two = run(*args)
        one.backward()
        assert a.grad is None
        two.backward()
        found.append([a.grad, b.grad, c.grad])
    assert_same(found)


def test_a_backward_leaves_alone_what_only_other_results_depend_on():
    chained(lambda h, a, b, c: (b.sin().sum(), (h @ c).sum()))


def test_a_backward_leaves_alone_what_was_used_without_gradients():
    def second(h, a, b, c):
        with torch.no_grad():
            target = h * 2
        return (b - target).pow(2).sum(), (h + c).sin().sum()

    chained(second)


def test_an_input_without_gradient_has_no_edge():
    def detached(h, a, b, c):
        return (h.detach() * b).sum(), b * 2

    x, a, b, c = arguments()
    h = (x @ a).tanh()
    graph = function_graph(detached, 4)
    results = aot_compile(graph, [h, a, b, c], fw_compiler=Graphs())(h, a, b, c)
    nodes = [node for result in results for node, _ in result.grad_fn.next_functions]
    assert h.grad_fn not in nodes
    results[0].backward()
    h.sum().backward()
    assert a.grad is not None


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks_are_called_for_gradients_only(create_graph):
    def meeting(x, a, b, c):
        h = (x @ a).tanh()
        return h * b, h.exp() + c

    for k in (0, 1):
        called = []
        for fn, args in both(meeting):
            seen = []
            for i, arg in enumerate(args[1:]):
                arg.register_hook(lambda g, i=i, seen=seen: seen.append((i, g.sum().item())))
            fn(*args[:3], args[3] * 2)[k].sum().backward(create_graph=create_graph)
            called.append(sorted(seen))
        torch.testing.assert_close(*called)
        assert [i for i, _ in called[0]] == [0, k + 1]


class _Halved(torch.autograd.Function):
    """Gives its second input no gradient, although its node leads there."""

    @staticmethod
    def forward(ctx, x, y):
        return x / 2 + y

    @staticmethod
    def backward(ctx, grad):
        return grad / 2, None


def _differentiates_nextafter():
    try:
        torch.nextafter(torch.ones(1), torch.ones(1, requires_grad=True)).backward()
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: (torch.hypot(x, y).sgn(),),
        lambda x, y: (torch.exp(x).sgn(), y.exp().sgn() * x.sgn()),
        lambda x, y: (x.exp().sgn(), x.exp() * y, (x + y).round()),
        lambda x, y: (_Halved.apply(x, y), x * y, (x / 2).floor() + y.sin()),
        pytest.param(
            lambda x, y: (torch.nextafter(x.detach(), y).amax(0), x.exp().angle()),
            marks=pytest.mark.skipif(not _differentiates_nextafter(), reason="new in torch 2.13"),
        ),
    ],
)
def test_gradients_that_are_zero_for_all_tangents(program):
    """They are no None: autograd's nodes lead to the input, although no data does."""
    args = [torch.tensor([0.5, -1.0, 2.0], requires_grad=True) for _ in range(2)]
    graph = function_graph(program, len(args))
    found = aot_compile(graph, args, fw_compiler=lambda gm, _: gm)(*args)
    for place, (result, wanted) in enumerate(zip(found, program(*args), strict=True)):
        grads = [
            torch.autograd.grad(one.sum(), args, allow_unused=True, retain_graph=True)
            for one in (result, wanted)
        ]
        assert [g is None for g in grads[0]] == [g is None for g in grads[1]], place
        assert all(a is None or (a == b).all() for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("missing", [0, 1, None])
def test_zeros_times_infinity_belong_to_the_result_they_come_from(missing):
    def program(x):
        y = -x
        return (-(0.3**y)).sgn(), y * 2

    x = torch.tensor([1.0, 300.0, 0.0], requires_grad=True)
    found = aot_compile(function_graph(program, 1), [x], fw_compiler=lambda gm, _: gm)(x)
    grads = [
        torch.autograd.grad([r.sum() for k, r in enumerate(rows) if k != missing], x)[0]
        for rows in (found, program(x))
    ]
    torch.testing.assert_close(*grads, equal_nan=True)


def test_a_gradient_of_nothing_belongs_to_the_result_it_comes_from():
    x, empty = torch.ones(3, requires_grad=True), torch.ones(0, 8, requires_grad=True)

    def program(x, empty):
        return x.exp(), F.layer_norm(empty, empty.shape), F.linear(empty, empty)

    graph = function_graph(program, 2)
    table = get_decompositions([torch.ops.aten.native_layer_norm_backward])
    compiled = aot_compile(graph, [x, empty], fw_compiler=lambda gm, _: gm, decompositions=table)
    results = compiled(x, empty)
    for place, reached in enumerate([False, True, True]):
        (grad,) = torch.autograd.grad(results[place].sum(), empty, allow_unused=True)
        assert (grad is not None) == reached


def test_a_zero_gradient_joins_no_histories():
    x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    graph = function_graph(lambda x: (x.sin().round(), x.exp()), 1)
    first, second = aot_compile(graph, [x], fw_compiler=lambda gm, _: gm)(x)
    second.sum().backward()
    first.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


def made_of_one_another(x, a, b, c):
    first = x * a
    second = torch.tanh(first @ b)
    return first, second, second * first, c.sin()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("weights", [(0, 0, 1, 0), (1, 0, 2, 1), (0, 3, 0, 0), (1, 0, 0, 1)])
def test_results_retain_what_comes_through_results_made_of_them(weights, create_graph):
    logs = []
    for function, args in both(made_of_one_another):
        results = function(*args)
        for result in results:
            result.retain_grad()
        total = sum(w * r.square().sum() for w, r in zip(weights, results) if w)
        for _ in range(2):
            total.backward(retain_graph=True, create_graph=create_graph)
        logs.append(gradients(args) + gradients(results))
    assert_same(logs)


def test_a_hook_on_a_result_that_others_are_made_of_is_an_error_where_it_matters():
    (_, _), (compiled, args) = both(made_of_one_another)
    first, second, third, apart = compiled(*args)
    seen = []
    for result in (first, third, apart):
        result.register_hook(seen.append)
    (third.detach() * first + apart).sum().backward(retain_graph=True)
    assert any(grad is not None and torch.equal(grad, third) for grad in seen)
    with pytest.raises(RuntimeError, match="hook on a result"):
        second.sum().backward()


def test_results_that_others_are_made_of_are_not_kept_alive():
    (_, _), (compiled, args) = both(made_of_one_another)
    first, *_, third, _ = compiled(*args)
    watched = weakref.ref(first)
    del first, _
    gc.collect()
    assert watched() is None
    third.sum().backward()


def test_terms_of_unlike_layouts_come_from_parts_of_their_own():
    def function(x, y):
        return x / y, torch.nn.functional.pad(x, (0, 0, -1, 0))

    grads = []
    graph = function_graph(function, 2)
    for run in (function, None):
        x, y = torch.ones(3, 4).t().requires_grad_(), torch.zeros(3, requires_grad=True)
        run = run or aot_compile(graph, [x, y], fw_compiler=Graphs())
        run(x, y)[1].sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_gradient_that_no_tangent_reaches_is_still_nan():
    def function(x, y):
        undefined = x.log()
        return torch.nn.functional.mse_loss(undefined, undefined) ** 0, x.var() * y

    grads = []
    graph = function_graph(function, 2)
    for run in (function, None):
        x, y = torch.tensor([-1.0, 2.0], requires_grad=True), torch.ones(())
        run = run or aot_compile(graph, [x, y], fw_compiler=Graphs())
        sum(run(x, y)).backward()
        grads.append(x.grad)
    assert grads[0].isnan().tolist() == grads[1].isnan().tolist() == [True, False]


def aux(h):
    """A result whose gradient is infinite where h is 0, and others of h."""
    return h.log(), h.sin(), torch.stack([h.sqrt(), h * 3]).unbind(0)[1]


@pytest.mark.parametrize("used", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_an_unused_result_puts_no_nan_into_gradients(used):
    def fn(x, a):
        return aux(torch.relu(x) * a)

    found = []
    for compiled in (False, True):
        args = [torch.tensor([1.0, -1.0, 2.0]).requires_grad_(), torch.randn(3).requires_grad_()]
        with torch.no_grad():
            args[1].copy_(torch.tensor([0.5, 2.0, 1.0]))
        function = fn
        graphs = Graphs()
        if compiled:
            function = aot_compile(function_graph(fn, 2), args, fw_compiler=graphs)
        for _ in range(2):
            results = function(*args)
            total = sum(results[index].sum() for index in used)
            found.append(torch.autograd.grad(total, args, allow_unused=True))
        if compiled:  # forward, backward, and one of the used results alone
            assert len(graphs.modules) == (2 if len(used) == 3 else 3)
    for ours in found[2:]:
        torch.testing.assert_close(ours, found[0], equal_nan=True)


def test_a_result_that_was_written_is_read_where_it_counts():
    """`z` saves itself for its own gradient, which nobody asks for at first."""

    def function(x):
        v = x.var()
        return v.tan(), v.exp(), v.tanh()

    logs, graphs, x = [], Graphs(), torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    compiled = aot_compile(function_graph(function, 1), [x], fw_compiler=graphs)
    for each in (function, compiled):
        y, z, w = each(x)
        z.mul_(2)
        first = torch.autograd.grad(y, x, retain_graph=True)
        logs.append([*first, *torch.autograd.grad([y, w], x, retain_graph=True)])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad([y, z], x)
    assert_same(logs)


@pytest.mark.parametrize("number", [lambda v: v / 0, lambda v: v * float("inf")])
def test_a_missing_gradient_is_not_divided_by_zero(number):
    def function(x):
        v = torch.nn.functional.elu(x)
        return v, number(v * 3)

    logs, x = [], torch.tensor([0.3, -0.2], requires_grad=True)
    graph = function_graph(function, 1)
    for each in (function, aot_compile(graph, [x], fw_compiler=Graphs())):
        logs.append(torch.autograd.grad(each(x)[0].sum(), x))
    assert_same(logs)
