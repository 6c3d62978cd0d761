"""Tracing: pure aten graphs equal to the program, with origins, decompositions and mutations."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import fx
from weft_core.fake import fake_mode, make_shape_env, to_fake
from weft_core.tracing import AtenTracer, trace_aten

aten = torch.ops.aten


def trace(fn, *args, **options):
    mode = fake_mode()
    return trace_aten(fn, [to_fake(mode, arg) for arg in args], **options)


def targets(gm: fx.GraphModule) -> list:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def assert_same_as_eager(fn, *args):
    gm = trace(fn, *args)
    gm.graph.lint()
    expected = fn(*[arg.clone() for arg in args])
    actual = gm(*[arg.clone() for arg in args])
    torch.testing.assert_close(list(actual), list(expected))
    return gm


def test_composite_ops_become_core_ops():
    gm = assert_same_as_eager(
        lambda x, w, b: (torch.nn.functional.linear(x, w, b).reshape(-1),),
        torch.randn(3, 4), torch.randn(5, 4), torch.randn(5),
    )  # fmt: skip
    assert aten.addmm.default in targets(gm)
    assert aten.linear.default not in targets(gm)
    assert all("val" in node.meta for node in gm.graph.nodes if node.op != "output")


def test_mutation_of_a_view_is_pure():
    def fn(x):
        y = x * 2
        y[0].add_(1)
        y.view(-1)[3:] = 0
        return (y,)

    gm = assert_same_as_eager(fn, torch.randn(2, 3))
    assert not any(target._schema.is_mutable for target in targets(gm))


def test_input_mutation_is_a_trailing_copy():
    def fn(x):
        x.mul_(2)
        return (x + 1,)

    gm = trace(fn, torch.ones(3))
    x = torch.ones(3)
    (out,) = gm(x)
    assert targets(gm)[-1] is aten.copy_.default
    assert x.tolist() == [2.0] * 3
    assert out.tolist() == [3.0] * 3


def test_decompositions_apply_recursively():
    def silu(x):
        return x * torch.sigmoid(x)

    def sigmoid(x):
        return 1 / (1 + torch.exp(-x))

    gm = trace(
        lambda x: (torch.nn.functional.silu(x),),
        torch.randn(3),
        decompositions={aten.silu.default: silu, aten.sigmoid.default: sigmoid},
    )
    assert aten.silu.default not in targets(gm)
    assert aten.exp.default in targets(gm)
    x = torch.randn(3)
    torch.testing.assert_close(gm(x)[0], torch.nn.functional.silu(x))


def test_a_decomposition_returns_no_argument_where_its_operator_makes_a_tensor():
    gm = trace(
        lambda x: (torch.channel_shuffle(x, 1),),
        torch.ones(1, 2, 3, 3),
        decompositions={aten.channel_shuffle.default: lambda x, groups: x.view(x.shape)},
    )
    assert targets(gm)[-1] is aten.clone.default


def test_decomposition_that_fills_a_fresh_tensor():
    def relu(x):
        out = torch.empty_like(x)
        out.zero_()
        out.add_(torch.clamp(x, min=0))
        return out

    gm = trace(lambda x: (torch.relu(x),), torch.randn(4), decompositions={aten.relu.default: relu})
    assert not any(target._schema.is_mutable for target in targets(gm))
    assert gm(torch.tensor([-1.0, 2.0]))[0].tolist() == [0.0, 2.0]


def test_batch_norm_updates_running_statistics():
    norm = torch.nn.functional.batch_norm
    args = [torch.randn(4, 3), torch.zeros(3), torch.ones(3)]
    gm = trace(lambda x, m, v: (norm(x, m, v, training=True),), *args)
    ours, eager = [a.clone() for a in args], [a.clone() for a in args]
    out = gm(*ours)[0]
    torch.testing.assert_close(out, norm(*eager, training=True))
    torch.testing.assert_close(ours, eager)


def test_constants_and_none():
    table = torch.arange(3.0)
    gm = trace(lambda x: (x + table, None, x + torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3))
    first, none, last = gm(torch.zeros(3))
    assert none is None
    assert first.tolist() == [0.0, 1.0, 2.0]
    assert last.tolist() == [1.0, 2.0, 3.0]


def test_backward_inside_the_trace_knows_its_forward_node():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    y.meta["stack_trace"] = "line of sin"
    z = graph.call_function(torch.exp, (y,))
    z.meta["stack_trace"] = "line of exp"
    graph.output((z,))

    mode = fake_mode()
    fake = to_fake(mode, torch.randn(3, requires_grad=True))
    tracer = AtenTracer(mode)
    with tracer.active():
        leaf = tracer.input(fake)
        (out,) = tracer.interpret(fx.GraphModule({}, graph), [leaf])
        (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        grad = tracer.value(grad)
    gm = tracer.finish([grad])
    by_target = {node.target: node for node in gm.graph.nodes}
    assert by_target[aten.cos.default].meta["stack_trace"] == "line of sin"
    assert by_target[aten.cos.default].meta["in_backward"]
    assert by_target[aten.exp.default].meta["stack_trace"] == "line of exp"
    value = torch.randn(3, requires_grad=True)
    (expected,) = torch.autograd.grad(value.sin().exp().sum(), value)
    torch.testing.assert_close(gm(value.detach())[0], expected)


def test_symbolic_sizes_become_nodes():
    mode = fake_mode(make_shape_env())
    x = to_fake(mode, torch.randn(6, 3), dynamic_dims=[0], source_name="x")
    gm = trace_aten(lambda x: (x.view(x.shape[0] * 3) + x.shape[0], x.shape[0] // 2 + 1), [x])
    gm.graph.lint()
    value = torch.randn(8, 3)
    out, number = gm(value)
    torch.testing.assert_close(out, value.view(24) + 8)
    assert number == 5


def test_symint_placeholders():
    mode = fake_mode(make_shape_env())
    x = to_fake(mode, torch.randn(6, 3), dynamic_dims=[0], source_name="x")
    gm = trace_aten(lambda n, x: (x.new_zeros(n * 2, 3),), [x.shape[0], x])
    assert gm(4, torch.randn(4, 3))[0].shape == (8, 3)
    assert aten.sym_size.int not in targets(gm)


def test_random_ops_survive_though_unused():
    def fn(x):
        torch.rand_like(x)
        return (torch.nn.functional.dropout(x, 0.5),)

    args = torch.ones(100)
    gm = trace(fn, args)
    torch.manual_seed(0)
    expected = fn(args)[0]
    torch.manual_seed(0)
    assert torch.equal(gm(args)[0], expected)


def test_grad_mode_is_restored_after_an_error():
    def fn(x):
        torch._C._set_grad_enabled(False)
        raise ValueError("user error")

    with pytest.raises(ValueError, match="user error"):
        trace(fn, torch.ones(1))
    assert torch.is_grad_enabled()
    assert not torch._is_functional_tensor(torch.ones(1))


def test_no_dynamo_import():
    program = """
        import sys
        import torch
        from weft_core.fake import fake_mode, to_fake
        from weft_core.tracing import trace_aten
        mode = fake_mode()
        x = to_fake(mode, torch.randn(4, 4))
        trace_aten(lambda x: (torch.softmax(x @ x, -1),), [x])
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@pytest.mark.parametrize(
    "arithmetic",
    [
        lambda n: n // 2 * 3,
        lambda n: (n * n + 5) % 7,
        lambda n: torch.sym_max(n - 7, 2) + torch.sym_min(n, 7),
        lambda n: n * 4 // (n + 1),
        lambda n: 2 * n * n - n,
        lambda n: -n,
    ],
)
def test_size_arithmetic(arithmetic):
    mode = fake_mode(make_shape_env())
    x = to_fake(mode, torch.randn(6, 3), dynamic_dims=[0], source_name="x")
    gm = trace_aten(lambda x: (arithmetic(x.shape[0]), x * 2), [x])
    for size in (6, 8, 11):
        assert gm(torch.randn(size, 3))[0] == arithmetic(size)


@pytest.mark.parametrize("kind", ["GRU", "RNN", "LSTM"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_dropout_between_the_layers_of_an_rnn(kind, dynamic):
    torch.manual_seed(0)
    rnn = getattr(torch.nn, kind)(3, 2, 3, dropout=0.5, bidirectional=True, batch_first=True)
    x, params = torch.randn(4, 5, 3), list(rnn.named_parameters())

    def run(x, *values):
        given = dict(zip([name for name, _ in params], values, strict=True))
        return torch.func.functional_call(rnn, given, (x,))

    mode = fake_mode(make_shape_env() if dynamic else None)
    fakes = [to_fake(mode, x, [0] if dynamic else None)]
    gm = trace_aten(run, fakes + [to_fake(mode, value.detach()) for _, value in params])
    drawn = ("bernoulli", "native_dropout")
    names = [str(target) for target in targets(gm)]
    assert len([name for name in names if any(op in name for op in drawn)]) == 2
    if not dynamic:
        torch.manual_seed(1)
        expected = rnn(x)
        torch.manual_seed(1)
        found = gm(x, *[value.detach() for _, value in params])
        torch.testing.assert_close(found[0], expected[0].detach())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_whose_decomposition_is_wrong_is_not_taken_apart(dynamic):
    mode = fake_mode(make_shape_env() if dynamic else None)
    args = torch.randn(4, 5), torch.full((4, 5), -1)
    fakes = [to_fake(mode, arg, [0] if dynamic else None) for arg in args]
    gm = trace_aten(torch.nn.functional.multilabel_margin_loss, fakes)
    assert aten.multilabel_margin_loss_forward.default in targets(gm)


@pytest.mark.parametrize("name", ["hardshrink", "softshrink"])
def test_gradients_of_shrinking_with_symbolic_sizes(name):
    """Torch's Python kernel multiplies infinite gradients by zero."""
    shrink = getattr(torch.nn.functional, name)

    def gradient(x):
        return torch.autograd.grad(shrink(x).log10().sum(), x)

    mode = fake_mode(make_shape_env())
    x = torch.tensor([0.1, 0.9, -0.7, 0.3])
    gm = trace_aten(gradient, [to_fake(mode, x.clone().requires_grad_(), [0], "x")])
    assert torch.equal(gm(x)[0], gradient(x.requires_grad_())[0])


@pytest.mark.parametrize("grad", [False, True])
def test_pooled_rows_have_the_layout_of_real_ones(grad):
    pool = torch.nn.functional.max_pool1d
    x = torch.rand(7, 9, 4).transpose(1, 2).requires_grad_(grad)
    gm = trace_aten(lambda x: (pool(x, 2),), [to_fake(fake_mode(), x)])
    assert gm(x)[0].stride() == pool(x, 2).stride() == ((16, 1, 4) if grad else (16, 4, 1))
