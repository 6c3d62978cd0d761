"""Run a function through aot_compile with the graphs as they are, and compare it with eager."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree
from weft_aot import aot_compile


class Graphs:
    """A compiler that runs graphs eagerly and keeps them: [forward, backward] or [inference]."""

    def __init__(self):
        self.modules: list[fx.GraphModule] = []

    def __call__(self, gm, examples):
        gm.graph.lint()
        self.modules.append(gm)
        return gm.forward


def function_graph(fn, count):
    """A graph module with one placeholder per argument and one node that calls `fn`."""
    graph = fx.Graph()
    args = [graph.placeholder(f"a{i}") for i in range(count)]
    graph.output(graph.call_function(fn, tuple(args)))
    return fx.GraphModule({}, graph)


def copy_inputs(args):
    """Fresh leaves (or non-leaves, where the original is none) with the same layout."""
    copies = {}
    for arg in args:
        if isinstance(arg, torch.Tensor) and id(arg) not in copies:
            copy = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype)
            copy.copy_(arg.detach())
            copy.requires_grad_(arg.requires_grad)
            copies[id(arg)] = (copy, copy if arg.is_leaf else copy.clone())
    leaves = [copies[id(a)][0] if isinstance(a, torch.Tensor) else a for a in args]
    return leaves, [copies[id(a)][1] if isinstance(a, torch.Tensor) else a for a in args]


def run(fn, args, use=None):
    """Results, gradients of the leaves, and the arguments after the call."""
    leaves, given = copy_inputs(args)
    torch.manual_seed(0)
    results = pytree.tree_leaves(fn(*given), lambda value: value is None)
    after = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in given]
    wanted = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if wanted and torch.is_grad_enabled():
        total = sum((r * torch.arange(1, r.numel() + 1).view(r.shape)).abs().sum() for r in wanted)
        total.backward()
    grads = [a.grad if isinstance(a, torch.Tensor) and a.is_leaf else None for a in leaves]
    return results, grads, after, given


def check(fn, *args, example=None):
    """Compile `fn` at `example` (default `args`), run at `args`, compare all with eager."""
    graphs = Graphs()
    _, given = copy_inputs(example or args)
    compiled = aot_compile(function_graph(fn, len(args)), given, fw_compiler=graphs)
    ours, eager = run(compiled, args), run(fn, args)
    for mine, theirs in zip(ours[0], eager[0], strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, torch.Tensor):
            assert mine.requires_grad == theirs.requires_grad
            assert mine.stride() == theirs.stride()
    assert aliasing(ours[0], ours[3]) == aliasing(eager[0], eager[3])
    for mine, theirs in zip(ours[:3], eager[:3], strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    return graphs.modules


def aliasing(results, inputs):
    """Which tensors share memory, and which are the same object."""
    tensors = [t for t in [*results, *inputs] if isinstance(t, torch.Tensor)]
    return [
        (i, j, a is b)
        for i, a in enumerate(tensors)
        for j, b in enumerate(tensors[:i])
        if a.untyped_storage()._cdata == b.untyped_storage()._cdata
    ]


__all__ = [
    "Graphs",
    "aliasing",
    "check",
    "copy_inputs",
    "function_graph",
    "run",
]
