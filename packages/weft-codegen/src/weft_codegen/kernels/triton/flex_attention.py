"""Triton kernels of `weft_core::flex_attention` and its backward.

What is done to the scores is traced again with the shapes at hand, lowered, and written into the
source of the kernels (`flex_kernels.py`) as functions of a block of scores and its positions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from weft_core.flex_attention import NUMBERS, empty_gradients, empty_results, function_of
from weft_core.tracing import trace_aten

from weft_codegen.compile import decompositions
from weft_codegen.kernels.triton.emit import HEADER
from weft_codegen.kernels.triton.flex_kernels import CAPTURED, KERNELS
from weft_codegen.kernels.triton.jit import functions
from weft_codegen.kernels.triton.triton_expr import NoTritonForm, ValueWriter
from weft_codegen.loops import program as ir
from weft_codegen.loops.expr import Load, walk
from weft_codegen.loops.index import ZERO
from weft_codegen.loops.lower.graph import lower_graph

Tensors = Sequence[torch.Tensor]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

# Queries and keys of a block, warps and stages, by the width of the operands (at most so many).
_FORWARD = {
    torch.float32: ((64, (64, 64, 4, 2)), (256, (32, 32, 4, 1))),
    torch.bfloat16: ((128, (64, 64, 4, 3)), (256, (64, 32, 4, 2))),
}
_BACKWARD = {
    torch.float32: ((64, (32, 32, 4, 1)), (256, (16, 16, 4, 1))),
    torch.bfloat16: ((64, (64, 64, 4, 3)), (128, (64, 64, 4, 2)), (256, (32, 32, 4, 1))),
}


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, captured: Tensors,
    blocks: Tensors, block_size: Sequence[int], program: str, scale: float,
) -> Any:  # fmt: skip
    """Compute the operator `weft_core::flex_attention` on a GPU.

    Raises:
        NoLowering, NoTritonForm: what is done to the scores has no form in a kernel.
    """
    kernels = _kernels(program, "", tuple(map(_layout, captured)))
    out, lse, largest = results = empty_results(query, value)
    queries, keys, warps, stages = _tile(_FORWARD, query, key, value, block_size)
    grid = (triton.cdiv(query.shape[2], queries), query.shape[0] * query.shape[1])
    kernels["attend"][grid](
        query, key, value, out, lse, largest, *_rows(blocks[:4]), *captured,
        scale, query.shape[1], query.shape[2], key.shape[2], _parts(key, keys, block_size[1]),
        *(step for one in (query, key, value, out) for step in one.stride()),
        **_constants(query, key, value, block_size, queries, keys),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return results


def backward(
    grad: torch.Tensor, delta: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, lse: torch.Tensor, captured: Tensors, blocks: Tensors,
    block_size: Sequence[int], program: str, gradient: str, scale: float,
) -> Any:  # fmt: skip
    """Compute the operator `weft_core::flex_attention_backward` on a GPU.

    Raises:
        NoLowering, NoTritonForm: what is done to the scores has no form in a kernel.
    """
    kernels = _kernels(program, gradient, tuple(map(_layout, captured)))
    results = empty_gradients(query, key, value)
    queries, keys, warps, stages = _tile(_BACKWARD, query, key, value, block_size)
    for name, result, of, size, masks, other, along, block in (
        ("attend_queries", results[:1], query, queries, blocks[:4], key, keys, block_size[1]),
        ("attend_keys", results[1:], key, keys, blocks[4:], query, queries, block_size[0]),
    ):
        grid = (triton.cdiv(of.shape[2], size), of.shape[0] * of.shape[1])
        kernels[name][grid](
            query, key, value, grad, lse, delta.contiguous(), *result,
            *_rows(masks), *captured, scale, query.shape[1], query.shape[2], key.shape[2],
            _parts(other, along, block),
            *(step for one in (query, key, value, grad, *result) for step in one.stride()),
            **_constants(query, key, value, block_size, queries, keys),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return results


def _parts(tensor: torch.Tensor, size: int, block: int) -> int:
    """How many steps of `size` rows a block of a mask takes."""
    return int(triton.cdiv(min(block, tensor.shape[2]), size))


def _layout(tensor: torch.Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _tile(table: Any, *operands: Any) -> tuple[int, int, int, int]:
    """Queries and keys of a block, warps and stages."""
    query, key, value, block_size = operands
    rows = table[torch.float32 if query.dtype is torch.float32 else torch.bfloat16]
    widest = max(query.shape[-1], value.shape[-1])
    queries, keys, *rest = next(row for width, row in rows if widest <= width)
    fitting = []
    for most, length, block in zip((queries, keys), (query, key), block_size, strict=True):
        whole = max(16, triton.next_power_of_2(length.shape[2]))
        fitting.append(min(most, whole, block & -block))
    return fitting[0], fitting[1], *rest


def _rows(blocks: Tensors) -> list[Any]:
    """The tensors of a mask, then the steps from a batch and a head to the next, and of a row."""
    count = blocks[0]
    batches, heads, rows = count.shape
    steps = 0 if batches == 1 else heads * rows, 0 if heads == 1 else rows
    return [*(one.contiguous() for one in blocks), *steps, blocks[1].shape[-1]]


def _constants(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_size: Sequence[int],
    queries: int, keys: int,
) -> dict[str, Any]:  # fmt: skip
    widths = query.shape[-1], value.shape[-1]
    precise = query.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "WIDTH": widths[0],
        "VALUE_WIDTH": widths[1],
        "LANES": max(16, triton.next_power_of_2(widths[0])),
        "VALUE_LANES": max(16, triton.next_power_of_2(widths[1])),
        "QUERIES": queries,
        "KEYS": keys,
        "MASK_QUERIES": block_size[0],
        "MASK_KEYS": block_size[1],
        "PRECISION": "ieee" if precise else "tf32",
    }


@functools.lru_cache(maxsize=256)
def _kernels(program: str, gradient: str, captured: tuple[Layout, ...]) -> dict[str, Any]:
    """The Triton functions for what is done to the scores, by name."""
    names = [f"in{len(NUMBERS) + at}" for at in range(len(captured))]
    texts = [_function("modify", program, captured, ())]
    if gradient:
        texts.append(_function("slope", gradient, captured, (torch.float32,)))
    listed = ", ".join(names)
    kernels = KERNELS.replace(f"{CAPTURED}, ", listed + ", " * bool(names))
    parts = kernels.replace(CAPTURED, listed).split("# ---- backward\n")
    return functions("\n\n".join([HEADER, *texts, *parts[: 1 + bool(gradient)]]))


def _function(
    name: str, text: str, captured: tuple[Layout, ...], more: tuple[torch.dtype, ...]
) -> str:
    """A function of blocks of scores and positions, in Triton."""
    mode = FakeTensorMode()
    with mode:
        numbers = [torch.empty((), dtype=dtype) for dtype in NUMBERS]
        tensors = [torch.empty_strided(n, steps, dtype=dtype) for n, steps, dtype in captured]
        tangents = [torch.empty((), dtype=dtype) for dtype in more]
    with torch.no_grad():
        fakes = [*numbers, *tensors, *tangents]
        gm = trace_aten(function_of(text), fakes, decompositions=decompositions())
    program = lower_graph(gm)
    inputs = [given.name for given in program.inputs]
    values = {*inputs[: len(numbers)], *inputs[len(numbers) + len(tensors) :]}
    writer = ValueWriter()
    results = [ref.name for ref in program.outputs if isinstance(ref, ir.BufferRef)]
    computed = {step.result: step for step in program.steps if isinstance(step, ir.Compute)}
    body = tuple(
        ir.Store(step.result, ZERO, step.values[0])
        for step in computed.values()
        if step.result in _needed(results, computed)
    )
    with writer.scope(body):
        for statement in body:
            for node in walk(statement.value):
                if isinstance(node, Load) and node.buffer in values | computed.keys():
                    writer.name(node, node.buffer)
            for line in writer.define(statement.value):
                writer.line(line)
            writer.line(f"{statement.buffer} = {writer.text(statement.value)}")
    head = f"@triton.jit\ndef {name}({', '.join(inputs)}):"
    return "\n".join([head, *writer.lines, f"    return {', '.join(results)}\n"])


def _needed(results: Sequence[str], computed: dict[str, ir.Compute]) -> set[str]:
    """What results are computed of: not the checks of indices, which cannot raise in a kernel."""
    needed, todo = set[str](), list(results)
    while todo:
        name = todo.pop()
        if name in needed or name not in computed:
            continue
        step = computed[name]
        if step.axes or step.op or step.scan or step.update:
            raise NoTritonForm("a whole tensor is computed for each score")
        needed.add(name)
        todo += [node.buffer for node in step.loads]
    return needed
