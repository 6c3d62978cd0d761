"""Whole graphs through lowering and scheduling, for Triton as the target of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from weft_codegen.compile import make_program
from weft_codegen.loops.program import Program

GRAPHS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "gelu_layer_norm": (
        lambda x, w, b: F.layer_norm(F.gelu(x), (100,), w, b),
        [(33, 100), (100,), (100,)],
    ),
    "softmax": (lambda x: torch.softmax(x, -1), [(8, 4, 70)]),
    "log_softmax_columns": (lambda x: torch.log_softmax(x, 0), [(37, 50)]),
    "full_sum": (lambda x: x.exp().sum(), [(300, 130)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True).relu(),
        [(4, 5, 7, 7), (5,), (5,)],
    ),
    "transpose": (lambda x, y: x.t() + y, [(30, 40), (40, 30)]),
    "concatenate": (lambda x, y: torch.cat([x, y], 1).relu(), [(30, 40), (30, 20)]),
    "matmul_epilogue": (lambda x, y: F.silu(x @ y) + 1, [(30, 40), (40, 20)]),
    "rms_norm": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
        [(10, 64), (64,)],
    ),
    "elementary": (lambda x: x.erf() + x.tanh() + x.abs().log1p(), [(30, 40)]),
}


def program(name: str) -> tuple[Program, list[torch.Tensor], Callable[..., Any]]:
    """The scheduled program of a graph, inputs for it, and what eager computes."""
    function, shapes = GRAPHS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    graph = fx.Graph()
    arguments = tuple(graph.placeholder(f"a{i}") for i in range(len(inputs)))
    graph.output((graph.call_function(function, arguments),))
    return make_program(fx.GraphModule({}, graph), inputs), inputs, function
