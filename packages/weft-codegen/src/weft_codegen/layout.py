"""Convolutions of inference graphs in channels-last memory: oneDNN has nothing to reorder there.

The input of each convolution is laid out that way, the graph's fake tensors are computed anew from
there, and its outputs get the strides they had.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx
from weft_core.fake import detect_mode, to_fake

from weft_codegen.loops.lower.fxnodes import attribute, is_pure

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16)
_LAST = torch.channels_last
# Operators whose values depend on the memory of their arguments.
_READS_MEMORY = frozenset(["as_strided", "as_strided_scatter", "set_", "_reshape_alias"])


def in_channels_last(gm: fx.GraphModule) -> fx.GraphModule:
    """An aten graph with the same results, its 2-d convolutions in channels-last memory.

    Args:
        gm: nodes carry `meta["val"]`; it is left as it is.

    Returns:
        `gm` itself where nothing would change or where the layout could be observed: symbolic
        sizes, random numbers, mutation, operators that read memory or are not torch's own.
    """
    nodes = list(gm.graph.nodes)
    if not any(map(is_plain_convolution, nodes)) or not all(map(_is_blind, nodes)):
        return gm
    values = [node.meta.get("val") for node in nodes]
    mode = detect_mode(values)
    if mode is None or not has_onednn():
        return gm
    changed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in filter(_is_reshape, changed.graph.nodes):
        node.target, node.args = _aten.view.default, node.args[:2]
    with torch.no_grad(), mode:
        done = all(_relay(node, mode) for node in list(changed.graph.nodes))
    changed.recompile()
    return changed if done else gm


def has_onednn() -> bool:
    """Whether ATen's convolutions may use oneDNN."""
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def is_plain_convolution(node: fx.Node) -> bool:
    """Whether a node is a 2-d convolution, not transposed, of a dtype that oneDNN has on CPUs."""
    if node.target is not _aten.convolution.default:
        return False
    x, weight, *_, transposed, _, _ = node.args
    fakes = [operand.meta.get("val") for operand in (x, weight) if isinstance(operand, fx.Node)]
    return not transposed and all(
        isinstance(fake, torch.Tensor)
        and fake.dim() == 4
        and fake.dtype in _DTYPES
        and fake.device.type == "cpu"
        for fake in fakes
    )


def _is_blind(node: fx.Node) -> bool:
    """Whether the results of `node` do not depend on how its arguments lie in memory."""
    fakes = node.meta.get("val")
    for fake in fakes if isinstance(fakes, list | tuple) else [fakes]:
        sizes = fake.shape if isinstance(fake, torch.Tensor) else (fake,)
        if any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes):
            return False
    reads = getattr(node.target, "_opname", "") in _READS_MEMORY and not _is_reshape(node)
    return node.op != "call_function" or (is_pure(node.target) and not reads)


def _is_reshape(node: fx.Node) -> bool:
    """Whether `as_strided` does what `view` does, as in torch's group norm: one contiguous tensor
    is taken for another."""
    if node.target is not _aten.as_strided.default or len(node.args) != 3:
        return False
    used, fake = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    contiguous = used.is_contiguous() and fake.is_contiguous()
    return bool(contiguous and used.numel() == fake.numel())


def _relay(node: fx.Node, mode: Any) -> bool:
    """Compute the fake of `node` from those of its arguments; whether that worked."""
    if node.op == "get_attr":
        node.meta["val"] = to_fake(mode, attribute(node))
    elif node.op == "output":
        return _restore(node)
    elif node.op == "call_function":
        if is_plain_convolution(node):
            _lay_out(node, _LAST)
        try:
            value = fake_call(node)
        except (RuntimeError, ValueError):  # a view that these strides do not allow
            _lay_out(node, torch.contiguous_format)
            value = fake_call(node)
        node.meta["before"], node.meta["val"] = node.meta.get("val"), value
    return True


def fake_call(node: fx.Node) -> Any:
    """The fake of a call, from those of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _lay_out(node: fx.Node, memory_format: torch.memory_format) -> None:
    """Give `node` its first argument in this layout."""
    used = node.args[0]
    if isinstance(used, fx.Node) and isinstance(used.meta["val"], torch.Tensor):
        if not used.meta["val"].is_contiguous(memory_format=memory_format):
            node.update_arg(0, _copied(node, used, memory_format))


def _copied(before: fx.Node, used: fx.Node, memory_format: torch.memory_format) -> fx.Node:
    with before.graph.inserting_before(before):
        clone = before.graph.call_function(
            _aten.clone.default, (used,), {"memory_format": memory_format}
        )
    clone.meta = {**used.meta, "val": fake_call(clone)}
    return clone


def _restore(output: fx.Node) -> bool:
    """Give outputs whose strides changed those they had; whether that is possible."""
    changed: dict[fx.Node, fx.Node] = {}
    for node in output.all_input_nodes:
        old, new = node.meta.get("before"), node.meta["val"]
        if isinstance(old, torch.Tensor) and old.stride() != new.stride():
            known = (torch.contiguous_format, *([_LAST] if old.dim() == 4 else []))
            formats = [f for f in known if old.is_contiguous(memory_format=f)]
            if not formats:
                return False
            changed[node] = _copied(output, node, formats[0])
            if changed[node].meta["val"].stride() != old.stride():
                return False
    output.args = fx.map_arg(output.args, lambda node: changed.get(node, node))
    return True
