"""Graph backends through `graph_compiler`, and the protocol that inlines an AOT backward."""

import pytest
import torch
import weft_compiled_autograd as ca
from torch import nn


@pytest.fixture(autouse=True)
def fresh():
    ca.reset()
    yield
    ca.reset()


class Backend:
    def __init__(self):
        self.graphs = []

    def __call__(self, gm, inputs):
        gm.graph.lint()
        places = list(gm.graph.find_nodes(op="placeholder"))
        assert len(places) == len(inputs)
        for place, value in zip(places, inputs):
            if isinstance(value, torch.Tensor):
                assert place.meta["example_value"].dtype == value.dtype
        self.graphs.append(gm)
        return gm


def test_01_without_hooks_one_flat_graph():
    backend = Backend()
    compiler = ca.graph_compiler(backend)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for size in (5, 7, 9):
        x = torch.randn(size, 3)
        want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        with ca.enable(compiler):
            got = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            for p in model.parameters():
                p.grad = None
            model(x).sum().backward()
        for a, b, p in zip(got, want, model.parameters()):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(p.grad, b)
    assert len(backend.graphs) == 4


def test_02_hooks_cut_the_graph():
    backend = Backend()
    seen = []
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(g.clone()) or g * 10)
    z = y.sin()
    with ca.enable(ca.graph_compiler(backend)):
        z.sum().backward()
    torch.testing.assert_close(x.grad, 20 * (2 * x.detach()).cos())
    assert len(seen) == 1 and len(backend.graphs) == 2


def test_03_gradients_that_exist_are_added_to():
    backend = Backend()
    x = torch.randn(3, requires_grad=True)
    with ca.enable(ca.graph_compiler(backend)):
        (x * 2).sum().backward()
        first = x.grad
        (x * 3).sum().backward()
    assert x.grad is first and torch.equal(first, torch.full((3,), 5.0))


def test_04_tensors_die_during_the_backward():
    import weakref

    alive = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            alive.append(watched() is not None)
            return g

    for compiler in (ca.graph_compiler(Backend()), lambda gm: gm):
        x = torch.randn(3, requires_grad=True)
        middle = Look.apply(x) + 0
        loss = middle.sin().sum()
        watched = weakref.ref(middle)
        del middle
        with ca.enable(compiler):
            loss.backward()
    assert alive == [False, False]


def aot_function(number):
    """What an ahead-of-time compiler leaves in the autograd graph, by hand: y = sin(x) * w."""
    graph = torch.fx.Graph()
    x, w, tangent = (graph.placeholder(n) for n in ("primals_1", "primals_2", "tangents_1"))
    sin = graph.call_function(torch.ops.aten.sin.default, (x,))
    cos = graph.call_function(torch.ops.aten.cos.default, (x,))
    gw = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, sin))
    gx0 = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, w))
    gx = graph.call_function(torch.ops.aten.mul.Tensor, (gx0, cos))
    graph.output((gx, gw))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)

    class CompiledFunction(torch.autograd.Function):
        weft_aot_id = number
        weft_dynamic = False
        weft_backward_graph = module

        @staticmethod
        def weft_backward_inputs(ctx, *grads):
            return [*ctx.saved_tensors, *grads]

        @staticmethod
        def weft_backward_outputs(ctx, outputs):
            return (*outputs, None)

        @staticmethod
        def weft_backward_graph_for(grads):
            return module

        @staticmethod
        def weft_reached(grads):
            return [True, True]

        @staticmethod
        def weft_watched(ctx):
            return False

        @staticmethod
        def _compiled_autograd_key(ctx):
            return (ctx._autograd_function_id, *ctx.symbols)

        @staticmethod
        def forward(ctx, x, w, flag):
            ctx.symbols = ()
            ctx.save_for_backward(x, w)
            return x.sin() * w

        @staticmethod
        def backward(ctx, g):
            raise AssertionError("called although it is inlined")

    return CompiledFunction


def test_05_aot_backward_is_inlined_with_its_names():
    graphs = []

    def compiler(gm):
        graphs.append(gm)
        return gm

    first, second = aot_function(0), aot_function(1)
    for n in (3, 5, 9):
        x, w = torch.randn(n, requires_grad=True), torch.randn(n, requires_grad=True)
        y = second.apply(first.apply(x, w, True), w, False)
        with ca.enable(compiler):
            y.sum().backward()
        with torch.enable_grad():
            a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
            want = torch.autograd.grad(((a.sin() * b).sin() * b).sum(), (a, b))
        torch.testing.assert_close(x.grad, want[0])
        torch.testing.assert_close(w.grad, want[1])
    assert len(graphs) == 2
    names = [n.name for n in graphs[0].graph.nodes]
    assert {"aot0_sin_default", "aot0_mul_tensor_1", "aot1_cos_default", "aot0_primals_1"} <= set(
        names
    ), names
    origins = {n.name: n.meta.get("autograd_node") for n in graphs[0].graph.nodes}
    assert origins["aot1_cos_default"] == "CompiledFunctionBackward1 (NodeCall 2)"


def test_06_one_aot_graph_used_twice():
    graphs = []
    function = aot_function(7)
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with ca.enable(lambda gm: graphs.append(gm) or gm):
        function.apply(function.apply(x, w, 0), w, 0).sum().backward()
    names = {n.name for n in graphs[0].graph.nodes}
    assert {"aot7_sin_default", "aot7_1_sin_default"} <= names
    a = x.detach().requires_grad_()
    (want,) = torch.autograd.grad(((a.sin() * w.detach()).sin() * w.detach()).sum(), a)
    torch.testing.assert_close(x.grad, want)


def test_07_hooks_on_parameters_do_not_cut_the_ops():
    backend = Backend()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    order = []
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: order.append(name) or g * 2)
    x = torch.randn(5, 3)
    want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    expected, order[:] = list(order), []
    with ca.enable(ca.graph_compiler(backend)):
        model(x).sum().backward()
    for p, w in zip(model.parameters(), want):
        torch.testing.assert_close(p.grad, w)
    assert order == expected
    assert len(backend.graphs) == 1


def test_08_a_hook_on_a_shared_gradient():
    def program():
        a = torch.ones(3, requires_grad=True)
        b = torch.ones(3, requires_grad=True)
        y = a * 2
        z = y + b.exp()
        y.register_hook(lambda g: g * 10)
        (z * 3).sum().backward()
        return a.grad, b.grad

    want = program()
    with ca.enable(ca.graph_compiler(Backend())):
        got = program()
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y)


def test_09_optimizer_steps_in_hooks_read_and_write_weights_in_order():
    def program():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def step(p):
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(torch.randn(5, 3)).sum().backward()
        return list(model.parameters())

    want = program()
    with ca.enable(ca.graph_compiler(Backend())):
        got = program()
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y)
