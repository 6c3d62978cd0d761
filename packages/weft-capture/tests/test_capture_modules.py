"""nn.Modules: outputs, gradients, buffers and counters as in eager, in one graph where possible."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import weft_capture
from capture_check import eager_backend, same
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.places = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList([Block(16, 2) for _ in range(2)])
        self.head = nn.Linear(16, 50, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Members(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
        self.named = nn.ModuleDict({"a": nn.Linear(3, 3)})
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        for module in self.named.values():
            x = module(x)
        self.count = self.count + 1
        total = sum(p.sum() for p in self.parameters())
        return x + self.count, total, [name for name, _ in self.named_parameters()]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return Doubling.apply(self.linear(x)) + 1


class MakesModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        torch.manual_seed(0)
        return nn.Linear(3, 2)(self.linear(x))


def hooked():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


X = torch.randn(2, 3)
WHOLE = {
    "makes_module": (MakesModule, X),
    "gpt": (GPT, torch.randint(0, 50, (2, 8))),
    "convolutional": (convolutional, torch.randn(2, 3, 8, 8)),
    "members": (Members, X),
    "checkpointed": (Checkpointed, X),
    "hooked": (hooked, X),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), X),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
                  torch.randn(2, 4, 8)),
    "lstm_cell": (lambda: nn.LSTMCell(3, 4), X),
    "custom_function": (CustomFunction, X),
    "lstm": (lambda: nn.LSTM(3, 4), torch.randn(5, 2, 3)),
    "gru": (lambda: nn.GRU(3, 4, 2, bidirectional=True), torch.randn(5, 2, 3)),
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), torch.randn(5, 2, 3)),
}  # fmt: skip


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def check_training(make, x):
    torch.manual_seed(0)
    eager = make()
    captured = copy.deepcopy(eager)
    optimised = weft_capture.capture(captured, eager_backend)
    for _ in range(2):
        torch.manual_seed(1)
        expected = eager(x)
        torch.manual_seed(1)
        result = optimised(x)
        assert same(expected, result)
        for output in (expected, result):
            sum(t.sum() for t in tensors(output) if t.requires_grad).backward()
    for (name, a), (_, b) in zip(eager.named_parameters(), captured.named_parameters()):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    assert same(dict(eager.named_buffers()), dict(captured.named_buffers()))
    return optimised._weft_capture


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_module_in_one_graph(name):
    state = check_training(*WHOLE[name])
    assert not state.breaks
    assert len(state.graphs) == 1


def test_layers_of_one_class_share_a_graph():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Breaking() for _ in range(4)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            x = self.linear(x)
            weft_capture.graph_break()
            return x.relu()

    model = Stack()
    x = torch.randn(2, 3, requires_grad=True)
    optimised = weft_capture.capture(model, eager_backend)
    assert torch.equal(optimised(x), model(x))
    assert torch.equal(optimised(x), model(x))
    # The first layer up to its break, the rest of any layer, any next layer up to its break.
    assert len(optimised._weft_capture.graphs) == 3


class Shadowed(nn.Module):
    """Class attributes come before members of the same name, as Python has it."""

    scale = 3.0
    part = None
    buffer = property(lambda self: 7.0)

    def __init__(self):
        super().__init__()
        self._parameters["scale"] = nn.Parameter(torch.zeros(3))
        self._modules["part"] = nn.Linear(3, 3)
        self._buffers["buffer"] = torch.zeros(3)
        self.register_buffer("weight", torch.ones(3))

    def forward(self, x):
        return x * self.scale * self.weight + self.buffer, self.part


class Forwarding(nn.Module):
    """A `__getattr__` of the program sees the names of members, too."""

    def __init__(self):
        super().__init__()
        self.seen, self.inner = [], Shadowed()

    def __getattr__(self, name):
        if "seen" in self.__dict__:
            self.seen.append(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x):
        self.seen.clear()
        return self.inner(x)[0] * self.weight + len(self.seen), list(self.seen)


class Failing(nn.Module):
    @property
    def value(self):
        raise AttributeError("inside")

    def forward(self, x):
        try:
            return self.value
        except AttributeError as error:
            return str(error), x * 2


@pytest.mark.parametrize("kind", [Shadowed, Forwarding, Failing])
def test_order_of_attributes(kind):
    eager, module = kind(), kind()
    captured = weft_capture.capture(module, eager_backend)
    for _ in range(3):
        assert same(eager(torch.ones(3)), captured(torch.ones(3)))


@pytest.mark.parametrize(
    "read",
    [
        lambda module: getattr(module, "extra", None),
        lambda module: module.extra if hasattr(module, "extra") else None,
    ],
)
@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_buffer("extra", torch.full((3,), 5.0)),
        lambda module: module.register_parameter("extra", nn.Parameter(torch.full((3,), 5.0))),
        lambda module: setattr(module, "extra", 5.0),
    ],
)
def test_a_member_that_is_registered_after_it_was_missing(read, register):
    class Net(nn.Linear):
        def forward(self, x):
            extra = read(self)
            return super().forward(x) if extra is None else super().forward(x) * extra

    net, x = Net(3, 3), torch.ones(2, 3)
    captured = weft_capture.capture(net.forward, eager_backend)
    assert torch.equal(captured(x), F.linear(x, net.weight, net.bias))
    register(net)
    assert torch.equal(captured(x), F.linear(x, net.weight, net.bias) * 5)
