"""Programs of views, writes in place, `out=`, layouts changed in place and results that alias.

A program grows statement by statement; each is run at once on the arguments of the first call, and
is dropped if it raises. What owns the memory of the arguments is an argument itself that the
function does not touch, so that all of the memory is compared afterwards.
"""

import contextlib
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .inputs import Makers
from .program import Call, Program

# Each makes an argument of 60 floats `m`; `n` is 1 to 6.
_ARGUMENTS = (
    "m[:2 * {n}].view({n}, 2)",
    "m[5:5 + 2 * {n}].view({n}, 2)",
    "m[4:4 + 3 * {n}].view(3, {n}).t()",
    "m[7:7 + {n}]",
    "m[:60].view(6, 10)[:{n}, 2:5]",
    "m[:60].view(6, 10)[1::2, :{n}]",
    "m[40:40 + {n}].expand(2, {n})",
    "m[11]",
    "m[20:20 + {n}].unsqueeze(0)",
    "m[30:30 + 2 * {n}].view(2, {n}, 1)",
    "m[12:12 + 4 * {n}].view({n}, 2, 2).transpose(0, 2)",
    "m[18:18 + {n}].view({n}, 1)",
)  # fmt: skip

_VIEWS = (
    "{x}.t()", "{x}.transpose(0, -1)", "{x}[1:]", "{x}[::2]", "{x}[..., 0]", "{x}[..., 1:]",
    "{x}[0]", "{x}[-1]", "{x}.view(-1)", "{x}.reshape(-1)", "{x}.unsqueeze(0)",
    "{x}.unsqueeze(-1)", "{x}.squeeze()", "{x}.squeeze(0)", "{x}.squeeze(-1)",
    "{x}.expand(2, *{x}.shape)", "{x}.flatten()", "{x}.narrow(0, 1, 1)", "{x}.select(-1, 0)",
    "{x}.diagonal()", "{x}.unbind(0)[0]", "{x}.chunk(2)[-1]", "{x}.split(1)[0]",
    "{x}.permute(*range({x}.dim())[::-1])", "{x}.detach()", "{x}.view_as({x})",
    "{x}.unfold(0, 2, 2)", "{x}.unfold(-1, 2, 1)", "{x}.as_strided((2,), (1,))",
    "{x}.movedim(0, -1)", "{x}.unflatten(0, (-1, 1))", "{x}.mT", "{x}[None]", "{x}[:]",
    "{x}.contiguous()", "{x}.to(torch.float32)", "{x}.view({x}.shape)", "{x}.real",
    "{x}.data", "{x}.swapaxes(0, 1)", "{x}.tensor_split(2)[1]", "{x}.view(2, -1)",
    "{x}.broadcast_to({x}.shape)", "torch.atleast_2d({x})", "{x}.view(torch.int32)",
    "F.dropout({x}, 0.5, False)", "{x}.reshape({x}.shape)", "{x}.requires_grad_({x}.requires_grad)",
)  # fmt: skip

_NEW = (
    "{x} + 1", "{x} * {y}", "{x}.clone()", "{x}.sum(0)", "torch.zeros({x}.shape)", "{x}.sin()",
    "torch.empty_like({x}).copy_({x})", "torch.cat([{x}, {x}])", "{x} - {y}", "{x}.mean()",
    "torch.stack([{x}, {x}])", "{x}.new_zeros({x}.shape)", "torch.where({x} > 0, {x}, {y})",
    "{x}.clone(memory_format=torch.contiguous_format)", "torch.ones_like({x})", "{x}.repeat(2, 1)",
)  # fmt: skip

_WRITES = (
    "{x}.mul_(2)", "{x}.add_({y})", "{x}.zero_()", "{x}.fill_(3)", "{x}.copy_({y})",
    "{x}[0] = {y}", "{x}[0] = 5", "{x}[..., 0] += 1", "{x} += 1", "{x} *= {y}",
    "{x}.clamp_(-1, 1)", "{x}.sin_()", "{x}.cumsum_(0)", "{x}.masked_fill_({x} > 0, 0.5)",
    "{x}.index_fill_(0, torch.tensor([0]), 2)", "{x}.neg_()", "{x}.sub_({x}.t())",
    "F.relu({x}, inplace=True)", "torch.sin({y}, out={x})", "torch.add({y}, 1, out={x})",
    "torch.mul({y}, {y}, out={x}[0])", "{x}.data.mul_(2)", "{x}.detach().add_(1)",
    "{x}.index_add_(0, torch.tensor([0]), {y})", "{x}[1:] = {x}[:-1].clone()", "{x}.tanh_()",
    "{x}.t().mul_(3)", "{x}[::2].zero_()", "{x}.view(-1)[0] = 9", "{x}.lerp_({y}, 0.5)",
    "{x}[{x} > 1] = 0", "{x}.addcmul_({y}, {y})", "torch.cumsum({y}, 0, out={x})", "{x}.tril_()",
    "{x}.T.add_(1)", "torch._foreach_add_([{x}, {y} + 0], 1)", "{x}.unsqueeze(0).mul_(2)",
)  # fmt: skip

_SETTINGS = (
    "{x}.set_({y})", "{x}.resize_({y}.shape)", "{x}.resize_(2, 3)", "{x}.data = {y}",
    "{x}.data = {y}.clone()", "{x}.resize_as_({y})", "{x}.set_({y}.untyped_storage())",
    "{x}.detach_()", "{x}.requires_grad_()", "{x}.data.t_()", "{x}.detach().resize_(2)",
    "{x}.copy_(torch.func.vmap(lambda t: t * 2)({x}))",
    "if {x}.requires_grad: {x}.register_hook(lambda grad: grad * 2)",
)  # what few programs do  # fmt: skip

_FUNCTIONS = (
    "Doubled.apply({x})", "Written.apply({x})", "Viewed.apply({x})",
    "checkpoint(lambda t: t * {y}, {x}, use_reentrant=False)",
    "torch.func.vmap(lambda t: t.unsqueeze(0))({x})",
    "torch.func.grad(lambda t: t.mul(2).sin_().sum())({x})",
    "torch.func.functionalize(lambda t: t.clone().view(-1).add_(1))({x})",
    "torch.func.jvp(torch.sin, ({x},), ({y},))[1]",
)  # fmt: skip
_DEFINED = """\
from torch.utils.checkpoint import checkpoint


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 + ctx.saved_tensors[0]


class Written(Doubled):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.mul_(2)


class Viewed(Doubled):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)


"""

_LAYOUTS = (
    "{x}.t_()", "{x}.transpose_(0, -1)", "{x}.squeeze_()", "{x}.squeeze_(0)", "{x}.squeeze_(-1)",
    "{x}.unsqueeze_(0)", "{x}.unsqueeze_(-1)", "{x}.swapaxes_(0, 1)", "{x}.swapdims_(-1, 0)",
)  # fmt: skip

_BLOCKS = ("no_grad", "no_grad", "no_grad", "enable_grad", "inference_mode")


def generate(seed: int) -> Program:
    """A program without gradients."""
    return _grown(random.Random(seed), order=0)


def generate_differentiated(seed: int) -> Program:
    """A program whose arguments may require grad."""
    return _grown(random.Random(seed), order=1)


def _grown(draw: random.Random, order: int) -> Program:
    names = "abc"[: draw.randint(1, 3)]
    together = draw.random() < 0.15  # elements in common, and not memory alone
    forms = [
        (name, draw.choice(_ARGUMENTS), draw.random() < 0.6, 0 if together else 60 * place)
        for place, name in enumerate(names)
    ]
    first = draw.randint(3, 5)
    recorded = order and draw.choice((None, "leaf", "product"))
    sizes = [first, *draw.choices((first, 3, 4, 6, 1, 2), k=draw.randint(0, 2))]
    calls = [_call(forms, size, recorded) for size in sizes]
    lines, results = _statements(draw, names, calls[0])
    source = _DEFINED if any("apply(" in one or "checkpoint" in one for one in lines) else ""
    source += f"def f(m, other, {', '.join(names)}):\n"
    source += "".join(f"    {line}\n" for line in lines)
    source += f"    return {', '.join(results)},\n"
    order = order and draw.choice((1, 1, 2))
    return Program(source, tuple(calls), order=order, dynamic=draw.choice((None, None, True)))


def _call(forms: Iterable[tuple[str, str, bool, int]], size: int, recorded: Any) -> Call:
    lines = ["m = tensor((180,), seed=1)", "other = tensor((180,), seed=2)"]
    if recorded:
        lines[0] = "m = tensor((180,), seed=1, grad=True)"
    arguments = []
    for name, form, shared, start in forms:
        memory = "m" if shared else "other"
        text = form.format(n=size).replace("m[", f"{memory}[{start} : {start + 60}][", 1)
        if recorded and memory == "m":
            text = f"{text}.detach().clone().requires_grad_()" if recorded == "leaf" else text
        if recorded == "product" and memory == "m":
            text = text.replace("m[", "(m * 1)[", 1)
        lines.append(f"{name} = {text}")
        arguments.append(name)
    return "\n".join([*lines, f"(m, other, {', '.join(arguments)})"])


def _statements(draw: random.Random, names: str, call: Call) -> tuple[list[str], list[str]]:
    """Statements that run, and what to return."""
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, **Makers().names()}
    exec(_DEFINED + call[: call.rindex("\n")], space)
    known, lines = list(names), []
    for _ in range(200):
        line, made = _statement(draw, known)
        if not _runs(line, space):
            continue
        lines.append(line)
        if made is not None:
            known.append(made)
        if len(lines) > draw.randint(1, 9):
            break
    return lines, draw.sample(known, k=min(len(known), draw.randint(1, 3)))


def _statement(draw: random.Random, known: list[str]) -> tuple[str, str | None]:
    x, y = draw.choice(known), draw.choice(known)
    kinds: tuple[tuple[str, ...], ...] = (
        *(_VIEWS, _NEW, _WRITES, _LAYOUTS, _FUNCTIONS, _SETTINGS),
    )  # fmt: skip
    (kind,) = draw.choices(kinds, (50, 20, 50, 10, 6, 4))
    text, name = draw.choice(kind).format(x=x, y=y), None
    if kind in (_VIEWS, _NEW, _FUNCTIONS):
        name = f"v{len(known)}"
        text = f"{name} = {text}"
    if not text.startswith("if ") and draw.random() < (0.15 if kind is _WRITES else 0.05):
        text = f"with torch.{draw.choice(_BLOCKS)}(): {text}"
    return text, name


def _runs(line: str, space: dict[str, Any]) -> bool:
    run: Callable[..., Any] = exec
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("error")
        run(line, space)
        return True
    return False
