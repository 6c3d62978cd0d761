"""Random modules and training steps: parameters, buffers, gradients and losses of several steps.

A module is a chain of layers over a vector, a sequence or an image; a step is compiled as a whole,
up to its backward pass, or in its forward pass alone. All is computed in float64 and compared in
float32, as optimizers enlarge roundings. Between calls the batch, the mode, what is trained, the
learning rate or the state change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from .program import Program

_PRELUDE = """\
import copy

import torch.nn as nn
import weft
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Watched(dict):
    # The state when it is looked at, an argument that the function does not touch.
    def items(self):
        for name, p in model.named_parameters():
            yield name, (p.detach() + 1).float()
            # What cancels leaves rounding errors only: beside 1 and 1e-4 these are lost.
            yield f"{name}.grad", None if p.grad is None else (p.grad + 1e-4).float()
        for name, b in model.named_buffers():
            yield name, (b + 1).float() if b.is_floating_point() else b.clone()


watched = Watched()
"""

_ACTIVATIONS = ("ReLU()", "GELU()", "Tanh()", "SiLU()", "LeakyReLU(0.1)", "Softplus()", "ELU()",
                "PReLU()", "Hardswish()", "Sigmoid()", "ReLU(inplace=True)", "Mish()")  # fmt: skip

# Kind of input: rows of (how the layer is made, how it is called, kind of result, its width).
# `c` is the width now, `d` another one; `{l}` is the layer.
_LAYERS = {
    "vector": (
        ("nn.Linear({c}, {d})", "{l}(h)", "vector", "{d}"),
        ("nn.Linear({c}, {d}, bias=False)", "{l}(h)", "vector", "{d}"),
        ("nn.Sequential(nn.Linear({c}, {d}), nn.{act}, nn.Linear({d}, {c}))", "h + {l}(h)"),
        ("nn.BatchNorm1d({c})", "{l}(h)"),
        ("nn.BatchNorm1d({c}, momentum=None, affine=False)", "{l}(h)"),
        ("nn.LayerNorm({c})", "{l}(h)"),
        ("nn.Dropout(0.3)", "{l}(h)"),
        ("nn.AlphaDropout(0.2)", "{l}(h)"),
        ("nn.Bilinear({c}, {c}, {d})", "{l}(h, h)", "vector", "{d}"),
        ("nn.GRUCell({c}, {d})", "{l}(h)", "vector", "{d}"),
        ("nn.LSTMCell({c}, {d})", "{l}(h)[0]", "vector", "{d}"),
        ("parametrizations.weight_norm(nn.Linear({c}, {d}))", "{l}(h)", "vector", "{d}"),
        ("parametrizations.spectral_norm(nn.Linear({c}, {d}))", "{l}(h)", "vector", "{d}"),
        ("nn.Linear({c}, {c})", "F.linear({l}(h), {l}.weight.t())"),
        ("nn.Linear({c}, {c})", "{l}({l}(h).tanh())"),
        ("nn.ModuleList(nn.Linear({c}, {c}) for _ in range(3))",
         "sum(one(h) for one in {l}) / len({l})"),
        ("nn.ModuleDict({{'a': nn.Linear({c}, {c}), 'b': nn.{act}}})", "{l}['b']({l}['a'](h))"),
        ("nn.Sequential(nn.Linear({c}, {c}), nn.{act}, nn.Dropout(0.2))",
         "checkpoint({l}, h, use_reentrant=False)"),
        ("nn.ParameterList([torch.ones({c}), torch.zeros({c})])", "h * {l}[0] + {l}[1]"),
        ("nn.Buffer(torch.zeros({c}))",
         "h - {l}.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)"),
        ("nn.Buffer(torch.zeros((), dtype=torch.int64))", "h * (1 + {l}.add_(1) % 2)"),
        ("nn.{act}", "Doubled.apply({l}(h))"),
        ("nn.Unflatten(1, (2, {c} // 2))", "{l}(h)", "sequence", "{c} // 2"),
    ),
    "sequence": (
        ("nn.Linear({c}, {d})", "{l}(h)", "sequence", "{d}"),
        ("nn.LayerNorm({c})", "{l}(h)"),
        ("nn.RMSNorm({c})", "{l}(h)"),
        ("nn.MultiheadAttention({c}, 2, batch_first=True)", "h + {l}(h, h, h)[0]"),
        ("nn.MultiheadAttention({c}, 1, dropout=0.1, batch_first=True)",
         "{l}(h, h, h, need_weights=False)[0]"),
        ("nn.TransformerEncoderLayer({c}, 2, {d}, batch_first=True, dropout=0.1)", "{l}(h)"),
        ("nn.GRU({c}, {d}, batch_first=True)", "{l}(h)[0]", "sequence", "{d}"),
        ("nn.LSTM({c}, {d}, 2, batch_first=True, dropout=0.2)", "{l}(h)[0]", "sequence", "{d}"),
        ("nn.RNN({c}, {c} // 2, batch_first=True, bidirectional=True)", "{l}(h)[0]"),
        ("nn.Conv1d({c}, {d}, 3, padding=1)", "{l}(h.transpose(1, 2)).transpose(1, 2)",
         "sequence", "{d}"),
        ("nn.Parameter(torch.ones(1, 1, {c}))", "h + {l}"),
        ("nn.Dropout(0.2)", "{l}(h)"),
        ("nn.AdaptiveAvgPool1d(2)", "{l}(h.transpose(1, 2)).flatten(1)", "vector", "2 * {c}"),
        ("nn.{act}", "{l}(h).mean(1)", "vector", "{c}"),
        ("nn.{act}", "{l}(h[:, -1])", "vector", "{c}"),
    ),
    "image": (
        ("nn.Conv2d({c}, {d}, 3, padding=1)", "{l}(h)", "image", "{d}"),
        ("nn.Conv2d({c}, {c}, 3, padding=1, groups={c}, bias=False)", "{l}(h)"),
        ("nn.Conv2d({c}, {d}, 3, stride=2, padding=1, padding_mode='reflect')", "{l}(h)",
         "image", "{d}"),
        ("nn.ConvTranspose2d({c}, {d}, 3, padding=1)", "{l}(h)", "image", "{d}"),
        ("parametrizations.weight_norm(nn.Conv2d({c}, {d}, 1))", "{l}(h)", "image", "{d}"),
        ("nn.Sequential(nn.Conv2d({c}, {c}, 3, padding=1), nn.BatchNorm2d({c}), nn.{act})",
         "h + {l}(h)"),
        ("nn.BatchNorm2d({c})", "{l}(h)"),
        ("nn.GroupNorm(2, {c})", "{l}(h)"),
        ("nn.InstanceNorm2d({c}, affine=True, track_running_stats=True)", "{l}(h)"),
        ("nn.MaxPool2d(3, 1, 1)", "{l}(h)"),
        ("nn.AvgPool2d(2, ceil_mode=True)", "{l}(h)"),
        ("nn.Upsample(scale_factor=2, mode='bilinear')", "{l}(h)"),
        ("nn.Dropout2d(0.2)", "{l}(h)"),
        ("nn.LocalResponseNorm(2)", "{l}(h)"),
        ("nn.Conv2d({c}, {d}, 1)", "checkpoint({l}, h, use_reentrant=False)", "image", "{d}"),
        ("nn.{act}", "{l}(h.contiguous(memory_format=torch.channels_last))"),
        ("nn.AdaptiveAvgPool2d(2)", "{l}(h).flatten(1)", "vector", "4 * {c}"),
        ("nn.AdaptiveMaxPool2d((2, 3))", "{l}(h).flatten(2).transpose(1, 2)", "sequence", "{c}"),
        ("nn.{act}", "{l}(h).mean((2, 3))", "vector", "{c}"),
    ),
}  # fmt: skip
_TO_VECTOR = {"vector": "h", "sequence": "h.mean(1)", "image": "h.amax((2, 3))"}

# Kind of input: how it is made, the first layer, kind and width after it.
_INPUTS = (
    ("tensor(({n}, 6), 'float64', seed={s})", "nn.Linear(6, {d})", "vector"),
    ("tensor(({n}, 5, 6), 'float64', seed={s})", "nn.Linear(6, {d})", "sequence"),
    ("tensor(({n}, 3, 6, 5), 'float64', seed={s})", "nn.Conv2d(3, {d}, 3)", "image"),
    ("tensor(({n}, 3, 4, 4), 'float64', seed={s}, layout='channels_last')",
     "nn.Conv2d(3, {d}, 3, padding=1)", "image"),
    ("indices(({n}, 5), 10, seed={s})", "nn.Embedding(10, {d}, padding_idx=0)", "sequence"),
    ("indices(({n}, 5), 10, seed={s})", "nn.EmbeddingBag(10, {d}, mode='mean')", "vector"),
)  # fmt: skip
_LOSSES = (
    "F.cross_entropy({o}, y)", "F.cross_entropy({o}, y, label_smoothing=0.1)",
    "F.nll_loss({o}.log_softmax(-1), y)", "F.mse_loss({o}, F.one_hot(y, 4).double())",
    "F.binary_cross_entropy_with_logits({o}, F.one_hot(y, 4).double())",
    "F.smooth_l1_loss({o}, F.one_hot(y, 4).double())", "{o}.square().mean()",
    "F.multi_margin_loss({o}, y)", "({o}.softmax(-1).gather(1, y[:, None]) - 1).abs().mean()",
    "F.cross_entropy({o}, y) + 1e-2 * sum(p.square().sum() for p in model.parameters())",
)  # fmt: skip
_OPTIMIZERS = (
    "SGD({p}, 0.1)", "SGD({p}, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)",
    "Adam({p}, 1e-2)", "AdamW({p}, 1e-2, amsgrad=True)", "RMSprop({p}, 1e-2, momentum=0.5)",
    "Adagrad({p}, 0.05)", "Adadelta({p})", "NAdam({p}, 1e-2)", "RAdam({p}, 1e-2)",
    "Adamax({p}, 1e-2)", "ASGD({p}, 0.05)", "SGD({p}, 0.1, foreach=True, maximize=True)",
    "Adam({p}, 1e-2, capturable=False, foreach=False, weight_decay=1e-2)",
)  # fmt: skip
_CLIPS = ("nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
          "nn.utils.clip_grad_value_(model.parameters(), 0.05)")  # fmt: skip
_BETWEEN = (
    "model.eval()", "model.train()", "model.first.requires_grad_(False)",
    "model.first.requires_grad_(True)", "model.load_state_dict(kept)",
    "kept = copy.deepcopy(model.state_dict())", "model.head.bias.data.mul_(0.5)",
    "optimizer.param_groups[0]['lr'] *= 0.5", "optimizer.zero_grad()",
    "optimizer.load_state_dict(optimizer.state_dict())", "model.head.bias.grad = None",
)  # fmt: skip


@dataclass
class _Net:
    """The lines of `__init__` and `forward` as layers are added."""

    choose: random.Random
    made: list[str] = field(default_factory=list)
    called: list[str] = field(default_factory=list)

    def add(self, kind: str, width: int) -> tuple[str, int]:
        """Add a layer; return the kind and width of its result."""
        other, name = self.choose.choice((4, 6, 8)), f"l{len(self.made)}"
        row = self.choose.choice(_LAYERS[kind])
        made, called, *rest = row
        words = {"c": width, "d": other, "act": self.choose.choice(_ACTIVATIONS)}
        self.made.append(f"self.{name} = {made.format(**words)}")
        self.called.append(f"h = {called.format(l=f'self.{name}', **words)}")
        if not rest:
            return kind, width
        return rest[0], eval(rest[1].format(**words))


def generate(seed: int) -> Program:
    """A program of this seed."""
    choose = random.Random(f"modules {seed}")
    given, first, kind = choose.choice(_INPUTS)
    width, net = choose.choice((4, 6, 8)), _Net(choose)
    first = first.format(d=width)
    for _ in range(choose.randint(1, 5)):
        kind, width = net.add(kind, width)
    tied = choose.random() < 0.2 and kind == "vector" and width == 4
    head = f"nn.Linear({width}, 4)"
    lines = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in [f"self.first = {first}", *net.made]),
        f"        self.head = {head}",
        *(["        self.tied = self.head.weight"] if tied else []),
        *("", "    def forward(self, x):", "        h = self.first(x)"),
        *(f"        {line}" for line in [*net.called, f"h = {_TO_VECTOR[kind]}"]),
        "        return self.head(h)" + (" @ self.tied" if tied else ""),
        "",
    ]
    if choose.random() < 0.15:
        what = "'weight', Symmetric()" if width == 4 else "'bias', nn.Identity()"
        line = f"parametrize.register_parametrization(self.head, {what})"
        lines.insert(lines.index(""), f"        {line}")
    optimizer = choose.choice(_OPTIMIZERS).format(p="model.parameters()")
    lines += [
        *("torch.manual_seed(1)", "model = Net().double()"),
        f"optimizer = torch.optim.{optimizer}",
        *("kept = copy.deepcopy(model.state_dict())", "", ""),
        *_step(choose),
    ]
    sizes = choose.choice(((4, 4, 4), (4, 6, 4), (4, 5, 6, 2), (3, 3)))
    calls = []
    for number, size in enumerate(sizes):
        between = [choose.choice(_BETWEEN)] if number and choose.random() < 0.6 else []
        x = given.format(n=size, s=number)
        calls.append("\n".join([*between, f"({x}, indices(({size},), 4, seed={number}), watched)"]))
    dynamic = choose.choice((None, None, None, True, False))
    return Program(_PRELUDE + "\n\n" + "\n".join(lines) + "\n", tuple(calls), dynamic=dynamic)


def _step(choose: random.Random) -> list[str]:
    """The function: what of a training step is compiled."""
    loss = choose.choice(_LOSSES).format(o="model(x)")
    update = ["optimizer.step()"]
    if choose.random() < 0.3:
        update.insert(0, choose.choice(_CLIPS))
    zero = f"optimizer.zero_grad({choose.choice(('', 'set_to_none=False'))})"
    backward = ["loss.backward()"]
    if choose.random() < 0.15:
        backward = ["loss.backward(retain_graph=True)", "(loss * 0.5).backward()"]
    if choose.random() < 0.15:
        update = [
            "with torch.no_grad():",
            "    for p in model.parameters():",
            "        if p.grad is not None:",
            "            p -= 0.1 * p.grad",
        ]
    forward, back = [f"loss = {loss}"], [*backward, *update]
    head, result = "def f(x, y, watched):", ["return loss.detach().float()"]
    where = choose.choice(("all", "backward", "forward", "optimizer"))
    if where == "all":
        back = [zero, *back] if choose.random() < 0.5 else [*back, zero]
        return [head, *_indented([*forward, *back, *result])]
    outer = ["@weft.disable", "def outside(loss):"]
    if where == "backward":
        outer += _indented([*update, zero])
        return [*outer, "", "", head, *_indented([*forward, *backward, "outside(loss)", *result])]
    if where == "forward":
        outer += _indented([zero, *back])
        return [*outer, "", "", head, *_indented([*forward, "outside(loss)", *result])]
    before = ["@weft.disable", "def before(x, y):"]
    before += _indented([zero, *forward, *backward, "return loss"])
    return [*before, "", "", head, *_indented(["loss = before(x, y)", *update, *result])]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
