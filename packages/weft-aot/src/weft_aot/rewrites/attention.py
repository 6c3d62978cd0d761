"""Find softmax(q k^T * scale + mask) v, in its usual spellings; see `fused_attention`.

::

    q, k ─► matmul | bmm | baddbmm | einsum ─► scalars, casts, views, masks
         ─► softmax ─► casts, dropout ─► matmul | bmm | einsum ◄─ v

The scores are walked from the second product back to the first.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from weft_aot.config import settings
from weft_aot.rewrites.constants import Constants
from weft_aot.rewrites.fused_attention import FusedAttention, Mask
from weft_aot.rewrites.match import (
    argument,
    call_name,
    erase,
    example,
    has_transforms,
    is_private,
    is_quiet,
    writes,
)

ANCHORS = frozenset({"softmax"})
_PRODUCTS = frozenset({"matmul", "bmm", "einsum"})
_SCORES = _PRODUCTS | {"baddbmm"}
_FRESH = _SCORES | {"add", "mul", "div"}
_WRITES = {"add": "add", "mul": "mul", "div": "truediv", "masked_fill": ""}
_CASTS = frozenset({"float", "half", "bfloat16", "to", "type", "type_as"})
_LOWEST = -1e6
"""Masked scores up to this are far below all others, whose exponentials make theirs 0."""


def fuse_attention(graph: fx.Graph) -> int:
    """Rewrite each attention of `graph` that the fused operator can do; returns how many."""
    if settings.fuse_attention is False or has_transforms(graph):
        return 0
    if torch.are_deterministic_algorithms_enabled():  # not all fused backwards are
        return 0
    constants = Constants()
    _make_pure(graph)
    products = [node for node in graph.nodes if call_name(node) in _PRODUCTS]
    return sum(_Pattern(constants).rewrite(node) for node in products)


def _make_pure(graph: fx.Graph) -> None:
    """Replace writes to new scores (`scores += mask`) by pure calls, whose results are used later.

    No other node may have seen the scores, or a view of them, before the write.
    """
    fresh: set[fx.Node] = set()
    place = {node: k for k, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        name = call_name(node)
        if name in _FRESH and not writes(node):
            fresh.add(node)
        scores = node.args[0] if writes(node) and node.args else None
        if name not in _WRITES or scores not in fresh or not _keeps_dtype(node):
            continue
        if any(place.get(user, len(place)) < place[node] for user in scores.users):
            continue
        with graph.inserting_before(node):
            if node.op == "call_method":
                pure = graph.call_method(str(node.target)[:-1], node.args, node.kwargs)
            else:
                pure = graph.call_function(getattr(operator, _WRITES[name]), node.args)
        pure.meta, place[pure] = dict(node.meta), place[node]
        node.replace_all_uses_with(pure)
        later = [user for user in scores.users if user not in (pure, node)]
        for user in later:
            user.replace_input_with(scores, pure)
        graph.erase_node(node)
        fresh.add(pure)


def _keeps_dtype(node: fx.Node) -> bool:
    tensors = [example(source) for source in node.all_input_nodes]
    dtypes = {t.dtype for t in tensors if t is not None and t.dtype is not torch.bool and t.dim()}
    return None not in tensors and len(dtypes) == 1


class _NoMatch(Exception):
    """The nodes are no attention, or one that the fused operator computes otherwise."""


def _require(condition: object) -> None:
    if not condition:
        raise _NoMatch


@dataclass
class _Pattern:
    """What is known of one attention, walking backwards."""

    constants: Constants
    chain: list[fx.Node] = field(default_factory=list)
    masks: list[tuple[Mask, fx.Node]] = field(default_factory=list)
    scale: float = 1.0
    fill: float | None = None
    dropout: float = 0.0
    lead: tuple[int, ...] | None = None

    def rewrite(self, product: fx.Node) -> bool:
        """Put a fused attention in place of `product` if it is the second product of one."""
        if example(product) is None or not product.users:
            return False
        try:
            spec, operands = self._match(product)
        except _NoMatch:
            return False
        with product.graph.inserting_before(product):
            fused = product.graph.call_function(spec, operands)
        fused.meta = dict(product.meta)
        product.replace_all_uses_with(fused)
        erase([product, *self.chain])
        return True

    def _match(self, product: fx.Node) -> tuple[FusedAttention, tuple[fx.Node, ...]]:
        probabilities, value, value_order, out_order = _second_product(product)
        softmax = self._to_softmax(probabilities, product)
        scores = self._step(argument(softmax, 0, "input"), softmax)
        first = self._to_product(scores)
        query, key, orders = self._first_product(first)
        _require(is_quiet(first, product, self.chain))
        back = [out_order.index(dim) for dim in range(len(out_order))]
        _require(_tensor(product).permute(back).is_contiguous())
        dtype = _tensor(product).dtype
        _require(_tensor(first).dtype is dtype)
        trains = any(_tensor(node).requires_grad for node in (query, key, value))
        self._check_masks(dtype, trains)
        causal = self._take_causal(_tensor(scores))
        spec = FusedAttention(
            (*orders, value_order), out_order, self.lead, dtype, self.scale,
            tuple(mask for mask, _ in self.masks), -math.inf if self.fill is None else self.fill,
            causal, self.dropout,
        )  # fmt: skip
        operands = (query, key, value, *(node for _, node in self.masks))
        _require(_is_fusible(spec, operands))
        return spec, operands

    def _step(self, node: Any, user: fx.Node) -> fx.Node:
        """Take `node`, which `user` alone may read, into the pattern."""
        _require(isinstance(node, fx.Node) and example(node) is not None)
        _require(is_private(node, user) and "recompute" not in node.meta)
        self.chain.append(node)
        return node  # type: ignore[no-any-return]

    # -- from the second product to the softmax ----------------------------------------------

    def _to_softmax(self, node: Any, user: fx.Node) -> fx.Node:
        while call_name(self._step(node, user)) != "softmax":
            name = call_name(node)
            if name == "dropout":
                self._drop(node)
            elif name in ("view", "reshape"):
                self._view(node, argument(node, 0, "input"))
            else:
                _require(name in _CASTS or name in ("contiguous", "clone"))
            user, node = node, argument(node, 0, "input")
        dim, dtype = argument(node, 1, "dim"), node.kwargs.get("dtype")
        _require(dim in (-1, _tensor(node).dim() - 1) and len(node.args) <= 2)
        _require(dtype in (None, torch.float32, _tensor(node.args[0]).dtype))
        return node  # type: ignore[no-any-return]

    def _drop(self, node: fx.Node) -> None:
        probability = argument(node, 1, "p", 0.5)
        training = argument(node, 2, "training", node.kwargs.get("train", True))
        _require(isinstance(probability, float | int) and isinstance(training, bool))
        if training and probability:
            _require(settings.fuse_attention is True and not self.dropout)
            self.dropout = float(probability)

    def _view(self, node: fx.Node, base: Any) -> None:
        """A view between one batch dimension and two."""
        after, before = _tensor(node).shape, _tensor(base).shape
        _require(after[-2:] == before[-2:] and {len(after), len(before)} == {3, 4})
        lead = (after if len(after) == 4 else before)[:2]
        _require(all(isinstance(size, int) for size in lead) and self.lead in (None, tuple(lead)))
        self.lead = tuple(map(int, lead))

    # -- from the softmax to the first product -------------------------------------------------

    def _to_product(self, node: fx.Node) -> fx.Node:
        """Walk back over what is done to the scores; masks are kept from last to first."""
        factor = 1.0  # of what comes before, by scalings that were passed
        while (name := call_name(node)) not in _SCORES:
            inner, factor = self._change(name, node, factor)
            before, inner = node, self._step(inner, node)
            same = _tensor(inner).shape == _tensor(before).shape  # a mask may have more dimensions
            _require(same or name in ("view", "reshape"))
            node = inner
        self.scale = factor
        if name == "baddbmm":
            beta: Any = node.kwargs.get("beta", 1)
            alpha: Any = node.kwargs.get("alpha", 1)
            _require(isinstance(beta, int | float) and isinstance(alpha, int | float))
            _require(len(node.args) == 3)
            if beta != 0:
                self._mask("add", node.args[0], node, beta * factor)
            self.scale *= alpha
        return node

    def _change(self, name: str | None, node: fx.Node, factor: float) -> tuple[Any, float]:
        """What one change is done to, and the factor of what comes before it."""
        if name in ("mul", "div"):
            inner, number = self._scaled(name, node)
            factor *= number if name == "mul" else 1 / number
            # -inf stays -inf, and a low number low.
            _require(factor > 0 and math.isfinite(factor))
            return inner, factor
        if name == "add":
            _require(node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2)
            scores, other = self._scores_first(node)
            self._mask("add", other, node, factor)
            return scores, factor
        if name == "masked_fill":
            value, mask = argument(node, 2, "value"), argument(node, 1, "mask")
            self._block("block", mask, value, node, factor)
        elif name == "where":
            return self._where(node, factor), factor
        elif name in ("view", "reshape"):
            self._view(node, argument(node, 0, "input"))
        else:
            _require(name in _CASTS or name in ("contiguous", "clone"))
            _require(_tensor(node).dtype in (torch.float32, _tensor(node.args[0]).dtype))
        return argument(node, 0, "input"), factor

    def _where(self, node: fx.Node, factor: float) -> fx.Node:
        _require(len(node.args) == 3)
        condition, given, other = node.args
        if node.op == "call_method":  # scores.where(condition, other)
            condition, given = given, condition
        if self._leads_to_product(given, node):
            self._block("keep", condition, other, node, factor)
            return given  # type: ignore[return-value]
        self._block("block", condition, given, node, factor)
        return other  # type: ignore[return-value]

    def _scaled(self, name: str, node: fx.Node) -> tuple[Any, float]:
        _require(len(node.args) == 2 and not node.kwargs)
        inner, number = node.args
        if name == "mul" and not self._leads_to_product(inner, node):
            inner, number = number, inner
        found = self.constants.number(number)
        _require(found)
        assert found is not None
        return inner, found

    def _scores_first(self, node: fx.Node) -> tuple[Any, Any]:
        first, second = node.args
        return (first, second) if self._leads_to_product(first, node) else (second, first)

    def _leads_to_product(self, node: Any, user: fx.Node) -> bool:
        """Whether private nodes of the scores' shape lead from `user` back to a product."""
        pending = [(node, user)]
        while pending:
            node, user = pending.pop()
            if not isinstance(node, fx.Node) or example(node) is None or not is_private(node, user):
                continue
            if call_name(node) in _SCORES:
                return True
            if call_name(node) in ("mul", "div", "add", "masked_fill", "where", "view", *_CASTS):
                pending += [(source, node) for source in node.args[:3]]
        return False

    def _mask(self, kind: str, node: Any, at: fx.Node, factor: float = 1.0) -> None:
        scores, tensor = _tensor(at), example(node)
        _require(tensor is not None and tensor.dim() <= scores.dim())
        assert tensor is not None
        _require(tensor.device == scores.device)
        floating = tensor.is_floating_point()
        _require(floating if kind == "add" else tensor.dtype is torch.bool)
        # Float16 loses no score that is added to its lowest number.
        _require(kind != "add" or scores.dtype is not torch.float16)
        known = self.constants.tensor(node)
        rows = known is not None and _has_keys(kind, known)
        finite = known is not None and kind == "add" and bool(known.isfinite().all())
        self.masks.append((Mask(kind, factor, scores.dim() == 3, rows, finite), node))

    def _block(self, kind: str, node: Any, value: Any, at: fx.Node, factor: float) -> None:
        number = self.constants.number(value)
        _require(number is not None and self.fill in (None, number))
        assert number is not None
        lowest = torch.finfo(_tensor(at).dtype).min
        _require(number * factor <= _LOWEST or number <= 0.9 * lowest)
        _require(not math.isnan(number))
        self.fill = number
        self._mask(kind, node, at)

    # -- the first product, and the whole --------------------------------------------------------

    def _first_product(self, node: fx.Node) -> tuple[Any, Any, tuple[Any, Any]]:
        if call_name(node) == "einsum":
            return _first_einsum(node)
        query, key = node.args[-2:] if len(node.args) > 1 else (None, None)
        shapes = [len(_tensor(operand).shape) for operand in (query, key)]
        _require(min(shapes) >= 2)
        turned = (*range(shapes[1] - 2), shapes[1] - 1, shapes[1] - 2)
        return query, key, (tuple(range(shapes[0])), turned)

    def _check_masks(self, dtype: torch.dtype, trains: bool) -> None:
        for mask, node in self.masks:
            # What a row of low numbers adds to gradients, the fused backward rounds away.
            known = mask.kind != "add" or mask.rows or not trains
            _require(known or settings.fuse_attention is True)
            tensor = _tensor(node)
            single = tensor.device.type == "cpu" and tensor.dtype is torch.float32
            _require(mask.kind != "add" or tensor.dtype is dtype or single)
        _require(not self.dropout or all(mask.rows for mask, _ in self.masks))
        _require(self.fill in (None, -math.inf) or all(m.kind != "add" for m, _ in self.masks))

    def _take_causal(self, scores: torch.Tensor) -> bool:
        """Whether the one mask is the causal one, which is then dropped."""
        if len(self.masks) != 1 or not self.masks[0][0].rows:
            return False
        (mask, node), (length, keys) = self.masks[0], scores.shape[-2:]
        known = self.constants.tensor(node)
        assert known is not None
        if mask.kind == "add":
            blocked = known <= _LOWEST
        else:
            blocked = known if mask.kind == "block" else ~known
        plain = mask.kind != "add" or bool((blocked | (known == 0)).all())
        causal = torch.ones(blocked.shape[-2:], dtype=torch.bool).triu(1)
        if not plain or length != keys or blocked.shape[-2:] != (length, keys):
            return False
        if not bool((blocked == causal).all()):
            return False
        self.masks.clear()
        return True


def _has_keys(kind: str, mask: torch.Tensor) -> bool:
    """Whether each query has a key under a mask that is known."""
    if kind == "add":
        return bool((mask > -1000).any(-1).all()) and bool((mask < torch.inf).all())
    seen = mask if kind == "keep" else ~mask
    return mask.dim() >= 2 and bool(seen.any(-1).all())


def _tensor(node: Any) -> torch.Tensor:
    value = example(node)
    _require(value is not None)
    assert value is not None
    return value


def _is_fusible(spec: FusedAttention, operands: tuple[fx.Node, ...]) -> bool:
    """Whether torch has a fused kernel for such operands (a choice of 0 is none)."""
    tensors = [_tensor(node) for node in operands]
    pairs = zip(tensors[:3], spec.orders, strict=True)
    query, key, value = (t.permute(order).to(spec.dtype) for t, order in pairs)
    _require(query.shape[-1] == key.shape[-1] == value.shape[-1])
    _require(key.shape[-2] == value.shape[-2])
    if query.device.type == "cpu":
        if spec.dropout or any(tensor.requires_grad for tensor in tensors[3:]):
            return False
    elif query.shape[-1] % 8:
        return False
    lead = spec.lead or torch.broadcast_shapes(*(t.shape[:-2] for t in (query, key, value)))
    return len(lead) <= 2 and query.dtype in _KERNELS.get(query.device.type, ())


_KERNELS = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""Dtypes of which torch has a fused kernel with masks."""


def _second_product(node: fx.Node) -> tuple[Any, Any, tuple[int, ...], tuple[int, ...]]:
    """Probabilities, values, the permutation of the values, and of the result."""
    if call_name(node) == "einsum":
        (scores, value), (a, b), out = _einsum(node)
        _require(example(scores) is not None and example(value) is not None)
        batch, length, keys = a[:-2], a[-2], a[-1]
        width = [letter for letter in b if letter not in a]
        _require(len(width) == 1 and set(b) == {*batch, keys, *width})
        _require(set(out) == {*batch, length, *width})
        canonical = [*batch, length, *width]
        order = tuple(b.index(letter) for letter in (*batch, keys, *width))
        return scores, value, order, tuple(canonical.index(letter) for letter in out)
    _require(len(node.args) == 2 and not node.kwargs)
    scores, value = node.args
    _require(_tensor(value).dim() >= 2)
    result = _tensor(node).dim()
    return scores, value, tuple(range(_tensor(value).dim())), tuple(range(result))


def _first_einsum(node: fx.Node) -> tuple[Any, Any, tuple[Any, Any]]:
    (first, second), (a, b), out = _einsum(node)
    batch, length, keys = out[:-2], out[-2], out[-1]
    if length in b:
        first, second, a, b = second, first, b, a
    width = [letter for letter in a if letter not in out]
    _require(len(width) == 1 and set(a) == {*batch, length, *width})
    _require(set(b) == {*batch, keys, *width})
    orders = [
        tuple(letters.index(letter) for letter in (*batch, row, *width))
        for letters, row in ((a, length), (b, keys))
    ]
    return first, second, (orders[0], orders[1])


def _einsum(node: fx.Node) -> tuple[tuple[Any, Any], tuple[str, str], str]:
    _require(len(node.args) == 3 and isinstance(node.args[0], str))
    equation = str(node.args[0]).replace(" ", "")
    left, arrow, out = equation.partition("->")
    a, comma, b = left.partition(",")
    _require(arrow and comma and "," not in b and "." not in equation)
    _require(all(len(set(text)) == len(text) for text in (a, b, out)) and len(out) >= 3)
    return (node.args[1], node.args[2]), (a, b), out
