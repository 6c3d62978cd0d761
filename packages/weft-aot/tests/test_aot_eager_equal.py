"""Compiled programs give eager's results, gradients, aliasing and mutations."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from aot_helpers import Graphs, check, copy_inputs, function_graph, run
from torch import fx
from weft_aot import aot_compile, settings
from weft_core.fake import fake_mode, make_shape_env, to_fake

F = torch.nn.functional
aten = torch.ops.aten


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def inner(*shape):
    return torch.randn(*shape, requires_grad=True) * 1


class TestResults:
    def test_mlp(self):
        check(lambda x, w, b: (F.gelu(F.linear(x, w, b)).sum(-1),), leaf(3, 4), leaf(5, 4), leaf(5))

    def test_inference_needs_no_partition(self):
        graphs = check(lambda x: (x.sin() + 1,), torch.randn(3))
        assert len(graphs) == 1

    def test_integer_constant_and_none_results(self):
        check(lambda x: (x.argmax(), None, 3, x * 2, x.detach().sum()), leaf(5))

    def test_complex_numbers_of_the_program(self):
        check(lambda x: ((1j * x).real, (x * (2 + 1j)).imag, (3 - 1j) * x), leaf(3))

    def test_copy_of_an_input_that_is_written_to_before_the_backward(self):
        x, queue = leaf(3), torch.ones(3)
        graph = function_graph(lambda x, q: (x * q.clone(),), 2)
        (result,) = aot_compile(graph, [x, queue], fw_compiler=Graphs())(x, queue)
        queue.zero_()
        result.sum().backward()
        assert torch.equal(x.grad, torch.ones(3))

    def test_unused_and_unwanted_inputs(self):
        graphs = check(lambda a, b, c: (a * c,), leaf(3), leaf(3), torch.randn(3))
        backward = graphs[1].graph
        assert sum(a is not None for a in next(iter(reversed(backward.nodes))).args[0]) == 1

    def test_two_results_with_one_used(self):
        graphs = Graphs()

        def fn(x):
            return (x.sin(), x.cos())

        x, y = leaf(3), leaf(3)
        y.data.copy_(x.data)
        compiled = aot_compile(function_graph(fn, 1), [x], fw_compiler=graphs)
        compiled(x)[1].sum().backward()
        fn(y)[1].sum().backward()
        torch.testing.assert_close(x.grad, y.grad)

    def test_shared_parameter(self):
        w = leaf(4, 4)
        check(lambda x, a, b: ((x @ a) @ b,), torch.randn(2, 4), w, w)

    def test_noncontiguous_tangent(self):
        x, y = leaf(4, 3), leaf(4, 3)
        y.data.copy_(x.data)
        compiled = aot_compile(
            function_graph(lambda x: (x.exp(),), 1), [x], fw_compiler=lambda gm, ex: strict(gm, ex)
        )
        for value, fn in ((x, compiled), (y, lambda x: (x.exp(),))):
            fn(value)[0].t().contiguous().sum(0).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)

    def test_channels_last_value(self):
        x = torch.randn(2, 3, 4, 4, requires_grad=True)
        check(lambda x: (x.to(memory_format=torch.channels_last) * 2,), x)

    def test_equal_results_stay_two_tensors(self):
        check(lambda x: (x + 1, x + 1), torch.randn(3))
        check(lambda x: (x + 1, x + 1), leaf(3))

    def test_fresh_literal(self):
        x = torch.randn(2)
        compiled = aot_compile(
            function_graph(lambda x: (torch.tensor([1.0, 2.0]), x * 1.5), 1),
            [x],
            fw_compiler=Graphs(),
        )
        compiled(x)[0].add_(1)
        assert compiled(x)[0].tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("grad", [False, True])
    def test_views_of_a_literal_share_a_new_tensor_at_every_call(self, grad):
        def fn(x):
            b, lone = torch.tensor([1.0, 2.0]), torch.tensor(3.0)
            return b[1:], b, lone.expand(2), x * b

        x = torch.ones(2, requires_grad=grad)
        compiled = aot_compile(function_graph(fn, 1), [x], fw_compiler=Graphs())
        for _ in range(2):
            part, whole, lone, product = compiled(x)
            assert (part.tolist(), whole.tolist(), lone.tolist()) == ([2.0], [1.0, 2.0], [3.0] * 2)
            assert product.tolist() == [1.0, 2.0]
            whole.add_(1)
            lone[:1].add_(1)
            assert (part.tolist(), lone.tolist()) == ([3.0], [4.0] * 2)


def strict(gm, examples):
    """A compiler whose code insists on the strides it was promised."""
    strides = [e.stride() if isinstance(e, torch.Tensor) else None for e in examples]

    def call(*args):
        assert [a.stride() if isinstance(a, torch.Tensor) else None for a in args] == strides
        return gm(*args)

    return call


class TestMutation:
    def test_buffer(self):
        graphs = check(lambda x, n: (x * 2, n.add_(1))[:1], leaf(3), torch.zeros(()))
        last = [node for node in graphs[0].graph.nodes if node.op == "call_function"][-1]
        assert last.target is aten.copy_.default

    def test_batch_norm(self):
        args = (leaf(4, 3, 2), leaf(3), leaf(3), torch.zeros(3), torch.ones(3))
        check(lambda x, w, b, m, v: (F.batch_norm(x, m, v, w, b, True),), *args)
        check(lambda x, w, b, m, v: (F.batch_norm(x, m, v, w, b, False),), *args)

    def test_intermediate_input(self):
        check(lambda x, w: (x.mul_(w).sin(),), inner(3), leaf(3))
        check(lambda x, w: (x.mul_(w), x.view(3, 1)), inner(3), leaf(3))

    def test_input_that_starts_to_need_grad(self):
        check(lambda x, w: (x.mul_(w), w * 2), torch.randn(3), leaf(3))

    def test_leaf_raises_as_in_eager(self):
        x = leaf(3)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            aot_compile(function_graph(lambda x: (x.add_(1),), 1), [x], fw_compiler=Graphs())

    def test_leaf_under_no_grad(self):
        def fn(p, g):
            with torch.no_grad():
                p.sub_(0.1 * g)
            return (p * 2,)

        check(fn, leaf(3), torch.randn(3))

    def test_value_saved_before_the_write(self):
        # The copies in these programs are no-ops until somebody writes the input.
        check(lambda x, w: ((x.clone() * w).sum(), x.view(-1).mul_(3))[:1], torch.randn(3), leaf(3))
        check(
            lambda x, w: (torch.mv(x.clone().view(1, 3).expand(2, 3), w).sum(), x.mul_(3))[:1],
            torch.randn(3),
            leaf(3),
        )

    def test_backward_that_eager_refuses(self):
        def fn(x, w):
            return ((x * w).sum(), x.mul_(3))[:1]

        x, w = torch.randn(3), leaf(3)
        compiled = aot_compile(function_graph(fn, 2), [x, w], fw_compiler=Graphs())
        expected = (x * w).sum()
        (result,) = compiled(x, w)
        torch.testing.assert_close(result, expected)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()

    def test_version_counter_moves(self):
        x = torch.randn(3)
        compiled = aot_compile(
            function_graph(lambda x: (x.add_(1) * 2,), 1), [x], fw_compiler=Graphs()
        )
        before = x._version
        compiled(x)
        assert x._version > before

    def test_same_tensor_twice(self):
        x = torch.randn(3)
        check(lambda a, b: (a.add_(1) + b,), x, x)

    def test_overlapping_inputs_run_eagerly(self):
        base = torch.zeros(4)

        def fn(a, b):
            return (a.add_(1) + b,)

        compiled = aot_compile(function_graph(fn, 2), [base[:3], base[1:]], fw_compiler=Graphs())
        assert compiled(base[:3], base[1:])[0].tolist() == [2.0, 2.0, 1.0]

    def test_others_may_overlap_where_one_input_is_written(self):
        compiled = aot_compile(
            function_graph(lambda a, b, c: (a.add_(b) * c, b), 3),
            [torch.zeros(3), *torch.arange(6.0).view(3, 2).unbind(1)],
            fw_compiler=Graphs(),
        )
        assert not isinstance(compiled, torch.fx.GraphModule)  # not the program as it is
        base, x = torch.arange(6.0).view(3, 2) + 1, torch.ones(3)
        assert compiled(x, *base.unbind(1))[0].tolist() == [4.0, 16.0, 36.0]
        assert x.tolist() == [2.0, 4.0, 6.0]

    def test_data_dependent_shape_runs_eagerly(self):
        x = torch.tensor([1.0, 0.0, 2.0])

        def fn(x):
            return (x.nonzero(),)

        compiled = aot_compile(function_graph(fn, 1), [x], fw_compiler=Graphs())
        assert compiled(x)[0].tolist() == [[0], [2]]

    def test_renormalised_embedding(self):
        index = torch.tensor([0, 1])
        check(lambda i, w: (F.embedding(i, w, max_norm=1.0),), index, leaf(3, 4))

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x, y: (setattr(x, "data", y), x * 2)[1:],
            lambda x, y: (x.requires_grad_(), x * y)[1:],
        ],
    )
    def test_rebinding_an_input_runs_eagerly(self, fn):
        x, y = torch.randn(3), torch.randn(3)
        compiled = aot_compile(function_graph(fn, 2), [x, y], fw_compiler=Graphs())
        given = x.clone()
        (ours,), (eager,) = compiled(given, y), fn(x, y)
        assert (given.data_ptr() == y.data_ptr()) == (x.data_ptr() == y.data_ptr())
        torch.testing.assert_close(ours, eager)
        assert ours.requires_grad == eager.requires_grad

    def test_mutating_custom_op_runs_eagerly(self):
        @torch.library.custom_op("weft_aot_test::increment", mutates_args={"x"})
        def increment(x: torch.Tensor) -> None:
            x.add_(1)

        x = torch.zeros(3)

        def fn(x):
            increment(x)
            return (x * 2,)

        compiled = aot_compile(function_graph(fn, 1), [x], fw_compiler=Graphs())
        assert compiled(x)[0].tolist() == [2.0] * 3

    @pytest.mark.parametrize(
        ("size", "step", "graphs"), [(2, 2, 2), (2, 3, 2), (3, 3, 2), (2, 5, 0), (3, 2, 0)]
    )
    def test_writes_through_windows(self, size, step, graphs):
        def fn(x):
            y = x * 1
            windows = y.unfold(0, size, step)
            windows[0].mul_(2)
            windows[1:].fill_(5)
            return y, windows

        assert len(check(fn, leaf(7))) == graphs

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.expand(1, 4),
            lambda x: x.expand(-1),
            lambda x: x.expand_as(torch.ones(1, 1, 4)),
            lambda x: torch.broadcast_to(x, (1, 4)),
            lambda x: torch.broadcast_tensors(x, torch.ones(1, 1))[0],
        ],
    )
    def test_writes_through_what_expands_nothing(self, view):
        """They are exact, whatever was there before, and keep the dtype."""

        def fn(x):
            whole = x.to(torch.int8)
            y, ints = x * 1, view(whole)[..., ::2]
            view(y).fill_(1e-3)
            ints.copy_(ints.flip(0))
            return y, view(y), whole, ints

        assert len(check(fn, torch.tensor([1e9, 3.0, -1e9, torch.inf]))) == 1

    @pytest.mark.parametrize(
        "write", [lambda v: v.mul_(2), lambda v: v.fill_(0.1), lambda v: v[1].fill_(0.1)]
    )
    @pytest.mark.parametrize("view", [lambda x: x[:1].expand(4), lambda x: x.unfold(0, 3, 1)])
    def test_writes_to_elements_in_one_place(self, view, write):
        def outcome(run):
            x = torch.full((7,), 1e9)
            try:
                return [t.tolist() for t in (*run(x), x)]
            except RuntimeError as error:
                return str(error)

        def fn(x):
            write(view(x))
            return (x + 1,)

        compiled = aot_compile(function_graph(fn, 1), [torch.ones(7)], fw_compiler=Graphs())
        assert outcome(compiled) == outcome(fn)

    @pytest.mark.parametrize("count", [2, 3, 8, 40])
    def test_order_of_hooks_on_leaves(self, count):
        def fn(x, *rest):
            for k, one in enumerate(rest):
                x = x * one if k % 3 else one + x
            return (x, rest[0] * 2)

        def order(make):
            met, leaves = [], [leaf(2) for _ in range(count)]
            run = make([inner(2), *leaves])
            run(inner(2), *leaves)
            for k, one in enumerate(leaves):
                one.register_hook(lambda _, k=k: met.append([k, *(t.grad is None for t in leaves)]))
                one.register_post_accumulate_grad_hook(lambda _, k=k: met.append(k))
            results = run(inner(2), *leaves)
            (results[0].sum() + (results[1] * leaves[1]).sum()).backward()
            return met

        graph = function_graph(fn, count + 1)
        compiled = order(lambda args: aot_compile(graph, args, fw_compiler=Graphs()))
        assert compiled == order(lambda _: fn)

    def test_metadata_mutation_runs_eagerly(self):
        x = torch.randn(2, 3)
        compiled = aot_compile(
            function_graph(lambda x: (x.t_() * 2,), 1), [x], fw_compiler=Graphs()
        )
        assert compiled(x)[0].shape == (3, 2)
        assert x.shape == (3, 2)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


def test_a_lone_view_that_an_autograd_function_gives_is_compiled():
    def program(x):
        return (Reversed.apply(x.exp())[1:],)

    assert len(check(program, leaf(3, 2))) == 2
    x = leaf(3, 2)
    (result,) = aot_compile(function_graph(program, 1), [x], fw_compiler=Graphs())(x)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        result.mul_(2)


class TestAliasing:
    @pytest.mark.parametrize("make", [leaf, torch.randn, inner])
    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: (x,),
            lambda x: (x, x, x * 2),
            lambda x: (x.view(6), x * 2),
            lambda x: (x.t()[1:], x.detach(), x.sum()),
            lambda x: ((x * 2).view(6),),
            lambda x: (lambda y: (y, y.t()))(x * 2),
            lambda x: (lambda y: (y.view(6), y.t()))(x * 2),
            lambda x: (lambda y: (y.detach(), y))(x * 2),
            lambda x: (lambda y: (y, y.detach()))(x * 2),
            lambda x: (x * 2).split(1),
            lambda x: x.unbind(0),
            lambda x: (x.expand(4, 2, 3), x[0].unsqueeze(0)),
            lambda x: (x.clone(), x.contiguous()),
            lambda x: (x.detach().view(6), x.sin()),
            lambda x: (lambda y: (y, y))(x * 2),
            lambda x: (Reversed.apply(x), Reversed.apply(x * 2), Reversed.apply(x * 2)[0] * 3),
            lambda x: (lambda y: (Reversed.apply(y), y))(x * 2),
        ],
    )
    def test_views(self, fn, make):
        check(fn, make(2, 3))

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: ((x * 2)[0],),
            lambda x: (lambda y: (y.t(), y * y))(x @ x),
            lambda x: (lambda y: (y.detach()[0], y * y))(x @ x),
            lambda x: ((x * 2).unbind(0)[0],),
            lambda x: (x.data, x * x),
            lambda x: (lambda y: (y.data, y, y * y))(x @ x),
            lambda x: (lambda y: (y, y.t()))(x * 2),
        ],
    )
    def test_writing_to_a_result_before_the_backward(self, fn):
        def outcome(run):
            x = torch.ones(3, 3, requires_grad=True).clone()
            results = run(x)
            told = [(t._is_view(), t._version) for t in results]
            try:
                results[0].mul_(2)
                results[-1].sum().backward()
            except RuntimeError as error:
                told.append(str(error)[:40])
            return told, [t.tolist() for t in results], x._version

        compiled = aot_compile(function_graph(fn, 1), [inner(3, 3)], fw_compiler=Graphs())
        assert outcome(compiled) == outcome(fn)


class TestModes:
    def test_no_grad_region(self):
        def fn(x):
            torch._C._set_grad_enabled(False)
            y = x * 2
            torch._C._set_grad_enabled(True)
            return (x * y,)

        check(fn, leaf(3))

    def test_ambient_no_grad(self):
        with torch.no_grad():
            graphs = check(lambda x: (x.view(-1), x * 2), leaf(2, 3))
            check(torch.enable_grad()(lambda x: (x.view(-1),)), leaf(2, 3))
            assert not check(lambda x: (x.reshape(6).view(2, 3), x.t().mul_(2))[:1], leaf(2, 3))
        assert len(graphs) == 1

    def test_autocast_region(self):
        def fn(x, w):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = x @ w
            return (y.float() + x.sum(),)

        check(fn, leaf(4, 4), leaf(4, 4))

    def test_ambient_autocast(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            check(lambda x, w: (F.layer_norm(x @ w, (4,)),), leaf(4, 4), leaf(4, 4))

    def test_dropout_draws_the_same_numbers(self):
        graphs = check(lambda x: (F.dropout(x.sin(), 0.5).cos(),), leaf(50))
        calls = [node.target for node in graphs[1].graph.nodes if node.op == "call_function"]
        assert aten.bernoulli.p not in calls


class TestDynamicShapes:
    def compile(self, fn, size, *others):
        mode = fake_mode(make_shape_env())
        graph = fx.Graph()
        rows, x = graph.placeholder("s0"), graph.placeholder("x")
        rest = [graph.placeholder(f"w{i}") for i in range(len(others))]
        graph.output(graph.call_function(fn, (rows, x, *rest)))
        fake = to_fake(mode, torch.randn(size, 3, requires_grad=True), [0], "x")
        x.meta["example_value"], rows.meta["example_value"] = fake, fake.shape[0]
        for node, other in zip(rest, others):
            node.meta["example_value"] = to_fake(mode, other, source_name=node.name)
        inputs = [size, torch.randn(size, 3, requires_grad=True), *others]
        return aot_compile(fx.GraphModule({}, graph), inputs, fw_compiler=Graphs())

    def test_an_unused_result_whose_gradient_is_infinite(self):
        def fn(n, x, w):
            h = x.relu() * w
            return h.log(), torch.stack([h.sqrt()[1:], h[1:] * n], 1).sin()

        compiled = self.compile(fn, 6, leaf(3))
        for size in (6, 9):
            args = leaf(size, 3), leaf(3)
            pair = [
                torch.autograd.grad(function(size, *args)[1][:, 1].sum(), args)
                for function in (fn, compiled)
            ]
            torch.testing.assert_close(*pair, equal_nan=True)
            pair = [
                torch.autograd.grad(function(size, *args)[0].sum(), args)
                for function in (fn, compiled)
            ]
            torch.testing.assert_close(*pair, equal_nan=True)

    @pytest.mark.parametrize(
        "fn",
        [
            lambda n, x, w: ((x @ w).view(n * 3).sin().sum() * n,),
            lambda n, x, w: (x.view(n * 3), n + 1, F.softmax(x @ w, 0)),
            lambda n, x, w: (lambda y: (y.view(n * 3), y.t()))(x @ w),
            lambda n, x, w: (x[(x[:, 0] > 0).nonzero()[:, 0]] @ w,),
            lambda n, x, w: (x.new_zeros(n, 2).sum() + x.sum(0).mean() / x.shape[0],),
        ],
    )
    def test_other_sizes(self, fn):
        w = leaf(3, 3)
        compiled = self.compile(fn, 6, w)
        for size in (6, 9):
            args = (size, leaf(size, 3), w)
            for mine, theirs in zip(run(compiled, args)[:3], run(fn, args)[:3]):
                torch.testing.assert_close(mine, theirs)

    def test_a_result_that_only_the_graph_makes_a_view_of_is_written(self):
        def fn(n, x):
            return (x.unsqueeze(1).matmul(x.unsqueeze(2)).clamp_min_(0),)

        compiled, x = self.compile(fn, 6), leaf(6, 3)
        gradients = []
        for program in (compiled, fn):
            (result,) = program(6, x)
            result.mul_(2).sum().backward()
            gradients.append(x.grad)
            x.grad = None
        torch.testing.assert_close(*gradients)


def test_no_dynamo_import():
    program = """
        import sys
        import torch
        from torch import fx
        from weft_aot import aot_compile
        gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()))
        gm = fx.symbolic_trace(lambda x, w: (torch.softmax(x @ w, -1).sum(),))
        args = [torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)]
        compiled = aot_compile(gm, args, fw_compiler=lambda gm, examples: gm.forward)
        compiled(*args)[0].backward()
        assert args[1].grad is not None
        assert "torch._dynamo" not in sys.modules
        assert not any(name.startswith("torch._inductor") for name in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_copy_inputs_keeps_layout():
    _, (copy,) = copy_inputs([torch.randn(3, 4).t()])
    assert copy.stride() == (1, 4)


def test_lazy_backward():
    graphs = Graphs()
    x = leaf(3)
    with settings.patch(lazy_backward=True):
        compiled = aot_compile(function_graph(lambda x: (x.sin(),), 1), [x], fw_compiler=graphs)
    (result,) = compiled(x)
    assert len(graphs.modules) == 1
    result.sum().backward()
    assert len(graphs.modules) == 2
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_lazy_backward_gives_its_arguments_away():
    given = []

    def compiler(gm, inputs):
        def run(*args):
            return gm(*args)

        def call_owning(args):
            given.append(len(args))
            outputs = gm(*args)
            args.clear()
            return outputs

        run.call_owning = call_owning
        return run

    x = leaf(3)
    with settings.patch(lazy_backward=True):
        compiled = aot_compile(function_graph(lambda x: (x.sin(),), 1), [x], fw_compiler=compiler)
    compiled(x)[0].sum().backward()
    assert given == [2]
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_parameter_that_is_no_input_runs_eagerly():
    linear = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    compiled = aot_compile(fx.symbolic_trace(linear), [x], fw_compiler=Graphs())
    compiled(x).sum().backward()
    assert linear.weight.grad is not None


def test_inner_gradients_and_hooks_are_part_of_the_trace():
    def inner(x, w):
        loss = (torch.tanh(x @ w) ** 2).sum()
        grads = torch.autograd.grad(loss, [x, w], create_graph=True)
        return [(x - grads[0]).sum() * loss, grads[1].detach()]

    def hooked(x):
        y = x * 2
        y.register_hook(lambda grad: grad.clamp(-1, 1) * 3)
        return [(y * y).sum()]

    check(inner, leaf(3, 4), leaf(4, 2))
    check(hooked, leaf(3))


def test_a_result_without_history_has_none():
    check(lambda x: [x.detach() * 2], leaf(3))


@pytest.mark.parametrize("values", [[0, 2.0, 0, 3], [0, 2, 4], [1, 2, 4], [0, 0], [0], []])
def test_a_product_with_several_zeros_has_a_gradient_of_zeros(values):
    """Even where the next gradient is NaN, as that of digamma at 0."""
    x = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    for program in (
        lambda x: (x.prod().digamma(),),
        lambda x: (torch.prod(x, dtype=torch.float64),),
    ):
        compiled = aot_compile(function_graph(program, 1), [x], fw_compiler=Graphs())
        grads = [torch.autograd.grad(f(x)[0] * torch.inf, x)[0] for f in (compiled, program)]
        torch.testing.assert_close(*grads, equal_nan=True)


def test_gradients_in_a_block_under_no_grad():
    def program(x, w):
        outside = x * w
        with torch.enable_grad():
            inside = (x * w).sin()
            view = inside[0]
        return outside, inside, view, inside * 2

    gm = torch.fx.Graph()
    x, w = (gm.placeholder(name) for name in ("x", "w"))
    outside = gm.call_function(torch.mul, (x, w))
    gm.call_function(torch._C._set_grad_enabled, (True,))
    inside = gm.call_function(torch.sin, (gm.call_function(torch.mul, (x, w)),))
    view = gm.call_function(torch.select, (inside, 0, 0))
    gm.call_function(torch._C._set_grad_enabled, (False,))
    gm.output((outside, inside, view, gm.call_function(torch.mul, (inside, 2))))
    module = torch.fx.GraphModule(torch.nn.Module(), gm)
    args = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    with torch.no_grad():
        want = program(*args)
        got = aot_compile(module, list(args), fw_compiler=lambda graph, inputs: graph)(*args)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in want]
    for index in (1, 2):
        torch.testing.assert_close(
            torch.autograd.grad(got[index].sum(), args[0], retain_graph=True),
            torch.autograd.grad(want[index].sum(), args[0], retain_graph=True),
        )


def test_writes_to_buffers_beside_gradients_in_a_block_under_no_grad():
    def program(x, buffer):
        buffer.mul_(0.5).add_(x.sum(0))
        with torch.enable_grad():
            inside = (x * buffer.clone()).sin() + x
        buffer[1:].neg_()
        return inside, buffer[1:]

    x = torch.randn(4, 3, requires_grad=True)
    with torch.no_grad():
        graph = function_graph(program, 2)
        compiled = aot_compile(graph, [x, torch.ones(3)], fw_compiler=lambda gm, _: gm)
    results = []
    for function in (program, compiled):
        buffer = torch.ones(3)
        with torch.no_grad():
            inside, view = function(x, buffer)
        assert (inside.requires_grad, view.requires_grad) == (True, False)
        assert view._base is buffer
        (gradient,) = torch.autograd.grad(inside.sum(), x)
        results.append((inside.detach(), view, buffer, gradient))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
