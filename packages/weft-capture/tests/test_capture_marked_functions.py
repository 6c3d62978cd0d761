"""What torch or weft has already compiled, disabled or marked, called by a captured program."""

import functools
import importlib

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import nn
from weft_core.errors import Unsupported

X = torch.arange(6.0).reshape(2, 3)


def twice(x):
    return x * 2


def captured(function, **options):
    return weft_capture.capture(function, eager_backend, **options)


by_torch = functools.partial(torch.compile, backend="eager")
theirs = importlib.import_module("torch._dynamo")
linear = nn.Linear(3, 3)
compiled_in_place = nn.Linear(3, 3)
compiled_in_place.compile(backend="eager")
COMPILED = {
    "weft": captured(twice),
    "torch": by_torch(twice),
    "torch's module": by_torch(linear),
    "module.compile": compiled_in_place,
    "region": torch.compiler.nested_compile_region(twice),
    "region of a region": torch.compiler.nested_compile_region(
        torch.compiler.nested_compile_region(twice)
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_on_its_own_is_inlined(name):
    inner = COMPILED[name]
    plain = {"torch's module": linear, "module.compile": compiled_in_place.forward}
    optimised = captured(lambda x: inner(inner(x + 1)).sin(), fullgraph=True)
    function = plain.get(name, twice)
    torch.testing.assert_close(optimised(X), function(function(X + 1)).sin())
    assert len(optimised._weft_capture.graphs) == 1


def breaks(x):
    y = x.sin()
    print(end="")
    weft_capture.graph_break()
    return y * 2


class Scale:
    def __init__(self):
        self.by = 3.0

    def __call__(self, x):
        return x * self.by


INNER = {
    "function": lambda run: run(twice),
    "function with a graph break": lambda run: run(breaks),
    "fullgraph": lambda run: run(twice, fullgraph=True) if run is captured else twice,
    "method": lambda run: run(Scale().__call__),
    "object": lambda run: run(Scale()),
    "partial": lambda run: run(functools.partial(torch.mul, other=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", INNER)
def test_what_torch_compiles_may_call_captured_functions(name, fullgraph):
    if fullgraph and name == "function with a graph break":
        fullgraph = False
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    plain, inner = INNER[name](lambda function: function), INNER[name](captured)
    outer = torch.compile(lambda x: inner(x + 1) + 1, backend=keep, fullgraph=fullgraph)
    for _ in range(2):
        torch.testing.assert_close(outer(X), plain(X + 1) + 1)
    torch.testing.assert_close(inner(X), plain(X))
    assert graphs


def test_captured_functions_that_call_one_with_fullgraph_keep_its_fullgraph():
    inner = captured(breaks, fullgraph=True)
    with pytest.raises(Unsupported, match="graph-break"):
        captured(lambda x: inner(x + 1) + 1)(X)


def test_a_function_that_torch_compiles_is_captured_in_its_place():
    optimised = captured(by_torch(twice), fullgraph=True)
    assert torch.equal(optimised(X), X * 2)
    assert len(optimised._weft_capture.graphs) == 1


class Separately(torch.autograd.Function):
    @staticmethod
    @captured
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @captured
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 10 * x.cos()


def test_custom_function_of_compiled_halves():
    for run in (Separately.apply, captured(lambda x: Separately.apply(x), fullgraph=True)):
        x = X.clone().requires_grad_()
        run(x).sum().backward()
        torch.testing.assert_close(x.grad, 10 * X.cos())


def test_a_break_in_what_is_compiled_inside_is_its_own_error():
    def breaking(x):
        x = x + 1
        weft_capture.graph_break()
        return x * 2

    whole = captured(breaking, fullgraph=True)
    with pytest.raises(Unsupported, match="graph-break"):
        captured(lambda x: whole(x * 2))(X)
    in_parts = captured(breaking)
    torch.testing.assert_close(captured(lambda x: in_parts(x * 2) - 1)(X), (X * 2 + 1) * 2 - 1)


def test_a_stance_set_later_is_obeyed():
    optimised = captured(lambda x: COMPILED["weft"](x) + 1)
    torch.testing.assert_close(optimised(X), X * 2 + 1)
    with weft_capture.set_stance("force_eager"):
        torch.testing.assert_close(optimised(X), X * 2 + 1)
    torch.testing.assert_close(optimised(X), X * 2 + 1)


def test_replaced_original_is_noticed():
    def program(x):
        return holder["f"](x)

    holder = {"f": by_torch(twice)}
    optimised = captured(program, fullgraph=True)
    torch.testing.assert_close(optimised(X), X * 2)
    holder["f"] = by_torch(lambda x: x * 3)
    torch.testing.assert_close(optimised(X), X * 3)


def test_a_wrapper_of_a_compiled_function_is_not_taken_for_it():
    inner = by_torch(twice)

    @functools.wraps(inner)
    def around(x):
        return inner(x) + 5

    torch.testing.assert_close(captured(lambda x: around(x), fullgraph=True)(X), X * 2 + 5)


def helper(x):
    return x.cos()


@torch.compiler.disable
def disabled(x):
    return helper(x) * 2


@torch.compiler.disable(recursive=False)
def disabled_alone(x):
    return helper(x) * 2


@pytest.mark.parametrize(
    ("function", "operations"), [(disabled, [1, 1]), (disabled_alone, [1, 1, 1])]
)
def test_what_torch_disables_is_not_captured(function, operations):
    optimised = captured(lambda x: function(x + 1).sin())
    torch.testing.assert_close(optimised(X), ((X + 1).cos() * 2).sin())
    ops = [len([n for n in g.graph.nodes if n.op.startswith("call")]) for g in graphs(optimised)]
    assert ops == operations
    assert [b.code for b in optimised._weft_capture.breaks] == ["disabled"]


def graphs(optimised):
    return optimised._weft_capture.graphs


def test_questions_and_marks_of_torch():
    def program(x):
        theirs.mark_static(x)
        theirs.mark_static_address(x)
        known = theirs.is_compiling(), torch.compiler.is_compiling()
        return x + 1, known, torch.compiler.is_exporting()

    result, *known = captured(program, fullgraph=True)(X)
    torch.testing.assert_close(result, X + 1)
    assert known == [(True, True), False]


def test_graph_break_of_torch():
    def program(x):
        x = x + 1
        theirs.graph_break()
        return x * 2

    optimised = captured(program)
    torch.testing.assert_close(optimised(X), (X + 1) * 2)
    assert [b.code for b in optimised._weft_capture.breaks] == ["graph-break"]
    with pytest.raises(Unsupported, match="graph-break"):
        captured(program, fullgraph=True)(X)


def test_marks_of_torch_on_functions():
    allowed = torch.compiler.allow_in_graph(lambda x: x * 2)
    constant = torch.compiler.assume_constant_result(lambda: 5)
    optimised = captured(lambda x: allowed(x + constant()).sin(), fullgraph=True)
    torch.testing.assert_close(optimised(X), ((X + 5) * 2).sin())
