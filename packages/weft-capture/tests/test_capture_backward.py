"""`backward()` in a captured function: whole training steps, and what keeps it outside."""

import copy

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
Y = torch.linspace(0, 1, 18, dtype=torch.float64).reshape(6, 3)


class Net(nn.Module):
    """Shared and frozen parameters, one that the loss does not reach, and odd layouts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.tied = nn.Linear(3, 8)
        self.tied.weight = nn.Parameter(torch.randn(8, 3))
        self.back = nn.Linear(8, 3, bias=False)
        self.back.weight = self.last.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.sums = nn.ParameterList([torch.randn(3), torch.randn(3), torch.randn(1)])
        self.double()

    def forward(self, x):
        a, b, c = self.sums
        h = self.last(torch.tanh(self.first(x))) + x @ self.turned
        return self.frozen(self.back(self.tied(h)) + (a + b)) + c.expand(3)


def mse(net, x, y):
    return F.mse_loss(net(x), y)


def zeroed_first(net, optimizer):
    optimizer.zero_grad()
    loss = mse(net, X, Y)
    loss.backward()
    optimizer.step()
    return loss


def zeroed_in_place(net, optimizer):
    loss = mse(net, X, Y)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def accumulated(net, optimizer):
    optimizer.zero_grad()
    for part in range(2):
        (mse(net, X[part::2], Y[part::2]) / 2).backward()
    optimizer.step()


def of_two_losses(net, optimizer):
    mse(net, X, Y).backward()
    out = net(X * 2)
    torch.autograd.backward([out.sum(), out.abs().mean()])
    optimizer.step()
    return out


def scaled(net, optimizer):
    (mse(net, X, Y) * 64).backward()
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(64)
    optimizer.step()
    optimizer.zero_grad()


def with_a_gradient(net, optimizer):
    seed = torch.ones_like(Y)
    net(X).backward(gradient=seed)
    optimizer.step()
    return seed.mul_(2)


def never_zeroed(net, optimizer):
    loss = mse(net, X, Y)
    if loss.isnan():
        raise ValueError("nan")
    loss.backward()
    return loss, loss.item(), net.turned.grad * 1


STEPS = (
    zeroed_first, zeroed_in_place, accumulated, of_two_losses, scaled, with_a_gradient,
    never_zeroed,
)  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
}


def state(result, net):
    """Return all that a step leaves: results, parameters, gradients and their layouts."""
    grads = [parameter.grad for parameter in net.parameters()]
    results = result if isinstance(result, tuple) else (result,)
    needs = [one.requires_grad for one in results if isinstance(one, torch.Tensor)]
    layouts = [grad if grad is None else (grad.stride(), grad.requires_grad) for grad in grads]
    values = [one.detach() if isinstance(one, torch.Tensor) else one for one in results]
    return values, needs, layouts, list(net.state_dict().values()), grads


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_a_training_step_is_one_graph(step, optimizer):
    nets = Net(), Net()
    optimizers = [OPTIMIZERS[optimizer](net.parameters()) for net in nets]
    captured = weft_capture.capture(step, eager_backend, fullgraph=True)
    for _ in range(4):
        expected = state(step(nets[0], optimizers[0]), nets[0])
        kept = {p: p.grad for p in nets[1].parameters() if p.grad is not None}
        got = state(captured(nets[1], optimizers[1]), nets[1])
        assert got[1:3] == expected[1:3]
        torch.testing.assert_close(got[0] + got[3], expected[0] + expected[3])
        for one, other in zip(got[4], expected[4], strict=True):
            assert (one is None) == (other is None)
            torch.testing.assert_close(one, other) if one is not None else None
        if step in (zeroed_in_place, of_two_losses, with_a_gradient, never_zeroed):
            assert all(p.grad is grad for p, grad in kept.items())
    assert len(captured._weft_capture.graphs) <= 2


def test_gradients_share_no_memory():
    net = Net()
    weft_capture.capture(zeroed_first, eager_backend)(net, torch.optim.SGD(net.parameters(), 0.1))
    grads = [one.grad for one in net.parameters() if one.grad is not None]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads)


@pytest.mark.parametrize("capture", [False, True])
def test_the_history_is_used_up(capture):
    def program(net):
        loss = mse(net, X, Y)
        loss.backward()
        return loss, loss * 2, loss.detach() * net.turned.sum()

    step = weft_capture.capture(program, eager_backend, fullgraph=True) if capture else program
    net = Net()
    loss, double, other = step(net)
    for one in (loss, double):
        assert one.requires_grad and not one.is_leaf
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            one.backward()
    before = net.turned.grad.clone()
    other.backward()
    torch.testing.assert_close(net.turned.grad - before, loss.detach().expand(4, 3))


def second_over_the_same(net):
    loss = mse(net, X, Y)
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def kept_graph(net):
    loss = mse(net, X, Y)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def chosen_inputs(net):
    mse(net, X, Y).backward(inputs=[net.first.weight])


def hooked_tensor(net):
    hidden = net.first(X)
    hidden.register_hook(lambda grad: grad * 2)
    hidden.sum().backward()


def retained(net):
    hidden = net.first(X)
    hidden.retain_grad()
    (hidden * hidden).sum().backward()
    return hidden.grad


def in_a_checkpoint(net):
    checkpoint(net, X, use_reentrant=False).sum().backward()


def under_autocast(net):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(X).float().sum().backward()


def with_sparse_gradients(net):
    rows = F.embedding(torch.tensor([0, 2]), net.last.weight, sparse=True)
    rows.sum().backward()
    return net.last.weight.grad.to_dense()


def of_what_needs_none(net):
    try:
        X.sum().backward()
    except RuntimeError as error:
        return str(error)


BREAKS = (
    second_over_the_same, kept_graph, chosen_inputs, hooked_tensor, retained, in_a_checkpoint,
    under_autocast, with_sparse_gradients, of_what_needs_none,
)  # fmt: skip


def same_after(functions, nets):
    results = [function(net) for function, net in zip(functions, nets, strict=True)]
    torch.testing.assert_close(results[0], results[1])
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    for one, other in pairs:
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("function", BREAKS, ids=lambda f: f.__name__)
def test_breaks_cleanly(function):
    captured = weft_capture.capture(function, eager_backend)
    nets = Net(), Net()
    for _ in range(2):
        results = function(nets[0]), captured(nets[1])
        if results[0] is not None and not isinstance(results[0], str):
            torch.testing.assert_close(*results)
        assert type(results[0]) is type(results[1])
        for one, other in zip(*(net.parameters() for net in nets), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())
    assert captured._weft_capture.breaks


def plain(net):
    mse(net, X, Y).backward()


def double(net, keep):
    net.first.weight.register_hook(lambda grad: grad * 2)


def scale_gradient(parameter):
    parameter.grad.mul_(2)


def after_accumulation(net, keep):
    net.first.weight.register_post_accumulate_grad_hook(scale_gradient)


def on_the_node(net, keep):
    weight = net.first.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: (grads[0] * 2,))
    keep.append(node)


def behind_the_node(net, keep):
    weight = net.first.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda new, grads: keep.append(grads[0].clone()))
    keep.append(node)


def kept_history(net, keep):
    keep.append(net.first.weight * 2)


def frozen(net, keep):
    net.first.weight.requires_grad_(False)


def other_layout(net, keep):
    net.first.weight.grad = torch.ones(4, 8, dtype=torch.float64).t()


def no_gradient(net, keep):
    net.first.weight.grad = None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:grad and param")
@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize(
    "change", [double, after_accumulation, on_the_node, behind_the_node, kept_history, frozen,
    other_layout, no_gradient], ids=lambda f: f.__name__,
)  # fmt: skip
def test_what_changes_between_calls_is_seen(change, call):
    captured, keep = weft_capture.capture(plain, eager_backend), []
    nets = Net(), Net()
    for number in range(4):
        for net in nets if number == call else ():
            change(net, keep)
        same_after((plain, captured), nets)
    seen = [grad for grad in keep if isinstance(grad, torch.Tensor) and not grad.requires_grad]
    torch.testing.assert_close(seen[::2], seen[1::2])  # by hooks, of both nets in turn


def test_a_setting_keeps_it_outside():
    with weft_capture.settings.patch(capture_backward=False):
        captured = weft_capture.capture(plain, eager_backend)
        same_after((plain, captured), (Net(), Net()))
    (reason,) = captured._weft_capture.breaks
    assert "capture_backward" in reason.detail


def test_leaves_made_inside():
    def attack(net, x):
        x = x.clone().requires_grad_()
        mse(net, x, Y).backward()
        return X + x.grad.sign()

    nets = Net(), Net()
    captured = weft_capture.capture(attack, eager_backend, fullgraph=True)
    torch.testing.assert_close(captured(nets[0], X), attack(nets[1], X))
    torch.testing.assert_close(nets[0].turned.grad, nets[1].turned.grad)


def test_an_exception_after_it_leaves_the_gradients():
    def program(net):
        plain(net)
        raise KeyError("later")

    net, other = Net(), copy.deepcopy(Net())
    captured = weft_capture.capture(program, eager_backend)
    with pytest.raises(KeyError):
        captured(net)
    plain(other)
    torch.testing.assert_close(net.turned.grad, other.turned.grad)


@pytest.mark.slow
@pytest.mark.parametrize("laid_out", [
    lambda x: x, lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(x.shape),
    lambda x: x.repeat(2, 2)[::2, ::2],
], ids=["dense", "transposed", "expanded", "with gaps"])  # fmt: skip
def test_gradients_of_sizes_that_vary(laid_out):
    def step(x, scale):
        loss = (x.tanh() * scale).square().mean()
        loss.backward()
        return loss.detach()

    captured = weft_capture.capture(step, eager_backend, fullgraph=True)
    for rows in (5, 6, 7, 9):
        found = []
        for run in (step, captured):
            torch.manual_seed(rows)
            x = laid_out(torch.randn(rows, 4)).requires_grad_()
            scale = torch.randn(rows, 1, requires_grad=True)
            found.append([run(x, scale), run(x, scale), x.grad, scale.grad, x.grad.stride()])
        torch.testing.assert_close(found[1], found[0])
    graphs = captured._weft_capture.graphs
    assert len(graphs) <= 4
