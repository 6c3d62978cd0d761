"""torch's flex_attention; jagged attention.

Its Python checks are inlined. On a GPU the operator that takes `score_mod` and `mask_mod` as
functions becomes one of weft's, which takes a trace of both for one score. Elsewhere it is replaced
by a version that maps both over all positions, as eager execution does.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.amp.autocast_mode import _cast
from torch.fx import Node
from weft_core import flex_attention as flex
from weft_core import torch_compiler_shim
from weft_core.graph_copy import copy_nodes
from weft_core.inlinable import inlinable

from weft_capture.breaks import Break
from weft_capture.functions.language.polyfilled import polyfill
from weft_capture.functions.table import rule
from weft_capture.functions.torch.control_flow import free_nodes, trace_branch
from weft_capture.libraries import nested
from weft_capture.model.constant import FALSE, NONE, Constant, constant
from weft_capture.model.containers import ListValue, TupleValue
from weft_capture.model.contexts import NullContext
from weft_capture.model.protocol import Output, Tracer, Value
from weft_capture.tensors.tensor import TensorValue

_AXES = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))
"""Which of batch, head, query and key each of the four nested maps goes over."""


@inlinable
def attend(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: float,
    kernel_options: Any = None, *buffers: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the attention, and the log-sum-exp and the maximum of each row of scores, to base 2.

    Args:
        query, key, value: of shape (batch, heads, length, width); key and value may have fewer
            heads, and a batch of one.
        score_mod: (score, batch, head, query position, key position) -> score.
        block_mask: its last entry says which positions take part; its blocks only save work.
        scale: of the scores before `score_mod`.
        kernel_options: how a kernel of torch would do it.
        buffers: none in a program; for tracers of torch.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        lower = torch.get_autocast_dtype(device)
        query, key, value = (_cast(tensor, device, lower) for tensor in (query, key, value))
        with torch.autocast(device, enabled=False):
            return attend(query, key, value, score_mod, block_mask, scale)
    operands = query, key.expand(query.size(0), -1, -1, -1), value.expand(query.size(0), -1, -1, -1)
    if _has_kernel(*operands, block_mask):
        zeros = [torch.zeros((), dtype=kind, device=query.device) for kind in flex.NUMBERS]
        texts = texts_of(score_mod, block_mask[-1], *zeros)
        if texts is not None:
            program, gradient, captured = texts
            blocks = _blocks(block_mask, _differentiated(*operands))
            size = tuple(block_mask[-3:-1])
            return flex.flex_attention(*operands, captured, blocks, size, program, gradient, scale)
    return attend_densely(*operands, score_mod, block_mask, scale)


FUSED_ON = {"cuda"}
"""Types of devices on which the operator has a kernel."""


@inlinable
def _differentiated(*operands: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in operands)


@inlinable
def _has_kernel(query: Any, key: Any, value: Any, block_mask: Any) -> bool:
    return (
        query.device.type in FUSED_ON
        and (block_mask[6] is not None or not _differentiated(query, key, value))
        and query.dtype in flex.DTYPES
        and query.dtype == key.dtype == value.dtype
        and max(query.size(-1), value.size(-1)) <= flex.MOST_WIDTH
        and all(size % 16 == 0 for size in block_mask[-3:-1])
        and query.numel() > 0
        and value.numel() > 0
    )


@inlinable
def attend_densely(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do as `attend`, with the whole matrix of scores."""
    groups, strides = query.size(1) // key.size(1), query.stride()
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    precise = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = query.to(precise) @ key.to(precise).transpose(-2, -1) * scale
    positions = [torch.arange(size, device=scores.device) for size in scores.shape]
    with tensors_as_indices():
        taking_part = _mapped(block_mask[-1], ())(*positions)
        scores = torch.where(taking_part, _mapped(score_mod, (0,))(scores, *positions), -torch.inf)
    nothing = (scores == -torch.inf).all(-1)
    sums = torch.where(nothing.unsqueeze(-1), 0, scores).logsumexp(-1) / flex.LN2
    out = torch._safe_softmax(scores, -1).to(query.dtype) @ value
    largest = scores.detach().amax(-1) / flex.LN2
    return _laid_out(out, strides), torch.where(nothing, -torch.inf, sums), largest


def texts_of(score_mod: Any, mask_mod: Any, *numbers: Any) -> Any:
    """Trace both functions of an example of a score and a position.

    Returns:
        the texts of `flex.score_texts`, and the tensors that the functions read; None where they
        do more than compute, or where gradients of those tensors are wanted.
    """


@rule(texts_of)
def _texts_of(tx: Tracer, score_mod: Value, mask_mod: Value, *numbers: Any) -> Value:
    arguments = [score_mod, mask_mod, *numbers]
    try:
        branch = trace_branch(
            tx, "a function of flex_attention", tx.const_object(_one_score), arguments
        )
    except Break:
        return NONE
    given = [number.node for number in numbers]
    free = free_nodes([branch], given)
    module = copy_nodes(tx.graph.root, branch.nodes, branch.outputs, given + free)
    for node in reversed(branch.nodes):
        tx.graph.discard(node)
    captured = [_as_tensor(tx, node, numbers[0]) for node in free]
    learnt = any(value is not None and value.fake.requires_grad for value in captured)
    if None in captured or (learnt and torch.is_grad_enabled()):
        return NONE
    texts = flex.score_texts(module, [value.fake for value in (*numbers, *captured)])
    return NONE if texts is None else TupleValue([*map(constant, texts), ListValue(captured)])


def _as_tensor(tx: Tracer, node: Node, like: TensorValue) -> Any:
    """A node's value; a size as a tensor without dimensions, None for any other number."""
    example = node.meta["example_value"]
    if isinstance(example, torch.SymInt):
        options = {"dtype": torch.int64, "device": like.fake.device}
        keywords = {name: tx.const_object(option) for name, option in options.items()}
        size = tx.graph.symbolic(node, example)
        return tx.graph.emit("call_function", torch.scalar_tensor, [size], keywords)
    return tx.graph.value_of(example) if isinstance(example, torch.Tensor) else None


@inlinable
def _one_score(score_mod: Any, mask_mod: Any, score: Any, *position: Any) -> tuple[Any, Any]:
    with tensors_as_indices():
        score, kept = score_mod(score, *position), mask_mod(*position)
    return score, torch.as_tensor(kept, device=position[0].device)


@inlinable
def _blocks(block_mask: Any, differentiated: bool) -> list[torch.Tensor]:
    """Return the tensors of a mask; one without full blocks gets counts of zero."""
    found = []
    for first in range(2, 10 if differentiated else 6, 4):
        count, index, full_count, full_index = block_mask[first : first + 4]
        if full_count is None:
            full_count, full_index = torch.zeros_like(count), index
        found += [count, index, full_count, full_index]
    return found


rule(flex.flex_attention)(
    lambda tx, *args: tx.graph.emit("call_function", flex.flex_attention, list(args), {})
)


@inlinable
def _mapped(function: Any, first: tuple[int, ...]) -> Any:
    for axes in _AXES:
        function = torch.vmap(function, (*first, *axes))
    return function


@inlinable
def _laid_out(out: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the tensor in the memory order of the query, but with its last dimension dense."""
    order, back = flex.memory_order(strides)
    return out.permute(*order, 3).contiguous().permute(*back, 3)


def tensors_as_indices() -> Any:
    """Return a context in which a 0-dim tensor as an index gathers, and its value is not read."""


class _TensorIndices(NullContext):
    def enter(self, tx: Tracer) -> Value:
        _add(tx, 1)
        return NONE

    def leave(self, tx: Tracer) -> Value:
        _add(tx, -1)
        return FALSE

    def reconstruct(self, out: Output) -> None:
        raise Break("cannot-rebuild", "a break between positions of flex_attention")


rule(tensors_as_indices, torch_compiler_shim.TENSOR_INDICES)(
    lambda tx: _TensorIndices(tensors_as_indices)
)


def _add(tx: Tracer, change: int) -> None:
    tx.gathering += change
    tx.journal.on_rollback(lambda: setattr(tx, "gathering", tx.gathering - change))


_DENSE = torch.nn.functional.scaled_dot_product_attention
_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()  # noqa: SIM905
_home: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
polyfill(_home.flex_attention, attend)


@rule(_DENSE)
def _attend_densely(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    """Attend to jagged tensors by one operator, where eager reads their sizes."""
    bound = dict(zip(_NAMES, args, strict=False)) | kwargs
    tensors = [bound.pop(name, NONE) for name in _NAMES[:3]]
    scale, rest = bound.pop("scale", NONE), [*bound.values()]
    plain = all(isinstance(option, Constant) and not option.value for option in rest)
    if plain and nested.supports(*(getattr(tensor, "fake", None) for tensor in tensors)):
        return tx.graph.emit("call_function", nested.attend, [*tensors, scale], {})
    return tx.graph.emit("call_function", _DENSE, list(args), kwargs)
