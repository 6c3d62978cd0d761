"""Objects around tensors: made modules, dict subclasses, caches, deep copies, weak references."""

import collections
import copy
import functools
import weakref

import pytest
import torch
import weft_capture
from capture_check import check, eager_backend
from torch import nn

X = torch.arange(6.0).reshape(2, 3)


class Shouting(collections.OrderedDict):
    """A dict whose own `__getitem__` needs the dict, as transformers' outputs do."""

    def __getitem__(self, key):
        inner = dict(self.items())
        return inner[key] if isinstance(key, str) else tuple(inner.values())[key]


class Activation(nn.Module):
    def forward(self, x):
        return x.relu() + 1


class Config:
    def __init__(self):
        self.sizes = [1, 2]
        self.same = self.sizes
        self.inner = {"scale": 3.0}


def makes_modules(x):
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)(x, torch.zeros(2, dtype=torch.long))
    return loss + nn.Dropout(0.0)(x) + Activation()(x) + nn.GELU("tanh")(x)


def reads_subclass(d):
    return d["x"] * 2, d[0] + 1


def copies(config, x):
    other = copy.deepcopy(config)
    other.inner["scale"] = 5.0
    other.sizes.append(3)
    return x * config.inner["scale"] + other.inner["scale"], other.same, other.sizes is other.same


def module_after_break(x):
    loss = nn.MSELoss(reduction="sum")
    weft_capture.graph_break()
    return loss(x, x + 1)


def hooked(module, x):
    return module(x) * 2


def subscripted(x):
    kind = list[int] | None
    return x + 1, kind


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (makes_modules, (X,)),
        (reads_subclass, (Shouting(x=X),)),
        (copies, (Config(), X)),
        (hooked, (nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), X)),
        (subscripted, (X,)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_captured_without_break(function, args):
    with torch.no_grad():
        check(function, *args)


def test_dict_subclass_after_a_break():
    def function(d):
        weft_capture.graph_break()
        return d["x"] * 2

    check(function, Shouting(x=X), fullgraph=False)


def test_module_made_before_a_break():
    assert check(module_after_break, X, fullgraph=False).breaks


def test_cached_function_runs_once():
    calls = []

    @functools.cache
    def expensive(n):
        calls.append(n)
        return n * 2

    optimised = weft_capture.capture(lambda x: x * expensive(3), eager_backend)
    assert torch.equal(optimised(X), X * 6)
    assert torch.equal(optimised(X), X * 6)
    assert expensive(3) == 6
    assert calls == [3]


def test_weak_reference_is_followed_and_guarded():
    holder = Config()
    optimised = weft_capture.capture(lambda r, x: x * r().inner["scale"], eager_backend)
    assert torch.equal(optimised(weakref.ref(holder), X), X * 3)
    holder.inner["scale"] = 4.0
    assert torch.equal(optimised(weakref.ref(holder), X), X * 4)


def test_inference_tensors():
    def function(x):
        return x * 2, x.is_inference()

    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    with torch.inference_mode():
        made = X * 1
        assert optimised(made)[1] is True
        assert optimised(made)[0].is_inference()
    assert optimised(X)[1] is False
    assert optimised(made)[1] is True


def test_attributes_of_tensors():
    def function(x):
        x.tag = "seen"
        y = x + 1
        y.tag = x.tag
        return y

    one = X.clone()
    result = weft_capture.capture(function, eager_backend, fullgraph=True)(one)
    assert (one.tag, result.tag) == ("seen", "seen")


def two_layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net.register_buffer("offset", torch.ones(3))
    return net.eval()


def members(net):
    counts = [len(list(one)) for one in (net.parameters(), net.buffers(), net.children())]
    return counts, sum(t.sum() for t in net.state_dict().values())


def replace_parameter(net, x):
    net[0].weight = net[0].bias_like
    return net(x), [p.sum() for p in net.parameters()]


def drop_parameter(net, x):
    net[0].bias = None
    return net(x), len(list(net.parameters()))


def replace_buffer(net, x):
    net.offset = net.offset + x.sum(0)
    net[1].running_mean = x.mean(0)
    return net(x) + net.offset, [b.sum() for b in net.buffers()]


def add_module(net, x):
    net.extra = net[0]
    return net.extra(x), len(list(net.children())), len(net._modules)


def delete_buffer(net, x):
    del net.offset
    return x + 1, hasattr(net, "offset"), len(list(net.buffers()))


def hook_put_into_the_dict(net, x):
    net[0]._forward_hooks[3] = lambda module, args, out: out * 2
    y = net(x)
    del net[0]._forward_hooks[3]
    return y, net(x)


@pytest.mark.parametrize(
    "function",
    [
        replace_parameter,
        drop_parameter,
        replace_buffer,
        add_module,
        delete_buffer,
        hook_put_into_the_dict,
    ],
)
def test_members_set_inside_are_seen_at_once(function):
    compiled = weft_capture.capture(function, eager_backend, fullgraph=True)
    for _ in range(2):
        nets = [two_layers() for _ in range(2)]
        for net in nets:
            object.__setattr__(net[0], "bias_like", nn.Parameter(torch.ones(3, 3)))
        got, want = compiled(nets[0], X), function(nets[1], X)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(members(nets[0]), members(nets[1]))


def replaces_data(x):
    w = x.clone()
    view = w.view(-1)
    w.data = x * 3
    w.add_(1)
    view.mul_(2)
    return w, view, w.is_leaf, w.data * 2


def clips(net, x):
    loss = net(x).sum().detach()
    for p in net.parameters():
        p.data = p.data.clamp(-0.1, 0.1)
    return loss, net.weight.data.abs().max(), net.weight.shape


def uses_after(x, y):
    x.data = y * 2
    return x + 1


def other_shape(x):
    w = x.clone()
    w.data = x[0] * 2
    return w + 1


@pytest.mark.parametrize(
    ("function", "args"),
    [(replaces_data, (X,)), (clips, (nn.Linear(3, 2), X)), (uses_after, (X, X + 1))],
)
def test_data_is_replaced(function, args):
    assert check(function, *args).graphs


def test_data_that_cannot_be_replaced_in_the_graph():
    assert check(other_shape, X, fullgraph=False).breaks


def test_rounded_number_of_a_tensor():
    def rounds(x):
        loss = x.sum().item()
        return x + 1, round(loss, 2), round(loss), {"loss": f"{round(loss, 1)}"}

    check(rounds, X * 1.23456)
