"""Modules, parameters and state dicts made in captured code: values, RNG order, gradients."""

import collections
import copy

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import nn
from torch.nn import functional as F
from weft_core.errors import Unsupported

X = torch.arange(6.0).reshape(2, 3)


class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.calls = 0
        self.scale = nn.Parameter(torch.ones(width) * 2)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        for layer in self.layers:
            x = F.relu(layer(x)) * self.scale
        return self.norm(x)


class Plain(nn.Module):
    def forward(self, x):
        return self.inner(x) if hasattr(self, "inner") else x


def rng_order(x):
    first = torch.rand(2, 3)
    layer = nn.Linear(3, 3)
    return layer(x) + first, torch.rand(2, 3)


def whole_net(x):
    net = Net()
    y = net(x)
    names = [name for name, _ in net.named_parameters()]
    return y, net.calls, net.steps + 0, names, net.training, isinstance(net, nn.Module)


def containers(x):
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3)).eval()
    return net(x), len(net), net[1].training, [type(m).__name__ for m in net.modules()]


def members(x):
    net = Plain()
    net.inner = nn.Linear(3, 2)
    before = sum(p.numel() for p in net.parameters())
    y = net(x)
    del net.inner
    return y, before, list(net.parameters()), net(x)


def initialised(x):
    layer = nn.Linear(3, 3)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        layer.bias.zero_()
    return layer(x), layer.bias.requires_grad


def parameters(x):
    p, fixed = nn.Parameter(x * 2), nn.Parameter(x + 1, requires_grad=False)
    return (p * x).sum(), p.is_leaf, isinstance(p, nn.Parameter), fixed.requires_grad, fixed * 2


def gradient(x):
    layer = nn.Linear(3, 1)
    return torch.autograd.grad(layer(x).sum(), [layer.weight, layer.bias])


def attention_and_convolution(x):
    attention = nn.MultiheadAttention(3, 1)
    return attention(x[None], x[None], x[None])[0], nn.Conv1d(2, 3, 2)(x[None])


def own_state_dict(x):
    net = Net()
    state = net.state_dict()
    other = Net()
    keys = other.load_state_dict(state)
    return net(x), other(x), sorted(state), keys


def trains(x):
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x).sum().backward()
    optimizer.step()
    return layer(x)


WHOLE = (
    rng_order, whole_net, containers, members, initialised, parameters, gradient,
    attention_and_convolution, own_state_dict, trains,
)  # fmt: skip


def leaves(x):
    layer = nn.Linear(3, 2)
    return layer(x), layer


def parameters_leave(x):
    return nn.Parameter(x * 2), nn.Parameter(x, requires_grad=False)


def same(left, right):
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, nn.Module):
        return str(left) == str(right) and same(left.state_dict(), right.state_dict())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, torch.Tensor):
        return left.requires_grad == right.requires_grad and torch.allclose(left, right)
    return left == right


def check(function, *args, fullgraph=True):
    captured = weft_capture.capture(function, eager_backend, fullgraph=fullgraph)
    for _ in range(2):
        one, other = copy.deepcopy(args), copy.deepcopy(args)
        torch.manual_seed(1)
        expected = function(*one)
        torch.manual_seed(1)
        assert same(expected, captured(*other))
        assert same(one, other)
    return captured._weft_capture


@pytest.mark.slow
@pytest.mark.parametrize("function", WHOLE)
def test_captured_whole(function):
    assert len(check(function, X).graphs) == 1


@pytest.mark.parametrize("function", [leaves, parameters_leave])
def test_what_leaves_the_graph_is_made_for_real(function):
    with pytest.raises(Unsupported):
        weft_capture.capture(function, eager_backend, fullgraph=True)(X)
    check(function, X, fullgraph=False)


@pytest.mark.slow
def test_state_dicts_of_modules_from_outside():
    def saves(net, x):
        state = net.state_dict()
        return state, state._metadata, x + state["norm.weight"]

    def loads(net, state, x):
        return net.load_state_dict(state), net(x)

    check(saves, Net(), X)
    state = {name: tensor * 2 for name, tensor in Net().state_dict().items()}
    check(loads, Net(), state, X)
    check(loads, Net(), Net().state_dict(), X)


def test_metadata_is_guarded():
    def reads(state, x):
        return x + 1, getattr(state, "_metadata", None)

    captured = weft_capture.capture(reads, eager_backend, fullgraph=True)
    for state in (collections.OrderedDict(a=1), nn.ReLU().state_dict()):
        for _ in range(2):
            assert same(captured(state, X), reads(state, X))
    for copied in (copy.copy, copy.deepcopy):

        def copies(state, copied=copied):
            return copied(state)._metadata, X + 1

        state = nn.Linear(2, 2).state_dict()
        assert same(weft_capture.capture(copies, eager_backend)(state), copies(state))


def test_hooks_on_all_modules_are_seen():
    def makes(x):
        return nn.Linear(3, 3, bias=False)(x).shape

    captured = weft_capture.capture(makes, eager_backend)
    assert captured(X) == (2, 3)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out[:1])
    try:
        assert captured(X) == (1, 3)
    finally:
        handle.remove()
    assert captured(X) == (2, 3)
