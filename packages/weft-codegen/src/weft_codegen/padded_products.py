"""Matrix products on a GPU whose rows are not aligned: the operands get zeros at their ends.

A library's fast kernels read 16 bytes at once, so each row of an operand and of the result has to
begin at such a place. A layer of 50,257 bfloat16 features takes five times as long as one of
50,264. Rows with gaps between them do not help: the library looks at the sizes. So these change:

    mm(a, b)  ->  clone(slice(mm(pad(a), pad(b))))

The clone says that the result is laid out as before; loops that read it read the product instead.
Loops that make an operand write its zeros, too. Other operands are copied, and padding has to save
more time than that. In a joint graph the padded product is what the backward may save.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from weft_core.fake import detect_mode
from weft_core.symnodes import hint

from weft_codegen.loops.lower.fxnodes import fake_call, is_view
from weft_codegen.loops.lower.rows import LOWERINGS

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default)
# Seconds on an H100: what a multiplication without alignment takes longer, a byte that a kernel
# reads or writes, a kernel more. Estimates are not exact, so padding has to save twice its cost.
_PER_PRODUCT, _PER_BYTE, _PER_KERNEL = 1e-14, 4e-13, 4e-6
_MARGIN = 2


def pad_products(gm: fx.GraphModule) -> fx.GraphModule:
    """Return an aten graph whose products are padded where that saves time, or `gm` itself.

    Args:
        gm: a functional graph whose nodes carry `meta["val"]`; it is left as it is. Symbolic sizes
            are not padded.
    """
    if not _plans(gm.graph):
        return gm
    changed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    plans = _plans(changed.graph)
    mode = detect_mode(node.meta["val"] for node in plans)
    padded: dict[Any, fx.Node] = {}
    with torch.no_grad(), mode or contextlib.nullcontext():
        for node, plan in plans.items():
            _Rewrite(node, padded).run(plan)
    changed.recompile()
    return changed


def _plans(graph: fx.Graph) -> dict[fx.Node, _Plan]:
    products = [node for node in graph.nodes if node.target in _PRODUCTS]
    return {node: plan for node in products if (plan := _plan(node)) and plan.pays(node)}


def alignment(value: torch.Tensor) -> int:
    """How many elements of a row a GPU's library wants to read at once; 1 where it does not matter.

    TF32 is used for float32 where the program allows it.
    """
    if value.device.type != "cuda":
        return 1
    if value.dtype in (torch.float16, torch.bfloat16):
        return 8
    return 4 if value.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else 1


@dataclass(frozen=True)
class _Plan:
    """How many zeros the dimensions of a product get: rows by inner, times inner by columns."""

    left: fx.Node
    right: fx.Node
    bias: fx.Node | None
    rows: int
    inner: int
    columns: int

    @property
    def operands(self) -> tuple[tuple[fx.Node, tuple[int, int]], ...]:
        """Both matrices with the zeros that their last two dimensions get."""
        return (self.left, (self.rows, self.inner)), (self.right, (self.inner, self.columns))

    def pays(self, product: fx.Node) -> bool:
        """Whether the product gets so much faster that the copies are worth it."""
        value, inner = product.meta["val"], self.left.meta["val"].shape[-1]
        copied = [
            (node, 1 + (not _is_made_by_loop(node))) for node, more in self.operands if any(more)
        ]
        if (self.rows or self.columns) and not all(map(_is_loop, _readers(product))):
            copied.append((product, 2))
        bytes_ = sum(_elements(node) * node.meta["val"].dtype.itemsize * n for node, n in copied)
        cost = bytes_ * _PER_BYTE + len(copied) * _PER_KERNEL
        saved = _elements(product) * hint(inner) * _PER_PRODUCT
        return bool(saved > _MARGIN * cost and value.dtype == self.left.meta["val"].dtype)


def _plan(product: fx.Node) -> _Plan | None:
    """What `product` needs; None where nothing is missing, or where it has another form.

    A dimension matters where it is the one along the rows in memory, of an operand or the result.
    """
    arguments: Any = product.args
    bias = arguments[0] if product.target is _aten.addmm.default else None
    left, right = arguments[-2:]
    value = product.meta["val"]
    step = alignment(value)
    if step == 1 or product.kwargs or (bias and not _is_row(bias, value.shape[-1])):
        return None
    left_t, right_t = _is_transposed(left), _is_transposed(right)
    rows, columns = (_missing(size, step) for size in value.shape[-2:])
    inner = _missing(left.meta["val"].shape[-1], step)
    plan = _Plan(
        left, right, bias,
        rows if left_t else 0, inner if right_t or not left_t else 0, columns,
    )  # fmt: skip
    return plan if plan.rows or plan.inner or plan.columns else None


def _missing(size: Any, step: int) -> int:
    return -size % step if isinstance(size, int) and size > step else 0


def _is_row(bias: Any, columns: Any) -> bool:
    shape = bias.meta["val"].shape
    return isinstance(columns, int) and tuple(shape) == (columns,)


def _is_transposed(node: fx.Node) -> bool:
    """Whether the last dimension but one is the one along the rows in memory."""
    before, last = node.meta["val"].stride()[-2:]
    return isinstance(before, int) and before == 1 and not (isinstance(last, int) and last == 1)


def _elements(node: fx.Node) -> int:
    return math.prod(hint(size) for size in node.meta["val"].shape)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a node or of views of it."""
    for user in node.users:
        if is_view(user.target):
            yield from _readers(user)
        else:
            yield user


def _is_loop(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.replace("::", ".") in LOWERINGS


def _is_made_by_loop(node: fx.Node) -> bool:
    """Whether a loop makes the node, or what it is a view of, that could write zeros beside it."""
    while is_view(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return _is_loop(node)


class _Rewrite:
    """The padded form of one product, before it; `padded` are the tensors that have zeros."""

    def __init__(self, product: fx.Node, padded: dict[Any, fx.Node]) -> None:
        self._product, self._padded = product, padded

    def run(self, plan: _Plan) -> None:
        """Put it in the place of the product."""
        product, shape = self._product, self._product.meta["val"].shape
        args = [self._with_zeros(node, more) for node, more in plan.operands]
        if plan.bias is not None:
            args.insert(0, self._with_zeros(plan.bias, (plan.columns,)))
        result = self._call(product, product.target, *args)
        for dim, more in (-2, plan.rows), (-1, plan.columns):
            if more:
                place = len(shape) + dim
                result = self._call(product, _aten.slice.Tensor, result, place, 0, shape[dim])
        if plan.rows or plan.columns:
            as_before = {"memory_format": torch.contiguous_format}
            result = self._call(product, _aten.clone.default, result, **as_before)
        product.replace_all_uses_with(result)
        product.graph.erase_node(product)

    def _with_zeros(self, node: fx.Node, more: Sequence[int]) -> fx.Node:
        """`node` with as many zeros at the ends of its last dimensions."""
        if not any(more):
            return node
        if (node, more) not in self._padded:
            self._padded[node, more] = self._pad(node, more)
        return self._padded[node, more]

    def _pad(self, node: fx.Node, more: Sequence[int]) -> fx.Node:
        if _transposes_last(node):  # what it transposes may be padded already
            base = self._with_zeros(node.args[0], more[::-1])  # type: ignore[arg-type]
            return self._call(node, node.target, base, *node.args[1:])
        widths = [number for end in reversed(more) for number in (0, end)]
        return self._call(node, _aten.constant_pad_nd.default, node, widths)

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node before the product, which comes from where `like` does."""
        with self._product.graph.inserting_before(self._product):
            node = self._product.graph.call_function(target, args, kwargs)
        node.meta = {**like.meta}
        node.meta["val"] = fake_call(node)
        return node


def _transposes_last(node: fx.Node) -> bool:
    """Whether a node transposes the last two dimensions of another."""
    rank: int = node.meta["val"].dim()
    last = {rank - 1, rank - 2}
    if node.target is _aten.t.default:
        return rank == 2
    dims: Any = node.args[1:]
    if node.target is _aten.transpose.int:
        return {dim % rank for dim in dims} == last
    if node.target is _aten.permute.default:
        return [dim % rank for dim in dims[0]] == [*range(rank - 2), rank - 1, rank - 2]
    return False
