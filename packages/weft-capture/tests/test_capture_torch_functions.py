"""autograd.Function and torch.func: captured whole, results and gradients as in eager."""

import pytest
import torch
import weft_capture
from capture_check import eager_backend, same
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from weft_core.errors import Unsupported

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)
W = torch.linspace(1, 3, 9, dtype=torch.float64).reshape(3, 3)


class Scaled(torch.autograd.Function):
    """A gradient ten times too large, to see that it is the one used."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 20 * x * ctx.factor, None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        larger = x > y
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(larger)
        ctx.set_materialize_grads(False)
        return x * y, x + y, larger

    @staticmethod
    def backward(ctx, product, total, _):
        x, y = ctx.saved_tensors
        left = torch.zeros_like(x) if product is None else product * y
        right = product * x if ctx.needs_input_grad[1] and product is not None else None
        return (left if total is None else left + 7 * total), right


class Counted(torch.autograd.Function):
    calls = []

    @staticmethod
    def forward(ctx, x):
        Counted.calls.append(len(Counted.calls))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class UsesOther(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * W[0]

    @staticmethod
    def backward(ctx, grad):
        return grad


def scaled(x):
    return Scaled.apply(x.sin(), 3).cos() + StraightThrough.apply(x)


def several(x):
    product, total, larger = Several.apply(x * 2, x.cos())
    return product.sin() + total * larger


def unused_output(x):
    return Several.apply(x * 2, x.detach())[1]


def with_effect(x):
    return Counted.apply(x) + 1


def with_foreign_tensor(x):
    return UsesOther.apply(x) + 1


def gradients(function, x, backend=None, fullgraph=True):
    x = x.clone().requires_grad_()
    if backend is not None:
        function = weft_capture.capture(function, backend, fullgraph=fullgraph)
    for _ in range(2):
        y = function(x)
        y.sum().backward()
    return y.detach(), x.grad


class CallsModule(torch.autograd.Function):
    """Gets a module and calls it, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx, net, x, *parameters):
        ctx.net = net
        with torch.no_grad():
            result = net(x).tanh()
        ctx.save_for_backward(x, result, *parameters)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, result, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grads = torch.autograd.grad(ctx.net(x).tanh(), [x, *parameters], grad)
        return (None, *grads)


def with_module(x):
    return CallsModule.apply(NET, x.double(), *NET.parameters()) * 2


def with_closure(x):
    factor = x.detach().cos()

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * factor, y + 1

        @staticmethod
        def backward(ctx, grad, other):
            return grad * factor + other

    first, second = Scale.apply(x * 2)
    return first * second


NET = torch.nn.Linear(3, 3).double()


def test_custom_function_of_a_module_gives_its_parameters_gradients():
    found = []
    for function in (with_module, weft_capture.capture(with_module, eager_backend, fullgraph=True)):
        NET.zero_grad()
        gradients(function, X)
        found.append([p.grad.clone() for p in NET.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "function", [scaled, several, unused_output, with_foreign_tensor, with_module, with_closure]
)
def test_custom_function_in_one_graph(function):
    expected = gradients(function, X)
    torch.testing.assert_close(expected, gradients(function, X, eager_backend))
    with torch.no_grad():
        whole = weft_capture.capture(function, eager_backend, fullgraph=True)
        torch.testing.assert_close(function(X), whole(X))


@pytest.mark.parametrize("function", [with_effect])
def test_custom_function_that_does_more_breaks(function):
    with pytest.raises(Unsupported, match="effects"):
        gradients(function, X, eager_backend)
    Counted.calls.clear()
    expected = gradients(function, X)
    calls = len(Counted.calls)
    torch.testing.assert_close(expected, gradients(function, X, eager_backend, fullgraph=False))
    assert len(Counted.calls) == 2 * calls


def test_custom_function_is_guarded():
    factor = {"value": 2.0}

    class Configured(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor["value"]

        @staticmethod
        def backward(ctx, grad):
            return grad * factor["value"]

    optimised = weft_capture.capture(lambda x: Configured.apply(x), eager_backend, fullgraph=True)
    assert torch.equal(optimised(X), X * 2)
    factor["value"] = 5.0
    assert torch.equal(optimised(X), X * 5)


def per_sample(x):
    module = nn.Linear(3, 2).double()
    parameters = {"weight": W[:2], "bias": W[0, :2]}

    def loss(parameters, row):
        return functional_call(module, parameters, (row,)).square().sum()

    return loss, parameters


_LOSS, _PARAMETERS = per_sample(X)


def pull_back(x):
    value, pull = vjp(torch.sin, x)
    return value, pull(x)


TRANSFORMS = {
    "vmap": lambda x: vmap(lambda row: (W @ row).sin())(x),
    "vmap_dims": lambda x: vmap(lambda a, b: a.sum() * b, in_dims=(1, None), out_dims=1)(x, x),
    "vmap_tree": lambda x: vmap(lambda d: {"a": d["x"] * d["y"][0]})({"x": x, "y": [x.cos()]}),
    "vmap_chunks": lambda x: vmap(lambda row: row.sin(), chunk_size=3)(x),
    "grad": lambda x: grad(lambda t: (t.sin() ** 2).sum())(x),
    "grad_closure": lambda x: grad(lambda t: (t * x).sum() * W.sum())(x.cos()),
    "grad_aux": lambda x: grad(lambda t: (t.sin().sum(), t * 2), has_aux=True)(x),
    "jacrev": lambda x: jacrev(lambda t: t.sin().sum(0))(x),
    "jacfwd": lambda x: jacfwd(lambda t: t.sin().sum(0))(x),
    "hessian": lambda x: hessian(lambda t: t.sin().prod())(x[0]),
    "jvp": lambda x: jvp(torch.sin, (x,), (x.cos(),)),
    "vjp": pull_back,
    "per_sample": lambda x: vmap(grad(_LOSS), in_dims=(None, 0))(_PARAMETERS, x),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_in_one_graph(name):
    function = TRANSFORMS[name]
    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    torch.testing.assert_close(function(X), optimised(X))
    torch.testing.assert_close(function(X + 1), optimised(X + 1))
    assert torch._C._functorch.maybe_current_level() is None


def test_break_inside_a_level_takes_the_call_back():
    def function(x):
        return vmap(lambda row: row * 2 if bool((x > 0).any()) else row)(x.sin()).cos()

    optimised = weft_capture.capture(function, eager_backend)
    torch.testing.assert_close(function(X), optimised(X))
    assert optimised._weft_capture.breaks
    assert torch._C._functorch.maybe_current_level() is None


def train_step(capture):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = weft_capture.capture(step, eager_backend) if capture else step
    losses = []
    for _ in range(4):
        losses.append(run(X))
        scheduler.step()
    return losses, list(model.parameters()), [p.grad for p in model.parameters()]


def test_whole_training_step():
    torch.testing.assert_close(train_step(False), train_step(True), rtol=1e-10, atol=1e-12)


SCALE = 2.0


def scaled_by_global(grad):
    return grad * SCALE


def clamped(grad):
    return grad.clamp(-1, 1)


def hook_on_intermediate(x):
    y = x * 2
    y.register_hook(lambda grad: grad * 3)
    return y * y


def hooks_in_order(x):
    y = x.sin()
    y.register_hook(clamped)
    y.register_hook(scaled_by_global)
    return (y * x).view(-1) + y.view(-1)


def hook_that_only_looks(x):
    y = x.sin()
    y.register_hook(lambda grad: None)
    return y * x


def hook_on_result(x):
    y = x * 2
    y.register_hook(clamped)
    return y


def hook_removed(x):
    y = x * 2
    handle = y.register_hook(clamped)
    handle.remove()
    return y * y


def hook_on_argument(x):
    x.register_hook(clamped)
    return x * x


def hook_with_effect(x):
    y = x * 2
    y.register_hook(lambda grad: Counted.calls.append(1))
    return y * y


def hook_with_closure(x):
    y, k, w = x * 2, 3.0, x.detach().cos()
    y.register_hook(lambda grad: grad * k + w)
    return y * y


def last_hook(x):
    x.register_post_accumulate_grad_hook(halve)
    return x * x


def halve(leaf):
    leaf.grad = leaf.grad / 2


def hook_of_argument_removed(x):
    handle = x.register_hook(clamped)
    handle.remove()
    return x * x


@pytest.mark.parametrize(
    "function",
    [hook_on_intermediate, hooks_in_order, hook_that_only_looks, hook_with_closure]
    + [hook_on_argument, last_hook, hook_of_argument_removed],
)
def test_tensor_hook_in_one_graph(function):
    expected = gradients(function, X)
    torch.testing.assert_close(expected, gradients(function, X, eager_backend))


@pytest.mark.parametrize("function", [hook_on_result, hook_removed, hook_with_effect])
def test_tensor_hook_that_others_may_see_breaks(function):
    Counted.calls.clear()
    with pytest.raises(Unsupported):
        gradients(function, X, eager_backend)
    expected = gradients(function, X)
    calls = len(Counted.calls)
    torch.testing.assert_close(expected, gradients(function, X, eager_backend, fullgraph=False))
    assert len(Counted.calls) == 2 * calls
    Counted.calls.clear()


def test_what_a_hook_reads_is_guarded(monkeypatch):
    compiled = weft_capture.capture(hooks_in_order, eager_backend, fullgraph=True)
    for scale in (2.0, 5.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        expected = gradients(hooks_in_order, X)
        torch.testing.assert_close(expected, gradients(compiled, X))


def inner_gradient(x):
    loss = (x**3).sum()
    (grad,) = torch.autograd.grad(loss, x)
    return x - 0.1 * grad


def gradient_of_gradient(x):
    y = x.sin() * x
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    return grad**2


def unused_and_own_leaf(x):
    w = x.detach().requires_grad_()
    grads = torch.autograd.grad((w * w).sum(), [w, x], allow_unused=True)
    assert grads[1] is None
    return x * grads[0]


@pytest.mark.parametrize("function", [inner_gradient, gradient_of_gradient, unused_and_own_leaf])
def test_inner_gradient_in_one_graph(function):
    expected = gradients(function, X)
    torch.testing.assert_close(expected, gradients(function, X, eager_backend))


def test_inner_gradient_past_the_arguments_breaks():
    def function(x, w):
        return torch.autograd.grad((x * w).sum(), w)[0]

    compiled = weft_capture.capture(function, eager_backend)
    w = X.clone().requires_grad_()
    for factor in (None, 2, None):  # with a factor, `x` is made of `w`
        got, want = ((w * factor if factor else X) for _ in range(2))
        torch.testing.assert_close(compiled(got, w), function(want, w))
    w.register_hook(lambda grad: grad * 7)
    torch.testing.assert_close(compiled(X, w), function(X, w))
    with pytest.raises(Unsupported):
        weft_capture.capture(function, eager_backend, fullgraph=True)(w * 2, w)


@pytest.mark.parametrize("create", [False, True])
def test_inner_gradient_of_arguments_in_a_list(create):
    """They are read by this call first of all, and have a history from outside."""
    w = X.clone().requires_grad_()

    def function(results, seeds):
        return torch.autograd.grad(results, [w], seeds, create_graph=create, allow_unused=True)[0]

    compiled = weft_capture.capture(function, eager_backend)
    for make in (lambda: [w * 2, w.exp()], lambda: list(w), lambda: [w[0]]):
        seeds = [torch.ones_like(one).requires_grad_() for one in make()]
        torch.testing.assert_close(compiled(make(), seeds), function(make(), seeds))


def test_inner_gradient_of_nothing_raises_as_in_eager():
    def function(x, w):
        return torch.autograd.grad((x * x).sum(), w)[0]

    compiled = weft_capture.capture(function, eager_backend)
    x, w = X.clone().requires_grad_(), X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="not have been used"):
        compiled(x, w)


def grown(x, times: int = 2, more: torch.Tensor | None = None):
    for _ in range(times):
        x = torch.tanh(x) * 1.5
    return x if more is None else x + more


def scripts(x):
    return x + 2 if torch.jit.is_scripting() else x


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_functions_are_captured_where_torchscript_converts_no_argument():
    script, special = torch.jit.script(grown), torch.jit.script(scripts)
    traced = torch.jit.trace(lambda x: x * 2, X)

    def whole(x):
        return script(x), script(x, 1, x), script(times=3, x=x), script is script

    torch.testing.assert_close(
        weft_capture.capture(whole, eager_backend, fullgraph=True)(X), whole(X)
    )
    for refused in (lambda x: script(x, 1.5), special, traced, lambda x: script()):
        with pytest.raises(Unsupported):
            weft_capture.capture(lambda x, f=refused: f(x), eager_backend, fullgraph=True)(X)
    assert torch.equal(weft_capture.capture(lambda x: special(x), eager_backend)(X), X + 2)


@pytest.mark.parametrize("pool", [torch.nn.functional.max_pool1d, torch.max_pool1d])
def test_rows_that_a_kernel_makes_of_columns(pool):
    """A fake takes the kernel that gives places, too, whose result keeps the order of memory."""

    def function(x):
        return pool(x, 2).view(-1), pool(input=x, kernel_size=3, stride=1).stride()

    captured = weft_capture.capture(function, eager_backend, fullgraph=True)
    x = torch.rand(7, 9, 4).transpose(1, 2)
    assert same(captured(x), function(x))
