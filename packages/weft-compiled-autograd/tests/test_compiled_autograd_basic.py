"""The main job: eager models' backward in one graph, gradients equal to eager's."""

import pytest
import torch
import torch.nn.functional as F
import weft_compiled_autograd as ca
from torch import nn


@pytest.fixture(autouse=True)
def fresh():
    ca.reset()
    yield
    ca.reset()


class Collect:
    """A compiler that runs the graph as it is and keeps it."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm):
        self.graphs.append(gm)
        return gm


def captures():
    return ca.counters["compiled_autograd"]["captures"]


def gradients(model, loss, compiler=None, **kw):
    model.zero_grad(set_to_none=True)
    value = loss()
    if compiler is None:
        value.backward(**kw)
    else:
        with ca.enable(compiler):
            value.backward(**kw)
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want):
        if b is None:
            assert a is None
        else:
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class GPT(nn.Module):
    def __init__(self, vocab=31, width=16, heads=2, layers=2, length=12):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    n1=nn.LayerNorm(width),
                    attn=Attention(width, heads),
                    n2=nn.LayerNorm(width),
                    mlp=nn.Sequential(
                        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                    ),
                )  # fmt: skip
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = x + block["attn"](block["n1"](x))
            x = x + block["mlp"](block["n2"](x))
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 4, 3),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
        )

    def forward(self, x):
        return self.body(x).log_softmax(-1)


def test_01_linear_backward_is_one_graph():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    compiler = Collect()
    want = gradients(model, lambda: model(x).sum())
    assert_same(gradients(model, lambda: model(x).sum(), compiler), want)
    assert len(compiler.graphs) == captures() == 1
    targets = {str(n.target) for n in compiler.graphs[0].graph.nodes if n.op == "call_function"}
    assert any("aten.mm" in t for t in targets)


def test_02_second_backward_hits_the_cache():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    compiler = Collect()
    for _ in range(3):
        gradients(model, lambda: model(x).sum(), compiler)
    assert len(compiler.graphs) == captures() == 1


def test_03_four_sizes_give_two_captures():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    compiler = Collect()
    for size in (10, 100, 10, 37):
        x = torch.randn(size, 4)
        want = gradients(model, lambda: model(x).pow(2).sum())
        assert_same(gradients(model, lambda: model(x).pow(2).sum(), compiler), want)
    assert len(compiler.graphs) == captures() == 2


def test_04_size_one_after_larger_sizes_is_right():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    compiler = Collect()
    for size in (10, 20, 1, 0, 5, 1):
        x = torch.randn(size, 4)
        want = gradients(model, lambda: model(x).sum())
        assert_same(gradients(model, lambda: model(x).sum(), compiler), want)


def test_05_gpt_with_tied_weights():
    torch.manual_seed(0)
    model = GPT()
    compiler = Collect()
    for batch, length in ((2, 12), (3, 12), (2, 7), (4, 9)):
        ids = torch.randint(31, (batch, length))
        loss = lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())  # noqa: E731
        want = gradients(model, loss)
        assert_same(gradients(model, loss, compiler), want)
    assert captures() == len(compiler.graphs) <= 3
    assert ca.counters["compiled_autograd"]["eager"] == 0
    assert ca.counters["compiled_autograd"]["node_by_node"] == 0


def test_06_convnet_with_batchnorm():
    torch.manual_seed(0)
    model = ConvNet()
    x, y = torch.randn(4, 3, 12, 12), torch.randint(5, (4,))
    want = gradients(model, lambda: F.nll_loss(model(x), y))
    assert_same(gradients(model, lambda: F.nll_loss(model(x), y), Collect()), want)
    assert captures() == 1


def test_07_channels_last_gradients_keep_the_parameters_layout():
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    want = gradients(model, lambda: model(x).square().sum())
    assert_same(gradients(model, lambda: model(x).square().sum(), Collect()), want)


def test_08_gradients_accumulate_in_place():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    compiler = Collect()
    with ca.enable(compiler):
        model(x).sum().backward()
        first = model.weight.grad
        once = first.clone()
        model(x).sum().backward()
        model(x).sum().backward()
    assert model.weight.grad is first
    torch.testing.assert_close(first, 3 * once)
    assert len(compiler.graphs) == 2  # without and with a gradient to add to


def test_09_retain_graph_and_a_freed_graph():
    x = torch.randn(3, requires_grad=True)
    loss = (x.sin() * x).sum()
    with ca.enable(Collect()):
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    torch.testing.assert_close(x.grad, 2 * (x.cos() * x + x.sin()).detach())


def test_10_autograd_grad_and_inputs():
    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    compiler = Collect()

    def f():
        return (x * w).tanh().sum()

    want = torch.autograd.grad(f(), (x, w))
    with ca.enable(compiler):
        got = torch.autograd.grad(f(), (x, w))
        only = torch.autograd.grad(f(), w)
        unused = torch.autograd.grad(x.sum(), (x, w), allow_unused=True)
        f().backward(inputs=[w])
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(only[0], want[1])
    assert unused[1] is None and torch.equal(unused[0], torch.ones(4))
    assert x.grad is None
    torch.testing.assert_close(w.grad, want[1])
    assert captures() == 4


def test_11_grad_with_a_vector_and_several_roots():
    x = torch.randn(4, requires_grad=True)
    v = torch.randn(4)
    a, b = x.exp(), x.sin()
    want = torch.autograd.grad((a, b), x, (v, 2 * v), retain_graph=True)
    with ca.enable(Collect()):
        got = torch.autograd.grad((a, b), x, (v, 2 * v))
    torch.testing.assert_close(got[0], want[0])


def test_12_gradients_are_not_shared():
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    v = torch.ones(3)
    with ca.enable(Collect()):
        (a + b).backward(v)
    a.grad.mul_(5)
    assert torch.equal(b.grad, torch.ones(3)) and torch.equal(v, torch.ones(3))


def test_13_writes_through_views():
    x, w = torch.randn(4, 5), torch.randn(4, 5, requires_grad=True)

    def loss():
        y = w * 2
        y[:, 1] = y[:, 2] * 3
        y[0].mul_(x[0])
        return (y * x).sum()

    want = torch.autograd.grad(loss(), w)
    with ca.enable(Collect()):
        got = torch.autograd.grad(loss(), w)
    torch.testing.assert_close(got, want)
    assert captures() == 1


def test_14_writes_through_views_with_changing_sizes():
    with ca.enable(Collect()):
        for n in (4, 6, 9, 4):
            w = torch.randn(n, 5, requires_grad=True)
            y = w * 2
            y[:, 1].mul_(3)
            y.square().sum().backward()
            factor = torch.full((n, 5), 2.0)
            factor[:, 1] = 6
            torch.testing.assert_close(w.grad, 2 * factor * factor * w.detach())


def test_15_layouts_that_change_under_one_key():
    compiler = Collect()
    w = torch.randn(4, 4, requires_grad=True)
    for x in (torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(4, 8)[:, ::2]):
        w.grad = None
        with ca.enable(compiler):
            (w * x).sum().backward()
        torch.testing.assert_close(w.grad, x)


@pytest.mark.filterwarnings("ignore")
def test_16_torch_compile_as_the_compiler():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(6, 4)
    compiler = lambda gm: torch.compile(gm, backend="eager", fullgraph=True)  # noqa: E731
    want = gradients(model, lambda: model(x).sum())
    for _ in range(2):
        assert_same(gradients(model, lambda: model(x).sum(), compiler), want)
    assert captures() == 1


def test_17_half_precision_autocast():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().sum()

    want = gradients(model, loss)
    assert_same(gradients(model, loss, Collect()), want)


def test_18_saved_tensors_are_freed_as_the_graph_goes():
    import weakref

    x = torch.randn(3, requires_grad=True)
    middle = x.exp()
    loss = (middle * 2).sin().sum()
    watched = weakref.ref(middle)
    del middle
    with ca.enable(Collect()):
        loss.backward()
    assert watched() is None


def test_19_double_backward_falls_back_and_is_right(caplog):
    x = torch.randn(3, requires_grad=True)
    with ca.enable(Collect()):
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(h, 6 * x.detach())
    assert ca.counters["compiled_autograd"]["eager"] == 1
    assert sum("create_graph" in r.message for r in caplog.records) == 1
