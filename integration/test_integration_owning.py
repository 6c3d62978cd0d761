"""`call_owning`: arguments die after their last use, and the results are those of a plain call."""

import weakref

import pytest
import torch
import weft_codegen
from torch import fx
from torch.profiler import ProfilerActivity, profile
from weft_aot import aot_compile


def compiled(fn, inputs):
    graph = fx.Graph()
    args = [graph.placeholder(f"a{i}") for i in range(len(inputs))]
    graph.output(graph.call_function(fn, tuple(args)))
    gm = fx.GraphModule({}, graph)
    return aot_compile(
        gm,
        inputs,
        fw_compiler=weft_codegen.compile_graph,
        decompositions=weft_codegen.decompositions(),
    )


def test_arguments_die_and_results_are_the_same():
    inputs = [torch.randn(80, 80) for _ in range(4)]
    inputs[1] = inputs[1].t()  # other strides than compiled for: copied
    small = torch.randn(3)

    def fn(a, b, c, d, e):
        return ((a @ b).relu() @ c.t(), d.sin(), e * 2)

    function = compiled(fn, [inputs[0], inputs[0].clone(), *inputs[2:], small])
    want = function(*inputs, small)
    watched = [weakref.ref(tensor) for tensor in inputs]
    args = [*inputs, small]
    del inputs
    got = function.call_owning(args)
    torch.testing.assert_close(got, want)
    assert [r() is None for r in watched] == [True] * 4


def test_one_argument_and_a_wrong_number():
    x = torch.randn(100, 100)
    function = compiled(lambda x: ((x @ x).sin(),), [x])
    torch.testing.assert_close(function.call_owning([x]), function(x))
    with pytest.raises(TypeError, match="takes 1 arguments, got 2"):
        function.call_owning([x, x])
    with pytest.raises(TypeError, match="not a plain tensor"):
        function.call_owning([None])


def test_the_same_tensor_twice_and_an_argument_that_is_an_output():
    x, y = torch.randn(80, 80), torch.randn(80, 80)
    function = compiled(lambda x, y, z: (x @ y + z.exp(), y.sin()), [x, y, y.clone()])
    torch.testing.assert_close(function.call_owning([x, y, y]), function(x, y, y))


def test_a_compiled_backward_frees_saved_tensors_as_it_goes():
    x = torch.randn(100, 100)
    w = torch.randn(100, 100, requires_grad=True)
    function = compiled(lambda h, w: ((h @ w).tanh(),), [x, w])
    h = x * 2
    (out,) = function(h, w)
    watched = weakref.ref(h)
    del h
    out.sum().backward()
    assert watched() is None
    torch.testing.assert_close(w.grad, (x * 2).t() @ (1 - ((x * 2) @ w).tanh() ** 2).detach())


def test_retain_graph_keeps_them():
    w = torch.randn(100, 100, requires_grad=True)
    function = compiled(lambda w: ((w @ w).tanh(),), [w])
    (out,) = function(w)
    first = torch.autograd.grad(out.sum(), w, retain_graph=True)
    second = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(first, second)


def test_a_step_needs_no_more_memory_than_eager():
    weights = [(torch.randn(256, 256) / 16).requires_grad_() for _ in range(4)]
    x = torch.randn(64, 256)

    def fn(x, *weights):
        for weight in weights:
            x = torch.nn.functional.gelu(x @ weight)
        return (x,)

    function = compiled(fn, [x, *weights])

    def step(run):
        run(x, *weights)[0].sum().backward()
        return [weight.grad for weight in weights]

    results, peaks = [], []
    for run in (fn, function, fn, function):  # the first calls of both are not measured
        for weight in weights:
            weight.grad = None
        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as recorded:
            results.append(step(run))
        in_use = [0]
        for event in recorded.profiler.kineto_results.events():
            if event.name() == "[memory]":
                in_use.append(in_use[-1] + event.nbytes())
        peaks.append(max(in_use))
    torch.testing.assert_close(results[3], results[2], rtol=1e-4, atol=1e-4)
    gradients = 4 * weights[0].nbytes
    assert gradients < peaks[3] <= peaks[2]


def test_a_repeated_weight_is_transposed_once():
    """A gradient's transpositions meet and cancel: sums of them need no memory of their own."""
    weight, h = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    graphs = []

    def steps(weight, h):
        for _ in range(4):
            h = torch.nn.functional.linear(h, weight).tanh()
        return (h,)

    def keep(gm, inputs, **rest):
        graphs.append(gm)
        return weft_codegen.compile_graph(gm, inputs)

    graph = fx.Graph()
    args = (graph.placeholder("weight"), graph.placeholder("h"))
    graph.output(graph.call_function(steps, args))
    table = weft_codegen.decompositions()
    gm = fx.GraphModule({}, graph)
    function = aot_compile(gm, [weight, h], fw_compiler=keep, decompositions=table)
    function(weight, h)[0].sum().backward()
    products = [n for n in graphs[-1].graph.nodes if n.target is torch.ops.aten.mm.default]
    aten = torch.ops.aten
    turns = (aten.t.default, aten.transpose.int, aten.permute.default)
    turned = [n for n in graphs[-1].graph.nodes if n.target in turns]
    assert len(products) == 7
    assert 0 < len(turned) < len(products)
