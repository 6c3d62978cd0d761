"""Gradients of gradients: of code that is compiled, and taken within code that is compiled.

Each program computes from `x` and three parameters, differentiates one to three times, and ends
with one more gradient. All is in float64, as third derivatives have few digits left in float32.
"""

from __future__ import annotations

import random

from .program import Program

_PRELUDE = """\
import weft
from torch.autograd import functional, grad

W, V, U = (
    torch.nn.Parameter(tensor(shape, "float64", seed=seed) * 0.5)
    for seed, shape in enumerate([(4, 4), (4,), (4, 4)])
)


def differentiable(tensors):
    return [t for t in tensors if t is not None and t.requires_grad]


def total(tensors):
    result = 0.0
    for t in differentiable(tensors):
        weights = torch.arange(1, t.numel() + 1, dtype=torch.float64).view(t.shape)
        result = result + (t * weights * 0.1).sum()
    return result


def values(tensors):
    # Gradients that cancel leave only rounding errors, of any sign: next to 1 these are lost.
    return [None if t is None else t.detach().contiguous() + 1 for t in tensors]


"""
_OPERATORS = (
    *("torch.tanh({h})", "torch.sin({h})", "torch.exp({h} * 0.5)", "{h} * {h}", "F.softplus({h})"),
    *("F.gelu({h})", "{h}.softmax(-1)", "F.layer_norm({h}, {h}.shape[-1:])", "torch.sigmoid({h})"),
    *("{h} / (1 + {h}.square().sum())", "{h}.cumsum(-1)", "{h} - {h}.mean(-1, keepdim=True)"),
    *("{h}.flip(-1)", "torch.where({h} > 0, {h}, {h} * {h})", "{h}.detach() * {h}"),
    *("{h}.clone().mul_(2)", "{h}.relu() * {h}", "{h}.sgn() * {h}", "{h}.norm() * {h}"),
    *("({h}.abs() + 0.1).sqrt()", "{h}.logsumexp(-1, keepdim=True) + {h}"),
)
_WITH_PARAMETERS = (
    *("{h} @ W", "{h} + V", "({h} @ U).t()", "{h} + {old}"),
    "F.conv1d({h}.unsqueeze(1), W[:1, None, :3], padding=1).squeeze(1)",
)
# What makes the next `ts` of `ts`; `ins` is what is differentiated by.
_STEPS = (
    "grad(total(ts), ins, allow_unused=True, create_graph=True)",
    "grad(total(ts), ins, allow_unused=True, create_graph=True, retain_graph=True)",
    "grad(total(ts), ins, create_graph=True, materialize_grads=True)",
    "grad(ts, ins, [t.detach().cos().requires_grad_() for t in ts], allow_unused=True, "
    "create_graph=True)",
    "grad(ts[0], ins, torch.eye(ts[0].numel(), dtype=torch.float64)[:5].unflatten("
    "1, ts[0].shape or (1,)).reshape(-1, *ts[0].shape), is_grads_batched=True, allow_unused=True, "
    "create_graph=True)",
)
_ENDS = (
    ("seen += grad(total(ts), [x, W, V, U], allow_unused=True)",),
    ("total(ts).backward()", "seen += [x.grad, W.grad, V.grad, U.grad]"),
    ("end = total(ts)", "end.backward(retain_graph=True)", "end.backward()",
     "seen += [x.grad, W.grad, V.grad, U.grad]"),
    ("total(ts).backward(inputs=[W, x])", "seen += [x.grad, W.grad, V.grad, U.grad]"),
)  # fmt: skip
_TRANSFORMS = (
    "[torch.func.jacrev(first)(x)]",
    "[torch.func.hessian(lambda t: first(t).sum())(x)]",
    "[torch.vmap(torch.func.grad(lambda t: first(t[None].expand(4, 4)).sum()))(x)]",
    "[torch.func.vjp(first, x)[1](torch.ones_like(x))[0]]",
    "grad(functional.jacobian(first, x, create_graph=True, vectorize=True).square().sum(), "
    "[x, W, V, U], allow_unused=True)",
    "grad(functional.hessian(lambda t: first(t).square().sum(), x, create_graph=True).square()"
    ".sum(), [x, W, V, U], allow_unused=True)",
    "functional.vjp(first, x, torch.ones_like(x))",
    "functional.hvp(lambda t: first(t).sum(), x, torch.ones_like(x))",
)
# The last result makes no other: a hook on one that does sees less than in eager. One that is not
# reached may be called with None (differences.md).
_HOOKS = (
    "x.register_hook(lambda g: g * 1.5)",
    "ts[-1].register_hook(lambda g: None if g is None else g.clamp(-1, 1))",
)


def generate(seed: int) -> Program:
    """A program of this seed."""
    choose = random.Random(f"gradients {seed}")
    forward = _forward(choose)
    if choose.random() < 0.2:
        return _program(forward + _transformed(choose))
    steps, inside = _steps(choose), choose.random() < 0.6
    if inside:
        body = ["def f(x):", "    ts = list(forward(x))", *steps]
    else:
        body = _outside(steps, compiled_autograd=choose.random() < 0.4)
    return _program([*forward, *body])


def _program(lines: list[str]) -> Program:
    calls = (
        f"for p in (W, V, U):\n    p.grad = None\n"
        f"(tensor((4, 4), 'float64', seed={seed}, grad=True),)"
        for seed in (10, 11)
    )
    return Program(_PRELUDE + "\n".join(lines) + "\n", tuple(calls))


def _forward(choose: random.Random) -> list[str]:
    lines, names = ["def forward(x):"], ["x"]
    for number in range(choose.randint(1, 6)):
        operators = _OPERATORS if choose.random() < 0.4 else _WITH_PARAMETERS
        text = choose.choice(operators).format(h=names[-1], old=choose.choice(names))
        names.append(f"h{number}")
        lines.append(f"    {names[-1]} = {text}")
    results = [names[-1], f"{names[-1]}.sum(0)", f"{choose.choice(names)}.sin()"]
    results = results[: choose.randint(1, 3)]
    return [*lines, f"    return ({', '.join(results)},)", "", ""]


def _transformed(choose: random.Random) -> list[str]:
    return [
        "def first(x):",
        "    return forward(x)[0]",
        "",
        "",
        "def f(x):",
        f"    return values({choose.choice(_TRANSFORMS)})",
    ]


def _steps(choose: random.Random) -> list[str]:
    """The lines from the results of the forward pass, `ts`, to what is returned."""
    lines = [f"ins = {choose.choice(['[x]', '[W, V, U]', '[x, W, V, U]'])}"]
    if choose.random() < 0.4:
        lines += [choose.choice(_HOOKS)]
        lines[-1] = f"if ts[-1].requires_grad:\n        {lines[-1]}"
    lines.append("seen = values(ts)")
    for _ in range(choose.randint(1, 3)):
        lines += ["ts = differentiable(ts)", "if not ts:\n        return values(seen)"]
        lines += [f"ts = list({choose.choice(_STEPS)})", "seen += values(ts)"]
    lines += ["if not differentiable(ts):\n        return values(seen)"]
    lines += choose.choice(_ENDS)
    return [f"    {line}" for line in [*lines, "return values(seen)"]]


def _outside(steps: list[str], compiled_autograd: bool) -> list[str]:
    """Only the forward pass is compiled; its gradients are taken in code that is not."""
    config = f"    with weft.config.patch(compiled_autograd={compiled_autograd}):"
    return [
        *("def differentiate(x, ts):", *steps, "", ""),
        *("@weft.disable", "def outside(x, ts):", config, "        return differentiate(x, ts)"),
        *("", "", "def f(x):", "    return outside(x, list(forward(x)))"),
    ]
