"""flex_attention as an operator with a backward, for which a backend may have a fused kernel.

`weft_core::flex_attention` takes what is done to the scores as text: a function of core operators
on numbers, which was traced once for one score. Without a kernel both operators compute the whole
matrix of scores. Blocks are those of torch's `BlockMask`: of each block of queries, which blocks of
keys take part, and of which of those all scores do; then the same of each block of keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from weft_core.inlinable import inlinable
from weft_core.tracing import trace_aten

Tensors = Sequence[torch.Tensor]
LN2 = math.log(2.0)
MOST_WIDTH = 256
NUMBERS = (torch.float32, *(torch.int32,) * 4)
"""The dtypes of a score and its position: batch, head, query and key."""
DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))

_library = torch.library.Library("weft_core", "FRAGMENT")
_library.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] captured, Tensor[] blocks,"
    " int[] block_size, str program, float scale) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "flex_attention_backward(Tensor grad, Tensor delta, Tensor query, Tensor key, Tensor value,"
    " Tensor lse, Tensor[] captured, Tensor[] blocks, int[] block_size, str program, str gradient,"
    " float scale) -> (Tensor, Tensor, Tensor)"
)


def score_texts(gm: fx.GraphModule, fakes: Tensors) -> tuple[str, str] | None:
    """Trace what is done to a score, and its gradient, into text; None where it holds tensors.

    Args:
        gm: (score, batch, head, query, key, *captured) -> (score, whether it takes part).
        fakes: its arguments; all but the captured tensors have no dimensions.

    Returns:
        the texts of two functions of core operators: of `gm`, and of its arguments and the gradient
        of the new score, which gives that of the score.
    """

    def gradient(*given: torch.Tensor) -> torch.Tensor:
        *numbers, tangent = given
        with torch.enable_grad():
            score = numbers[0].detach().requires_grad_()
            result = gm(score, *numbers[1:])[0]
            if not result.requires_grad:
                return torch.zeros_like(score)
            (found,) = torch.autograd.grad(result, score, tangent.to(result.dtype))
        return found

    if gm.graph.find_nodes(op="get_attr"):
        return None
    traced = trace_aten(gm, fakes), trace_aten(gradient, [*fakes, torch.empty_like(fakes[0])])
    if not all(map(_write_constants, traced)):
        return None
    program, slope = (str(one.graph.python_code("self").src) for one in traced)
    return program, slope


def _write_constants(gm: fx.GraphModule) -> bool:
    """Put numbers in the place of constants without dimensions; say whether there are no others."""
    for node in gm.graph.find_nodes(op="get_attr"):
        constant = getattr(gm, node.target)
        if constant.dim():
            return False
        options = {"dtype": constant.dtype, "device": constant.device}
        with unset_fake_temporarily():
            number = (constant.item(),)
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(
                gm.graph.call_function(torch.ops.aten.scalar_tensor.default, number, options)
            )
        gm.graph.erase_node(node)
    return True


@functools.lru_cache(maxsize=256)
def function_of(text: str) -> Callable[..., Any]:
    """The function that such a text defines."""
    names: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
    }
    exec(text, names)
    return functools.partial(names["forward"], None)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Tensors,
    blocks: Tensors,
    block_size: tuple[int, int],
    program: str,
    gradient: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the attention, and the log-sum-exp and the maximum of each row of scores, to base 2.

    Args:
        query, key, value: (batch, heads, length, width) of one dtype; key and value may have fewer
            heads. No captured tensor gets a gradient.
        captured: what the function of the scores reads.
        blocks: counts and indices of partial and of full blocks, of keys for each block of queries,
            then, if a gradient is needed, of queries for each block of keys; int32.
        block_size: queries and keys of a block.
        program, gradient: what is done to a score (`score_texts`).
        scale: of the scores before it.
    """
    if torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value)):
        rest = captured, blocks, block_size, program, gradient, scale
        return _Attention.apply(query, key, value, *rest)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.weft_core.flex_attention(  # type: ignore[no-any-return]
        query, key, value, captured, blocks, block_size, program, scale
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *operands, captured, blocks, block_size, program, gradient, scale = given
        out, lse, largest = torch.ops.weft_core.flex_attention(
            *operands, captured, blocks, block_size, program, scale
        )
        ctx.save_for_backward(*operands, out, lse, *captured, *blocks)
        ctx.split, ctx.rest = len(captured), (block_size, program, gradient, scale)
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return out, lse, largest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any, grad_lse: Any, _: Any) -> Any:
        *operands, out, lse = ctx.saved_tensors[:5]
        rest = ctx.saved_tensors[5:]
        grad = torch.zeros_like(out) if grad is None else grad
        delta = (grad.float() * out.float()).sum(-1)
        delta = delta if grad_lse is None else delta - grad_lse / LN2
        found = torch.ops.weft_core.flex_attention_backward(
            grad, delta, *operands, lse, rest[: ctx.split], rest[ctx.split :], *ctx.rest
        )
        return *found, *(None,) * 6


@inlinable
def memory_order(strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first three dimensions from the outermost in memory on, and the way back."""
    order = sorted(range(3), key=lambda dim: -strides[dim])
    return order, [order.index(dim) for dim in range(3)]


def empty_results(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return memory for the results: the attention lies as the query, its last dimension dense."""
    order, back = memory_order(query.stride())
    out = query.new_empty(*(query.shape[dim] for dim in order), value.shape[-1])
    rows = [query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2)]
    return out.permute(*back, 3), *rows


def empty_gradients(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return memory for the gradients of query, key and value."""
    return tuple(torch.empty_like(one) for one in operands)


def _over_positions(text: str, captured: Tensors, *matrices: torch.Tensor) -> Any:
    """Apply a function of a score to matrices of scores: first the scores, last the tangents."""
    function, (scores, *tangents) = function_of(text), matrices

    def at(positions: Tensors, score: torch.Tensor, *tangent: torch.Tensor) -> Any:
        return function(score, *positions, *captured, *tangent)

    for axis in reversed(range(4)):
        dims = tuple(0 if dim == axis else None for dim in range(4))
        at = torch.vmap(at, (dims, *[0] * len(matrices)))
    positions = [
        torch.arange(size, device=scores.device, dtype=torch.int32) for size in scores.shape
    ]
    return at(tuple(positions), scores, *tangents)


def _per_head(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    return [one.repeat_interleave(query.shape[1] // one.shape[1], 1).float() for one in others]


def dense_forward(*given: Any) -> Any:
    """The operator on the whole matrix of scores."""
    query, key, value, captured, _, _, program, scale = given
    keys, values = _per_head(query, key, value)
    scores = query.float() @ keys.mT * scale
    scores, kept = _over_positions(program, captured, scores)
    scores = torch.where(kept, scores.float(), -math.inf)
    out, lse, largest = empty_results(query, value)
    out.copy_(torch._safe_softmax(scores, -1) @ values)
    lse.copy_(scores.logsumexp(-1) / LN2)
    largest.copy_(scores.amax(-1) / LN2)
    return out, lse, largest


def dense_backward(*given: Any) -> Any:
    """Its backward on the whole matrix of scores."""
    grad, delta, query, key, value, lse, captured, _, _, program, gradient, scale = given
    keys, values = _per_head(query, key, value)
    raw, grad = query.float() @ keys.mT * scale, grad.float()
    scores, kept = _over_positions(program, captured, raw)
    kept = kept & (lse > -math.inf).unsqueeze(-1)
    weights = torch.where(kept, (scores.float() / LN2 - lse.unsqueeze(-1)).exp2(), 0)
    slopes = weights * (grad @ values.mT - delta.unsqueeze(-1))
    (slopes,) = _over_positions(gradient, captured, raw, slopes)
    slopes = torch.where(kept, slopes, 0) * scale
    whole = slopes @ keys, slopes.mT @ query.float(), weights.mT @ grad
    results = empty_gradients(query, key, value)
    for result, one in zip(results, whole, strict=True):
        result.copy_(one.unflatten(1, (result.shape[1], -1)).sum(2))
    return results


_library.impl("flex_attention", dense_forward, "CompositeExplicitAutograd")
_library.impl("flex_attention", lambda q, k, v, *rest: empty_results(q, v), "Meta")
_library.impl("flex_attention_backward", dense_backward, "CompositeExplicitAutograd")
_library.impl("flex_attention_backward", lambda *given: empty_gradients(*given[2:5]), "Meta")
