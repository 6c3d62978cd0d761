"""`use_graph_deduplication`: like calls of modules that nobody marked are compiled once."""

import copy

import pytest
import torch
import torch.nn.functional as F
import weft
from torch import nn
from torch.utils.checkpoint import checkpoint

ON = {"use_graph_deduplication": True}


@pytest.fixture(autouse=True)
def fresh():
    weft.reset()
    weft.counters.clear()


class Block(nn.Module):
    """Enough operations to be worth a call."""

    def __init__(self, eps=1e-5, p=0.0, index=0, act=F.gelu):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8, eps), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop, self.index, self.act = nn.Dropout(p), index, act

    def forward(self, x, cache=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if cache is not None:
            keys, values = cache.get(self.index, (k[:, :0], v[:, :0]))
            cache[self.index] = k, v = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        seen = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        return x + self.drop(self.act(self.out(seen)))


class Net(nn.Module):
    def __init__(self, blocks, call=lambda block, x: block(x)):
        super().__init__()
        self.blocks, self.stem, self.call = nn.ModuleList(blocks), nn.Linear(8, 8), call

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x.sin()


def several(*settings, count=2):
    return [Block(**one) for one in settings for _ in range(count)]


def tied():
    blocks = several({}, count=3)
    blocks[1].out.weight = blocks[2].qkv.bias = None
    blocks[1].out.weight = blocks[0].out.weight
    blocks[2].qkv.bias = blocks[0].qkv.bias
    return Net(blocks)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(*(nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(8, 8)) * 3)

    def forward(self, x):
        return self.inner(x) + x


class Odd(Block):
    """Does what its index says to the tensors that pass between blocks."""

    def forward(self, x, cache=None):
        if self.index == 1:
            weft.graph_break()
        with torch.no_grad():
            scale = x.mean() * self.index
        x = super().forward(x, cache) + scale
        if self.index == 2:
            x += 1
        return x


def hooked():
    model = Net(several({}, count=4))
    model.blocks[1].register_forward_hook(lambda module, args, out: out * 2)
    model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0].cos(),))
    return model


def in_autocast(block, x):
    with torch.autocast("cpu", torch.bfloat16):
        return block(x).to(x.dtype)


def written(block, x):
    y = block(x.clone())
    x += 2
    return y + x


MODELS = {  # what it is, calls that share code, kinds of them
    "alike": (lambda: Net(several({}, count=4)), 4, 1),
    "one block three times": (lambda: Net(several({}, count=1) * 3), 3, 1),
    "two kinds": (lambda: Net(several({}, {"act": F.silu})), 4, 2),
    "eps": (lambda: Net(several({}, {"eps": 1e-2})), 4, 2),
    "dropout": (lambda: Net(several({"p": 0.1}, {"p": 0.5})), 4, 2),
    "none alike": (lambda: Net(several({}, {"eps": 1e-2}, count=1)), 0, 0),
    "index": (lambda: Net([Block(index=i) for i in range(3)]), 3, 1),
    "tied": (tied, 3, 1),
    "buffers": (lambda: Net([Normed() for _ in range(3)]), 3, 1),
    "small": (lambda: Net([nn.Linear(8, 8) for _ in range(4)]), 0, 0),
    "hooks": (hooked, 2, 1),
    "checkpoint": (
        lambda: Net(several({}), lambda b, x: checkpoint(b, x, use_reentrant=False)), 2, 1
    ),
    "autocast": (lambda: Net(several({}, count=2), in_autocast), 0, 0),
    "written between": (lambda: Net(several({}, count=2), written), 0, 0),
    "odd": (lambda: Net([Odd(index=i) for i in (0, 0, 1, 0, 0, 2, 2)]), 2, 1),
    "frozen parts": (lambda: frozen(Net(several({}, count=4))), 4, 2),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 3, None, False
        ), 2, 1,
    ),
}  # fmt: skip


def frozen(model):
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    return model


def train(model, batches):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch.clone()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()], list(model.state_dict().values())


def counted():
    return tuple(weft.counters["regions"][name] for name in ("calls", "compiled"))


@pytest.mark.every(3)
@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_eager(name, backend):
    make, calls, kinds = MODELS[name]
    model = make().double()
    compiled = weft.compile(copy.deepcopy(model), backend=backend, options=ON)
    batches = [torch.randn(2, 3, 8).double() for _ in range(2)]
    torch.testing.assert_close(train(compiled, batches), train(model, batches))
    assert counted() == (calls, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_and_other_sizes(mode):
    model = Net(several({}, count=3)).eval()
    compiled = weft.compile(model, options=ON, fullgraph=True)
    with mode():
        for length in (3, 4, 7):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert counted() == (6, 2)


@pytest.mark.slow
def test_caches_of_keys_and_values():
    blocks = [Block(index=i) for i in range(3)]

    def step(x, cache):
        for block in blocks:
            x = block(x, cache)
        return x

    with torch.no_grad():
        found = []
        for run in (step, weft.compile(step, options=ON)):
            torch.manual_seed(0)
            cache = {}
            found.append(([run(torch.randn(2, n, 8), cache) for n in (4, 1, 1, 1)], cache))
    torch.testing.assert_close(*found)
    assert counted() == (9, 3)


@pytest.mark.slow
def test_the_option_decides_for_its_own_code_alone():
    model, x = Net(several({}, count=3)), torch.randn(2, 3, 8)
    weft.compile(model)(x)
    assert counted() == (0, 0)
    weft.compile(model, options=ON)(x)
    assert counted() == (3, 1)
    weft.compile(model, options={"use_graph_deduplication": False})(x)
    assert counted() == (3, 1)
