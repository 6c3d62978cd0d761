"""Whole graphs through lowering and scheduling, for Triton as the target of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from weft_codegen.compile import decompositions, make_program
from weft_codegen.loops.program import CPU, Program


def _pieces(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.select(-1, k) for k in range(x.shape[-1])], -1)


GRAPHS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "gelu_layer_norm": (
        lambda x, w, b: F.layer_norm(F.gelu(x), (100,), w, b),
        [(33, 100), (100,), (100,)],
    ),
    "softmax": (lambda x: torch.softmax(x, -1), [(8, 4, 70)]),
    "log_softmax_columns": (lambda x: torch.log_softmax(x, 0), [(37, 50)]),
    "row_of_a_concatenation": (lambda x: x.diag_embed(1).amax(-2), [(33, 5)]),
    "columns_of_a_concatenation": (
        lambda x: torch.cat([x, x * 2, x.narrow(1, 0, 3)], 1).mean(0),
        [(9, 8)],
    ),
    "few_columns": (
        lambda x, y: torch.stack([x.sum(0), (x * y).sum(0), x.amax(0), x.argmax(0).float()]),
        [(100, 40), (100, 40)],
    ),
    "few_columns_of_many_rows": (lambda x: x.sum((0, 1)), [(40, 32, 33)]),
    "gradient_of_pieces": (
        lambda x, g: torch.where(x.repeat(2, 1, 1) < 0, _pieces(g), 0).view(2, 7, 5, 3).sum(0),
        [(7, 5, 3), (14, 5, 3)],
    ),
    "stacked_deviation": (
        lambda x: torch.stack([x, x], -1).flatten().std(0, unbiased=False),
        [(33, 15)],
    ),
    "padded_sums": (lambda x: F.pad(x, (1, 2, 3, 1)).sum(-1), [(5, 7)]),
    "full_sum": (lambda x: x.exp().sum(), [(300, 130)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True).relu(),
        [(4, 5, 7, 7), (5,), (5,)],
    ),
    "batch_norm_of_channels_last": (
        lambda x, w, b: F.batch_norm(x.permute(0, 3, 1, 2), None, None, w, b, True).relu(),
        [(32, 13, 12, 40), (40,), (40,)],
    ),
    "group_norm_of_channels_last": (
        lambda x: torch.var_mean(x.permute(0, 3, 1, 2).unflatten(1, (16, 4)), (2, 3, 4)),
        [(2, 24, 24, 64)],
    ),
    "transpose": (lambda x, y: x.t() + y, [(30, 40), (40, 30)]),
    "transpose_in_tiles": (lambda x, y: x.t() + y, [(64, 96), (96, 64)]),
    "transpose_past_tiles": (lambda x, y: x.t() + y, [(70, 96), (96, 70)]),
    "column_sums": (lambda x: x.sum(0), [(270, 150)]),
    "column_sums_in_stages": (lambda x: (x * 2).sum(0), [(512, 80)]),
    "column_sums_in_uneven_stages": (lambda x: x.exp().amax(0), [(521, 80)]),
    "full_sum_in_uneven_stages": (lambda x: (x + 1).prod(), [(131, 509)]),
    "softmax_over_two": (lambda x: torch.softmax(x.flatten(1), -1).view_as(x), [(6, 5, 7)]),
    "softmax_of_columns": (lambda x: torch.softmax(x, 1), [(3, 5, 70)]),
    "concatenate": (lambda x, y: torch.cat([x, y], 1).relu(), [(30, 40), (30, 20)]),
    "matmul_epilogue": (lambda x, y: F.silu(x @ y) + 1, [(30, 40), (40, 20)]),
    "row_by_columns": (
        lambda x, g, u, b: F.silu(F.linear(x, g)) * F.linear(x, u, b),
        [(1, 130), (513, 130), (513, 130), (513,)],
    ),
    "lookup": (lambda i, w: F.embedding((i.abs() * 3).long(), w), [(33,), (40, 24)]),
    "norm_of_lookups": (
        lambda i, w: F.layer_norm(F.embedding((i.abs() * 3).long(), w), (100,)),
        [(3, 11), (40, 100)],
    ),
    "gradient_of_cross_entropy": (
        lambda x, i: torch.ops.aten.nll_loss_backward(
            x.new_ones(()), x, (i.abs() * 9).long(), None, 1, -100, x.new_full((), 70.0)
        ).sum(1),
        [(70, 60), (70,)],
    ),
    "columns_stored_and_summed": (
        lambda x, g: (g * x.sigmoid(), (g * x.sigmoid()).sum(0), x.amax(0)),
        [(150, 140), (150, 140)],
    ),
    "rms_norm": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
        [(10, 64), (64,)],
    ),
    "any_over_strided_rows": (lambda x: (x.narrow(2, 0, 4) > 2).any(), [(7, 5, 9)]),
    "all_over_strided_rows": (lambda x: (x.narrow(2, 0, 4) < 9).all(), [(7, 5, 9)]),
    "largest_bit": (lambda x: (x.narrow(2, 0, 4) > 2).amax((0, 2)), [(7, 5, 9)]),
    "any_in_chunks": (lambda x: (x > 6).any(), [(30, 700)]),
    "product_of_stacked": (lambda x: torch.stack([x, x + 1], -1).prod(), [(7, 3)]),
    "mean_of_concatenated": (lambda x: torch.cat([x, x + 1], 1).mean(), [(7, 3)]),
    "floor_division": (lambda x, y: x * 100 // y + x // x, [(30, 40), (30, 40)]),
    "rounded_division": (
        lambda x, y: torch.div(x, y, rounding_mode="trunc") + x % y + torch.fmod(x, y),
        [(30, 40), (30, 40)],
    ),
    "negative_to_unsigned": (lambda x: (x * 9).to(torch.uint8), [(30, 40)]),
    "elementary": (lambda x: x.erf() + x.tanh() + x.abs().log1p(), [(30, 40)]),
}


# Rows of the example are so many that a program takes several.
SYMBOLIC: dict[str, tuple[Callable[..., Any], tuple[int, int], list[tuple[int, int]]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), (9000, 20), [(37, 20), (7, 300), (41, 3)]),
    "layer_norm": (lambda x: F.layer_norm(F.gelu(x), x.shape[1:]), (9000, 9), [(3, 700), (25, 7)]),
    "gather": (
        lambda x: x.gather(1, x.argmax(1, keepdim=True)) * x.amin(1, keepdim=True),
        (9000, 30),
        [(26, 30), (49, 70)],
    ),
    "concatenation": (
        lambda x: torch.cat([x, x * 2], 1).softmax(1) * x.amax(1, keepdim=True),
        (9000, 9),
        [(33, 9), (19, 40)],
    ),
    "columns": (lambda x: (x.sum(0), x * 2), (4096, 24), [(496, 24), (5, 70), (301, 3)]),
    "columns_of_a_product": (lambda x: (x * x).sum(0), (2048, 768), [(33, 40), (247, 130)]),
    "total": (lambda x: x.exp().sum(), (300, 700), [(30, 70), (2, 3), (70, 301)]),
}
"""Graphs of a matrix of symbolic sizes: a function, the example's sizes, and those of calls."""


def symbolic_sizes(*hints: int) -> tuple[FakeTensorMode, torch.Size]:
    """Symbolic sizes, each of another symbol, and the mode that fake tensors of them belong to."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dims = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(hints))
    return mode, mode.from_tensor(torch.empty(hints), symbolic_context=dims).shape


def symbolic_program(name: str) -> Program:
    """The program of a graph of `SYMBOLIC`, called with the matrix."""
    single, shape, _ = SYMBOLIC[name]
    mode, sizes = symbolic_sizes(*shape)
    with mode:
        fake = torch.empty(sizes, device="cuda")
        graph = make_fx(lambda x: pytree.tree_leaves(single(x)), decompositions())(fake)
    return _on_cpu(make_program(graph, [fake]))


def _on_cpu(made: Program) -> Program:
    """A program for a GPU, with its buffers where Triton's interpreter has its tensors."""
    buffers = {n: replace(buffer, device=CPU) for n, buffer in made.buffers.items()}
    return replace(made, buffers=buffers)


def program(name: str) -> tuple[Program, list[torch.Tensor], Callable[..., Any]]:
    """The program of a graph, scheduled for a GPU; inputs for it; and what eager computes.

    Its buffers are on the CPU, where Triton's interpreter has its tensors.
    """
    single, shapes = GRAPHS[name]

    def function(*args: torch.Tensor) -> list[torch.Tensor]:
        results = single(*args)
        return [*results] if isinstance(results, tuple) else [results]

    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    with FakeTensorMode():
        fakes = [torch.empty(shape, device="cuda") for shape in shapes]
        graph = make_fx(function, decompositions())(*fakes)
    return _on_cpu(make_program(graph, fakes)), inputs, function
