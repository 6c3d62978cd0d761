"""Sizes and strides that vary."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recompiles.table import Compile, pattern


@pattern(2)
def batch_sizes(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x: x.view(x.shape[0], -1).softmax(-1))
    return [step(torch.ones(n + 2, 3, 4)) for n in range(calls)]


@pattern(3)
def last_batch_of_a_loader(compile: Compile, calls: int) -> list[Any]:
    model = compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    data = torch.utils.data.TensorDataset(torch.ones(8 * calls + 5, 4))
    return [model(x).shape for (x,) in torch.utils.data.DataLoader(data, batch_size=8)]


@pattern(2)
def slices_of_a_longer_tensor(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x: x.sin() + 1)
    return [step(torch.ones(2, n)[:, -32:]) for n in range(33, 33 + calls)]


@pattern(2)
def slices_that_vary(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, n: x[:n].sum(0) * n)
    x = torch.arange(60.0).view(20, 3)
    return [step(x, n + 2) for n in range(calls)]


@pattern(2)
def transposed_batches(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x: (x + 1).relu())
    return [step(torch.ones(n + 2, 5).t()) for n in range(calls)]


@pattern(2)
def columns_of_tables(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x: x * 2 + x.mean())
    return [step(torch.ones(6, n + 2)[:, 1]) for n in range(calls)]


@pattern(2)
def heads_of_a_cache(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda q, k: F.scaled_dot_product_attention(q, k, k))
    cache = torch.ones(1, 2, 64, 4)
    return [step(torch.ones(1, 2, 1, 4), cache[:, :, : n + 2]) for n in range(calls)]


@pattern(2)
def windows_at_offsets(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x: x.cos().sum())
    x = torch.arange(80.0)
    return [step(x[n : n + 8]) for n in range(calls)]


@pattern(2)
def shapes_compared(compile: Compile, calls: int) -> list[Any]:
    def step(x: Any, h: Any) -> Any:
        assert h.size() == (1, x.size(1), 8)
        assert tuple(h.shape) in [(1, x.size(1), 8), (2, 2, 2)]
        return x.sum() + h.sum()

    compiled = compile(step)
    return [compiled(torch.ones(3, n + 2, 4), torch.ones(1, n + 2, 8)) for n in range(calls)]


def _recurrent(kind: Any, compile: Compile, shapes: Any) -> list[Any]:
    torch.manual_seed(0)
    net = kind(4, 8)
    step = compile(lambda x: net(x)[0])
    return [step(torch.ones(*shape, 4)).detach() for shape in shapes]


@pattern(2)
def lstm_with_varying_batch(compile: Compile, calls: int) -> list[Any]:
    return _recurrent(nn.LSTM, compile, [(3, n + 2) for n in range(calls)])


@pattern(2)
def gru_with_varying_batch(compile: Compile, calls: int) -> list[Any]:
    return _recurrent(nn.GRU, compile, [(3, n + 2) for n in range(calls)])


class Char(nn.Module):
    """A recurrent model that carries its state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(9, 8), nn.GRU(8, 8), nn.Linear(8, 9)

    def forward(self, tokens: Any, state: Any = None) -> Any:
        out, state = self.cell(self.embed(tokens), state)
        return self.head(out), state


@pattern(4)
def recurrent_state_between_calls(compile: Compile, calls: int) -> list[Any]:
    torch.manual_seed(0)
    model, state, seen = compile(Char()), None, []
    for n in range(calls):
        logits, state = model(torch.ones(n + 2, 2, dtype=torch.long), state)
        state = state.detach()
        seen.append(logits.detach())
    return seen


class Block(nn.Module):
    """Attention and an MLP, as nanoGPT has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.size()
        q, k, v = self.qkv(self.norm(x)).split(width, dim=2)
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).contiguous().view(batch, length, width)
        return x + self.mlp(x)


class NanoGPT(nn.Module):
    """nanoGPT in small, with its `generate`."""

    def __init__(self, block_size: int = 8) -> None:
        super().__init__()
        self.block_size = block_size
        self.wte, self.wpe = nn.Embedding(16, 8), nn.Embedding(block_size, 8)
        self.h = nn.ModuleList([Block(8, 2) for _ in range(2)])
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, idx: Any) -> Any:
        device = idx.device
        _, t = idx.size()
        assert t <= self.block_size, f"{t} > {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.head(x[:, [-1], :])

    @torch.no_grad()
    def generate(self, idx: Any, tokens: int) -> Any:
        for _ in range(tokens):
            cond = idx if idx.size(1) <= self.block_size else idx[:, -self.block_size :]
            logits = self(cond)[:, -1, :]
            idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
        return idx


@pattern(3)
def nanogpt_generate(compile: Compile, calls: int) -> list[Any]:
    torch.manual_seed(0)
    model = compile(NanoGPT())
    return [model.generate(torch.ones(1, 2, dtype=torch.long), 2 * calls)]


@pattern(3)
def nanogpt_generate_of_a_batch(compile: Compile, calls: int) -> list[Any]:
    torch.manual_seed(0)
    model = compile(NanoGPT())
    return [model.generate(torch.ones(3, 2, dtype=torch.long), 2 * calls)]


@pattern(3)
def nanogpt_generate_compiled_whole(compile: Compile, calls: int) -> list[Any]:
    torch.manual_seed(0)
    model = NanoGPT()
    step = compile(lambda idx: model(idx)[:, -1].argmax(-1, keepdim=True))
    idx = torch.ones(2, 3, dtype=torch.long)
    with torch.no_grad():
        for _ in range(2 * calls):
            idx = torch.cat((idx, step(idx[:, -8:])), dim=1)
    return [idx]


@pattern(3)
def key_value_cache_that_grows(compile: Compile, calls: int) -> list[Any]:
    def attend(q: Any, cache: Any) -> Any:
        k, v = cache
        k, v = torch.cat((k, q), 2), torch.cat((v, q + 1), 2)
        return F.scaled_dot_product_attention(q, k, v), (k, v)

    step, cache, seen = compile(attend), (torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4)), []
    for _ in range(calls):
        out, cache = step(torch.ones(1, 2, 1, 4), cache)
        seen.append(out)
    return seen


@pattern(3)
def static_cache_at_a_position(compile: Compile, calls: int) -> list[Any]:
    def write(cache: Any, x: Any, position: int) -> Any:
        cache[:, position] = x
        return cache[:, : position + 1].sum(1)

    step, cache = compile(write), torch.zeros(2, 32, 3)
    return [step(cache, torch.ones(2, 3), n) for n in range(calls)]


@pattern(2)
def images_of_sizes(compile: Compile, calls: int) -> list[Any]:
    torch.manual_seed(0)
    net = compile(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)))
    return [net(torch.ones(1, 3, 8 + 2 * n, 10 + 2 * n)).detach() for n in range(calls)]


@pattern(2)
def channels_last_of_sizes(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x: (x * 2).relu())
    shape = torch.channels_last
    return [step(torch.ones(2, 3, 5 + n, 6 + n).to(memory_format=shape)) for n in range(calls)]


@pattern(3)
def training_steps_of_batch_sizes(compile: Compile, calls: int) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    @compile
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    sizes = [16, 16, *(9 + n for n in range(calls))]
    losses = [step(torch.ones(n, 4), torch.arange(n) % 3) for n in sizes]
    return [*losses, *(p.detach() for p in net.parameters())]


@pattern(2)
def tensors_of_lengths(compile: Compile, calls: int) -> list[Any]:
    step = compile(lambda x, lengths: x * torch.tensor(lengths).float() + max(lengths))
    return [step(torch.ones(3), [n + 2, n + 3, 7]) for n in range(calls)]
