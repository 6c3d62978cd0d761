"""Regions of `torch.compiler.nested_compile_region`: eager's results, like calls compiled once."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import weft
from torch import nn

region = torch.compiler.nested_compile_region


@pytest.fixture(autouse=True)
def fresh():
    weft.reset()
    weft.counters.clear()


@pytest.fixture(params=["aot_eager", "codegen"])
def backend(request):
    return request.param


class Block(nn.Module):
    def __init__(self, *extra):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.extra = nn.Sequential(*extra)

    def forward(self, x):
        return x + self.down(self.extra(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks of which each call is a marked one."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.stem, self.head = nn.ModuleList(blocks), nn.Linear(8, 8), nn.Linear(8, 3)
        self.call = region(lambda block, x: block(x))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def blocks(count, *extra):
    return [Block(*(make() for make in extra)) for _ in range(count)]


def train(model, batches):
    """A few steps; return losses, last gradients, parameters and buffers."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()], list(model.state_dict().values())


def compare(model, batches, backend, **options):
    model, batches = model.double(), [batch.double() for batch in batches]
    compiled = weft.compile(copy.deepcopy(model), backend=backend, **options)
    torch.testing.assert_close(train(compiled, batches), train(model, batches))


def counted():
    return tuple(weft.counters["regions"][name] for name in ("calls", "compiled"))


MODELS = {
    "blocks": lambda: Net(*blocks(4)),
    "dropout": lambda: Net(*blocks(4, lambda: nn.Dropout(0.3))),
    "batch norm": lambda: Net(*blocks(4, lambda: nn.BatchNorm1d(16))),
    "in place inside": lambda: Net(*blocks(4, lambda: nn.ReLU(inplace=True))),
    "one block, four times": lambda: Net(*blocks(1) * 4),
    "two and two kinds": lambda: Net(*blocks(2), *blocks(2, nn.Tanh)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_eager_and_like_calls_are_compiled_once(name, backend):
    compare(MODELS[name](), [torch.randn(4, 8) for _ in range(3)], backend, fullgraph=True)
    assert counted() == (4, 1 + ("two" in name))
    assert weft.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_code_and_backward_are_made_once():
    graphs = {}
    for count in (3, 9):
        weft.reset()
        weft.counters.clear()
        compare(Net(*blocks(count)), [torch.randn(4, 8)] * 2, "codegen")
        graphs[count] = weft.counters["codegen"]["graphs"]
        assert counted() == (count, 1)
    assert graphs[3] == graphs[9]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode, backend):
    model = Net(*blocks(4, lambda: nn.BatchNorm1d(16))).eval()
    compiled = weft.compile(model, backend=backend, fullgraph=True)
    with mode():
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert counted() == (4, 1)


@pytest.mark.slow
def test_dynamic_batches_and_a_recompile(backend):
    compare(model := Net(*blocks(4)), [torch.randn(n, 8) for n in (4, 6, 5, 7)], backend)
    assert weft.counters["stats"]["unique_graphs"] == 2
    assert counted() == (8, 2)
    weft.counters.clear()
    compare(model, [torch.randn(3, n, 8) for n in (4, 6)], backend, dynamic=True)
    assert counted() == (4, 1)


def check(program, backend, *args):
    """Run eager and compiled twice, with gradients of the arguments, and effects on them."""
    compiled = weft.compile(program, backend=backend)
    for _ in range(2):
        runs = []
        for function in (program, compiled):
            given = [a.clone().detach().requires_grad_(a.requires_grad) for a in args]
            torch.manual_seed(3)
            out = function(*given)
            sum((i + 1) * o.square().sum() for i, o in enumerate(out) if o.requires_grad).backward()
            aliases = [[a.data_ptr() == o.data_ptr() for a in given] for o in out]
            runs.append((list(out), [a.grad for a in given], given, aliases))
        torch.testing.assert_close(*runs)


scaled = region(lambda x, w, factor=2.0: (x * w).sin() * factor)
outer = region(lambda x, w: scaled(scaled(x, w), w) + x)
same = region(lambda x, w: (x, x.view(-1), x * w))


def in_mode(mode):
    def program(x, w):
        with mode():
            a = scaled(scaled(x, w), w)
        return scaled(scaled(a + x, w), w), a

    return program


def other_shapes(x, w):
    b = scaled(scaled(x, w), w)
    return scaled(scaled(b[:2], w[0]), w[0]), b


def other_constants(x, w):
    a = scaled(scaled(x, w), w)
    return scaled(scaled(a, w, 3.0), w, 3.0), scaled(a, w, 4.0)


@region
def written(x, w):
    x = x.clone()
    x.mul_(w)
    return x, x[0], x.t()


def views_and_writes(x, w):
    a, first, turned = written(x, w)
    b, again, _ = written(a, w)
    again += 1
    return b, first, turned, again, a


def writes_an_argument(x, w):
    y = x * 1
    for _ in range(2):
        region(lambda y: y.mul_(w))(y)
    return y, y.sin()


def writes_between(x, w):
    before = scaled(x, w).exp()
    a = scaled(before, w)
    a += before
    return scaled(a, w), a


@region
def recursive(x, w, depth):
    return scaled(x, w) if depth == 0 else recursive(x * w, w, depth - 1)


def hooked(x, w):
    a = scaled(x, w)
    a.register_hook(lambda grad: grad * 3)
    return scaled(a, w), scaled(a, w)


def differentiated(x, w):
    a = scaled(scaled(x, w), w)
    return a, torch.autograd.grad(a.sum(), w, create_graph=True)[0]


def checkpointed(x, w):
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(scaled, x, w, use_reentrant=False)
    return x, torch.utils.checkpoint.checkpoint(other_shapes, x, w, use_reentrant=False)[0]


def detached(x, w):
    a = scaled(x, w).detach()
    b = scaled(a.data, w)
    b.data.mul_(2)
    return scaled(b, w), a


@region
def without_gradients(x, w):
    with torch.no_grad():
        y = x * w
    return F.dropout(y + x, 0.5)


@region
def broken(x, w):
    x = x * w
    weft.graph_break()
    return x.sin()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


doubled = region(lambda x, w: Double.apply(x) * w)
PROGRAMS = {
    "other shapes": (other_shapes, 4, 2),
    "other constants": (other_constants, 4, 2),
    "a grad mode": (in_mode(torch.no_grad), 2, 1),
    "autocast": (in_mode(lambda: torch.autocast("cpu", torch.bfloat16)), 2, 1),
    "views and writes": (views_and_writes, 0, 0),
    "an argument written": (writes_an_argument, 0, 0),
    "writes between": (writes_between, 0, 0),
    "nested": (lambda x, w: (outer(outer(x, w), w), scaled(x, w)), 2, 1),
    "recursion": (lambda x, w: [recursive(x + n, w, n % 3) for n in (2, 5, 0)], 2, 1),
    "an argument returned": (lambda x, w: (*same(x, w), *same(x * w, w)), 2, 1),
    "hook": (hooked, 0, 0),
    "gradient inside": (differentiated, 0, 0),
    "vmap": (lambda x, w: (torch.vmap(lambda x: scaled(scaled(x, w), w))(x),), 0, 0),
    "checkpoints": (checkpointed, 2, 1),
    "detached": (detached, 0, 0),
    "modes inside": (lambda x, w: (without_gradients(without_gradients(x, w), w), x * w), 2, 1),
    "breaks": (lambda x, w: (broken(broken(x, w), w), scaled(scaled(x, w), w)), 2, 1),
    "own backwards": (lambda x, w: (doubled(doubled(x, w), w), x * w), 2, 1),
}


@pytest.mark.every(3)
@pytest.mark.sampled
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_eager(name, backend):
    program, *expected = PROGRAMS[name]
    x, w = (torch.randn(4, 4, dtype=torch.double, requires_grad=True) for _ in "xw")
    check(program, backend, x, w)
    assert counted() == tuple(expected)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="has no such argument")
def test_no_more_kinds_than_asked_for(backend):
    limited = region(lambda x, n: x.sin() * n, max_reuse_entries=2)

    def program(x):
        for n in range(1, 5):
            x = limited(limited(x, n), n)
        return (x,)

    check(program, backend, torch.randn(3, requires_grad=True))
    assert counted() == (4, 2)


def test_tensors_in_one_memory_stay_in_one_graph(backend):
    x, memory, call = torch.randn(2), torch.randn(8), region(lambda x, p: p.mul_(x.sin()) + 1)
    views, others = [m.view(4, 2).unbind() for m in (memory, memory.clone())]
    found = weft.compile(lambda x: functools.reduce(call, views, x), backend=backend)(x)
    torch.testing.assert_close((found, views), (functools.reduce(call, others, x), others))
    assert counted() == (0, 0)


@pytest.mark.slow
def test_second_derivatives(backend):
    x = torch.randn(4, 4, dtype=torch.double, requires_grad=True)
    w = torch.randn(4, dtype=torch.double, requires_grad=True)
    found = []
    for function in (other_constants, weft.compile(other_constants, backend=backend)):
        first = torch.autograd.grad(function(x, w)[0].sum(), (x, w), create_graph=True)
        found.append((first, torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))))
    torch.testing.assert_close(*found)
    assert counted() == (4, 2)


@pytest.mark.slow
def test_compiled_autograd_takes_pieces(backend):
    with weft.config.patch(compiled_autograd=True):
        compare(Net(*blocks(3)), [torch.randn(4, 8) for _ in range(3)], backend)
    assert counted() == (3, 1)


def test_other_backends_get_the_whole_graph():
    graphs = []
    compare(Net(*blocks(3)), [torch.randn(4, 8)], lambda gm, _: graphs.append(gm) or gm.forward)
    assert (len(graphs), counted()) == (1, (0, 0))
