"""Derivatives of compiled gradients: eager's, or an error that says why not."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from aot_helpers import Graphs, function_graph
from torch import nn
from weft_aot import aot_compile


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def compiled(fn, args):
    return aot_compile(function_graph(fn, len(args)), args, fw_compiler=Graphs())


def penalty(fn, args):
    """A loss on gradients of `fn`, and its gradients in turn, up to the third order."""
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    out = [r for r in fn(*args) if r.requires_grad]
    total = sum((r * torch.arange(1.0, r.numel() + 1).view(r.shape)).sum() for r in out)
    orders = []
    for _ in range(3):
        grads = torch.autograd.grad(
            total, wanted, create_graph=True, allow_unused=True, materialize_grads=True
        )
        orders.append(grads)
        total = sum(g.square().sum() for g in grads)
    return orders


def check(fn, *args):
    torch.manual_seed(0)
    want = penalty(fn, args)
    got = penalty(compiled(fn, args), args)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


CASES = {
    "saved input": (lambda x, w: (x.sin() @ w,), (4, 4), (4, 4)),
    "saved result": (lambda x: (torch.tanh(x * x).exp(),), (5,)),
    "unsaved bias": (lambda x, w, b: (F.gelu(F.linear(x, w, b)),), (3, 4), (2, 4), (2,)),
    "norms": (lambda x, w, b: (F.layer_norm(x, (6,), w, b).softmax(-1),), (3, 6), (6,), (6,)),
    "same input twice": (lambda x, y: (x * y.sin() + y, x.cos()), (3,), (3,)),
    "views of a hidden base": (lambda x: (lambda y: (y[0], y[1:]))(x.sin() * x), (4, 3)),
    "view of an input": (lambda x: (x.view(12), x.sin()), (4, 3)),
    "detached": (lambda x: (x.pow(4) * x.detach().sin(), x.detach()), (4,)),
    "reshaped in place": (lambda x: (x.sin().transpose_(0, 2), x.sin()[0].t_()), (3, 4, 1)),
    "squeezed after a view": (lambda x: (lambda y: (y[0], y.squeeze_(), y))(x.sin()), (2, 1, 3)),
    "a result unused": (lambda x, w: (x.exp() * w, w.sin()), (4,), (4,)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_three_orders(case):
    fn, *shapes = case
    check(fn, *(leaf(*shape) for shape in shapes))


def test_the_same_object_twice():
    x = leaf(4)
    check(lambda a, b: (a.sin() * b,), x, x)


def test_no_grad_and_functions_mean_what_they_say():
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, g):
            return g

    def fn(x):
        with torch.no_grad():
            scale = x.abs().max()
        return (Straight.apply(x.sin() * 3) * scale,)

    check(fn, leaf(5))


def test_batch_norm_in_training_leaves_its_statistics_alone():
    model = nn.BatchNorm1d(3).double()
    mean, var = model.running_mean, model.running_var
    x = leaf(5, 3)

    def fn(x, w, b, mean, var):
        return (F.batch_norm(x, mean, var, w, b, training=True).sin(),)

    function = compiled(fn, (x, model.weight, model.bias, mean, var))
    (y,) = function(x, model.weight, model.bias, mean, var)
    after = mean.clone()
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x)
    assert torch.equal(mean, after)
    (y,) = fn(x, model.weight, model.bias, mean.clone(), var.clone())
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(h, torch.autograd.grad(g.square().sum(), x)[0])


def test_under_ambient_autocast():
    x = torch.randn(4, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)

    def second(fn):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (y,) = fn(x, w)
        (g,) = torch.autograd.grad(y.float().sin().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), w)[0]

    fn = lambda x, w: ((x @ w).sin(),)  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        function = compiled(fn, (x, w))
    torch.testing.assert_close(second(function), second(fn), rtol=0.02, atol=0.02)  # bfloat16


def test_an_intermediate_input_is_not_kept_alive():
    x = leaf(6)
    function = compiled(lambda y, z: (y + 1 + z.sin(),), (leaf(6) * 1, leaf(6)))
    y = x * 2
    watched = weakref.ref(y)
    (out,) = function(y, x)
    del y
    gc.collect()
    assert watched() is None
    # No gradient depends on what it was, so the second derivative is still right.
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], -x.detach().sin())


def test_an_intermediate_that_is_gone_is_computed_again():
    """By the compiled program that it came from, and that one's input by another."""
    x, w = leaf(6), leaf(6)
    programs = [
        lambda x, w: ((x + w).sin(),),
        lambda y: ((y * 2).sigmoid(),),
        lambda z: ((z.exp() * 2).softmax(-1).pow(2).sum(),),
    ]

    def second(first, middle, last):
        (y,) = first(x, w)
        (z,) = middle(y)
        del y
        (out,) = last(z)
        del z
        gradients = torch.autograd.grad(out, (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.pow(3).sum() for g in gradients), (x, w))

    ours = [compiled(fn, given) for fn, given in zip(programs, [(x, w), (x * 1,), (x * 1,)])]
    torch.testing.assert_close(second(*ours), second(*programs))


def _decayed(x, w):
    result = x.exp() * w.exp()
    with torch.no_grad():
        w.mul_(0.5)
    return result.sin(), x.mul_(w)


def test_an_input_of_another_part_may_be_gone():
    """Only what a part saves has to be there again."""

    def second(fn):
        torch.manual_seed(0)
        x, w = leaf(4), leaf(4)
        first, _ = fn(x * 1, w)
        gradient = torch.autograd.grad(first.sum(), w, create_graph=True)[0]
        return torch.autograd.grad(gradient.sum(), w)[0]

    fn = lambda x, w: (w.exp(), x.exp())  # noqa: E731
    torch.testing.assert_close(second(compiled(fn, (leaf(4) * 1, leaf(4)))), second(fn))


def test_an_input_that_is_gone_may_have_been_a_divisor():
    x = leaf(4)
    count = torch.tensor(3)
    (result,) = compiled(lambda x, n: (x.sin() + (7 // n),), (x, count))(x, count)
    del count
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, -x.sin())


def test_what_no_program_can_compute_again_is_kept():
    """The gradient of the first program needs no input; the input of the second one does."""

    def second(first, last):
        torch.manual_seed(0)
        x = leaf(4)
        (result,) = last(*first(x * 1))
        (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.sum(), x)[0]

    programs = lambda x: (x * 2,), lambda y: (y.exp(),)  # noqa: E731
    ours = [compiled(fn, (leaf(4) * 1,)) for fn in programs]
    torch.testing.assert_close(second(*ours), second(*programs))


def _scaled(x, y, data):
    return (x + y).tanh() * data.abs().sum(), x * 3


def test_inputs_of_eager_that_are_gone():
    """What eager made is kept until the backward, with its history and without."""

    def second(fn):
        torch.manual_seed(0)
        x = leaf(4)
        first, other = fn(x.sin(), x * 2, x.detach() * 3)
        gradient = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
        return torch.autograd.grad(gradient.sum() + other.sum(), x)[0]

    args = leaf(4) * 1, leaf(4) * 1, torch.randn(4, dtype=torch.float64)
    torch.testing.assert_close(second(compiled(_scaled, args)), second(_scaled))


def test_an_input_that_is_kept_may_be_written_and_die():
    function = compiled(lambda y: (y.exp(),), (leaf(4) * 1,))
    x = leaf(4)
    y = x * 2
    (result,) = function(y)
    watched = weakref.ref(y)
    y.mul_(2)
    y.add_(result)  # leads to the program that keeps it
    del y
    gc.collect()
    assert watched() is None
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, 2 * result)
    with pytest.raises(RuntimeError, match="its input 0 was written since"):
        gradient.sum().backward()


WRITTEN = {
    "what is made first": lambda x, w: (lambda y: (x.mul_(2), y)[1:])(x.clone().sin()),
    "by steps": lambda x, w: (x.cumsum_(0).tanh_(),),
    "without a record": _decayed,
    "in two parts": lambda x, w: (w.sin(), x.sigmoid_(), (x * 2)[0]),
    "through data": lambda x, w: (x.data.mul_(3), x.exp().mul(w).cos())[1:],
    "another layout": lambda x, w: (x.transpose_(0, 1).tanh_() @ w.sin(),),
    "another layout alone": lambda x, w: (x.t_() + w.sin().t(),),
}


@pytest.mark.parametrize("case", WRITTEN.values(), ids=WRITTEN.keys())
@pytest.mark.parametrize(
    "layout", [lambda x: x * 1, lambda x: (x.t() * 1).t(), lambda x: (x * 1)[::2]]
)
def test_second_derivatives_of_a_program_that_writes_its_input(case, layout):
    def second(fn):
        torch.manual_seed(0)
        x, w = leaf(4, 3), leaf(4, 3)
        results = fn(layout(x), layout(w.detach().clone()))
        total = sum((r * r).sum() for r in results if r.requires_grad)
        first = torch.autograd.grad(total, x, create_graph=True)[0]
        grads = torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]
        return [first, grads, torch.autograd.grad(grads.sum(), x)[0]]

    x = layout(leaf(4, 3))
    torch.testing.assert_close(second(compiled(case, (x, x.detach()))), second(case))


def _drawing(x, w):
    y = F.dropout(x.sin() * w, 0.5)
    return F.dropout(y * y, 0.3) + torch.rand_like(x) * x.exp(), torch.randn(3).double() * w.cos()


def test_random_numbers_are_drawn_again():
    def second(fn):
        torch.manual_seed(0)
        x, w = leaf(3), leaf(3)
        total = sum((r * r).sum() for r in fn(x * 1, w))
        torch.rand(5)
        gradient = torch.autograd.grad(total, (x, w), create_graph=True)
        more = torch.rand(5, dtype=torch.float64)
        total = sum((g * more[:3]).sum() for g in gradient)
        return *gradient, *torch.autograd.grad(total, (x, w)), more, torch.rand(2)

    torch.testing.assert_close(second(compiled(_drawing, (leaf(3) * 1, leaf(3)))), second(_drawing))


def _differently(gm, examples):
    """A compiler whose programs draw otherwise than eager."""

    def run(*args):
        torch.rand(1)
        return gm(*args)

    return run


def test_what_cannot_run_again_is_an_error_when_it_matters():
    x = leaf(6)
    graph = function_graph(lambda x: (F.dropout(x.sin(), 0.5),), 1)
    function = aot_compile(graph, (x * 1,), fw_compiler=_differently)
    (grad,) = torch.autograd.grad(function(x * 1)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="only once here: .*random numbers"):
        grad.sum().backward()


def test_a_parameter_written_between_forward_and_backward():
    x, w = leaf(4), leaf(4)
    function = compiled(lambda x, w: ((x + w).tanh(),), (x, w))
    (out,) = function(x, w)
    with torch.no_grad():
        w.mul_(-3)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="its input 1 was written since"):
        grad.sum().backward()


def _columns(y, inputs, create_graph):
    rows = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
    return torch.autograd.grad(
        y, inputs, rows, is_grads_batched=True, create_graph=create_graph, allow_unused=True
    )


@pytest.mark.parametrize("name", ["saved input", "saved result", "unsaved bias", "norms"])
def test_batched_gradients(name):
    """`is_grads_batched`: a Jacobian, its derivative, and a batched Hessian of that."""
    fn, *shapes = CASES[name]
    torch.manual_seed(0)
    args = [leaf(*shape) for shape in shapes]
    found = []
    for one in (fn, compiled(fn, args)):
        plain = _columns(one(*args)[0], args, False)
        jacobian = _columns(one(*args)[0], args, True)
        total = sum(part.square().sum() for part in jacobian)
        slopes = torch.autograd.grad(total, args, create_graph=True)
        flat = torch.cat([slope.flatten() for slope in slopes])
        found.append([*plain, *jacobian, *slopes, *_columns(flat, args, False)])
    torch.testing.assert_close(found[1], found[0])


def test_batched_gradients_that_cannot_be_differentiated_again():
    x = leaf(4)
    graph = function_graph(lambda x: (F.dropout(x, 0.5) * x,), 1)
    fn = aot_compile(graph, [x], fw_compiler=_differently)
    (jacobian,) = _columns(fn(x)[0], [x], True)
    assert jacobian.shape == (4, 4)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        jacobian.sum().backward()


def test_gradients_without_memory():
    """The backward of a real `sgn` gives a tensor that only stands for zeros."""
    x = leaf(3)
    (grad,) = torch.autograd.grad(compiled(lambda x: (torch.sgn(x),), [x])(x)[0].sum(), x)
    assert torch.equal(grad, torch.zeros(3, dtype=x.dtype))


def test_batched_gradients_inside_a_program_read_no_memory_that_is_not_written():
    torch.manual_seed(0)
    graphs = Graphs()

    def program(x, w):
        y = F.conv1d(x.unsqueeze(1), w[:1, None, :3], padding=1).squeeze(1) @ w
        (first,) = _columns(y[:2], [w], True)
        return _columns(first[:2], [w], True)

    args = [leaf(4, 4), leaf(4, 4)]
    want = program(*args)
    fn = aot_compile(function_graph(program, 2), args, fw_compiler=graphs)
    torch.testing.assert_close(tuple(fn(*args)), tuple(want))
    nodes = [node for module in graphs.modules for node in module.graph.nodes]
    readers = {str(user.target) for n in nodes if "empty" in str(n.target) for user in n.users}
    assert readers <= {
        f"aten.{op}" for op in ("select_scatter.default", "select.int", "copy.default")
    }
