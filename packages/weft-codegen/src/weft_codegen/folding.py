"""Convolutions with constant weights, made ready once.

`fold_affine`: a convolution scaled and shifted by constants, one a channel (BatchNorm's inference),
is the convolution with other weights: (w * x + b) * s + t = (w s) * x + (b s + t).
`pack_weights`: oneDNN reads weights in an order of its own, and makes it from ours in each call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from weft_codegen.layout import has_onednn, is_plain_convolution
from weft_codegen.loops.lower.fxnodes import fake_call
from weft_codegen.tune import linear_wins

_aten = torch.ops.aten
# Elements of a weight, and rows beside it, from which a product is faster with the weight packed.
_LEAST, _ROWS = 1 << 18, 8
_SCALES = frozenset([_aten.mul.Tensor, _aten.div.Tensor])
_SHIFTS = frozenset([_aten.add.Tensor, _aten.sub.Tensor])
_SYMMETRIC = frozenset([_aten.mul.Tensor, _aten.add.Tensor])


def fold_affine(graph: fx.Graph, constants: set[fx.Node]) -> None:
    """Fold scales and shifts into float32 convolutions with constant weights, in place.

    Args:
        constants: nodes that have the same value in every call; new ones are added.
    """
    for conv in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        folded: fx.Node | None = conv
        while folded is not None:
            folded = _fold_user(folded, constants)


def _fold_user(conv: fx.Node, constants: set[fx.Node]) -> fx.Node | None:
    """Fold the operator after `conv` into it; the new convolution, or None."""
    user = next(iter(conv.users)) if len(conv.users) == 1 else None
    _, weight, bias, *rest = conv.args
    if user is None or user.target not in _SCALES | _SHIFTS or user.kwargs or rest[3]:
        return None
    other = user.args[1] if user.args[0] is conv else user.args[0]
    if user.args[0] is not conv and user.target not in _SYMMETRIC:
        return None
    if not all(operand is None or operand in constants for operand in (weight, bias, other)):
        return None
    fake, channels = conv.meta["val"], weight.meta["val"].shape[0]  # type: ignore[union-attr]
    if fake.dtype is not torch.float32 or not _one_a_channel(other, fake.dim(), channels):
        return None

    call = functools.partial(_constant, constants, user.graph)
    with user.graph.inserting_before(user):
        flat = call(_aten.expand.default, call(_aten.reshape.default, other, [-1]), [channels])
        if user.target in _SCALES:
            sides = [1] * (weight.meta["val"].dim() - 1)  # type: ignore[union-attr]
            scale = call(_aten.reshape.default, flat, [channels, *sides])
            weight = call(user.target, weight, scale)
            bias = None if bias is None else call(user.target, bias, flat)
        elif bias is not None:
            bias = call(user.target, bias, flat)
        else:
            bias = flat if user.target is _aten.add.Tensor else call(_aten.neg.default, flat)
        made = user.graph.call_function(conv.target, (conv.args[0], weight, bias, *rest))  # type: ignore[arg-type]
    _replace(made, user, conv)
    return made


def _one_a_channel(other: Any, dims: int, channels: int) -> bool:
    """Whether `other` (float32) broadcasts against a convolution's result one value a channel."""
    fake = other.meta["val"]
    shape = (*[1] * (dims - fake.dim()), *fake.shape)
    allowed = (1, channels, *[1] * (dims - 2))
    return (
        fake.dtype is torch.float32
        and len(shape) == dims
        and all(n in (1, most) for n, most in zip(shape, allowed, strict=True))
    )


def pack_weights(graph: fx.Graph, constants: set[fx.Node]) -> None:
    """Pack constant weights of float32 convolutions in channels-last memory, and of large float32
    products, in place.

    Args:
        constants: nodes that have the same value in every call; new ones are added.
    """
    if not has_onednn():
        return
    for op in (_aten.mm.default, _aten.addmm.default):
        for product in graph.find_nodes(op="call_function", target=op):
            _pack_product(product, constants)
    for conv in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        if not is_plain_convolution(conv) or not all(map(_fits, (conv, conv.args[0]))):
            continue
        x, weight, bias, stride, padding, dilation, _, _, groups = conv.args
        if weight not in constants or any(len(sizes) != 2 for sizes in (stride, padding, dilation)):
            continue
        geometry = (padding, stride, dilation, groups)
        with graph.inserting_before(conv):
            size = list(x.meta["val"].shape)
            pack = torch.ops.mkldnn._reorder_convolution_weight.default
            packed = _constant(constants, graph, pack, weight, *geometry, size, like=weight)
            run = torch.ops.mkldnn._convolution_pointwise.default
            made = graph.call_function(run, (x, packed, bias, *geometry, "none", [], ""))
        _replace(made, conv)


def _pack_product(node: fx.Node, constants: set[fx.Node]) -> None:
    """Pack the right operand of an mm or addmm, if that is constant and large enough to gain."""
    operands: list[Any] = list(node.args)
    *biases, x, weight = operands
    if node.kwargs or weight not in constants or not _is_float32(x, 2):
        return
    fake = weight.meta["val"]
    plain_bias = all(
        _is_float32(bias, 1) and bias.meta["val"].shape == fake.shape[1:] for bias in biases
    )
    rows = x.meta["val"].shape[0]
    if rows < _ROWS or fake.numel() < _LEAST or not plain_bias:
        return

    depth, columns = fake.shape
    own = linear_wins(rows, columns, depth, packed=True)
    if own and fake.stride(0) == 1:
        return  # which takes the weight of a linear layer as it is
    call = functools.partial(_constant, constants, node.graph)
    with node.graph.inserting_before(node):
        turned = call(_aten.permute.default, weight, [1, 0])
        plain = call(_aten.clone.default, turned, memory_format=torch.contiguous_format)
        if own:
            node.replace_input_with(weight, call(_aten.permute.default, plain, [1, 0]))
            return
        packed = call(torch.ops.mkldnn._reorder_linear_weight.default, plain, rows, like=plain)
        bias = biases[0] if biases else None
        run = torch.ops.mkldnn._linear_pointwise.default
        made = node.graph.call_function(run, (x, packed, bias, "none", [], ""))
    _replace(made, node)


def _constant(
    constants: set[fx.Node],
    graph: fx.Graph,
    op: Any,
    *args: Any,
    like: fx.Node | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Add a call to `constants`; `like` has its shape where nobody may look inside the result."""
    made = graph.call_function(op, args, kwargs)
    made.meta = {"val": fake_call(made) if like is None else like.meta["val"]}
    constants.add(made)
    return made


def _is_float32(node: Any, dims: int) -> bool:
    """Whether a value is a float32 tensor on the CPU of so many dimensions, all of known size."""
    fake = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (
        isinstance(fake, torch.Tensor)
        and fake.dim() == dims
        and fake.dtype is torch.float32
        and fake.device.type == "cpu"
        and all(type(size) is int and size > 0 for size in fake.shape)
    )


def _fits(node: Any) -> bool:
    """Whether a value is float32, of known sizes above zero, and in channels-last memory."""
    return _is_float32(node, 4) and bool(
        node.meta["val"].is_contiguous(memory_format=torch.channels_last)
    )


def _replace(made: fx.Node, *replaced: fx.Node) -> None:
    """Put `made` in the place of a chain, given from its end."""
    made.meta = dict(replaced[0].meta)
    replaced[0].replace_all_uses_with(made)
    for node in replaced:
        node.graph.erase_node(node)
