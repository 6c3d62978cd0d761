"""Values of inference graphs in the memory that suits who reads them.

- Convolutions read channels-last memory: oneDNN has nothing to reorder there but the weight, which
  it takes from that memory, too.
- What is copied to contiguous memory later is computed in it: after a permuted convolution, a
  stream of residuals would keep the permuted strides, and each normalisation would gather rows.
- Attention reads heads where they lie, and not a contiguous copy of them.
- Convolutions of 16-bit floats are float32's where the library has none for them.

The graph's fake tensors are computed anew from there, and its outputs get the strides they had.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import fx
from weft_core.fake import detect_mode, to_fake

from weft_codegen.loops.lower.fxnodes import attribute, is_pure
from weft_codegen.tune import convolution_wins, lacks_16_bit

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16)
_LAST, _CONTIGUOUS = torch.channels_last, torch.contiguous_format
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
# Operators whose values depend on the memory of their arguments.
_READS_MEMORY = frozenset(["as_strided", "as_strided_scatter", "set_", "_reshape_alias"])


def laid_out(gm: fx.GraphModule) -> fx.GraphModule:
    """An aten graph with the same results, its values in memory that suits their readers.

    Args:
        gm: nodes carry `meta["val"]`; it is left as it is.

    Returns:
        `gm` itself where nothing would change or where the layout could be observed: symbolic
        sizes, random numbers, mutation, operators that read memory or are not torch's own.
    """
    nodes = list(gm.graph.nodes)
    if not any(map(_gains, nodes)) or not all(map(_is_blind, nodes)):
        return gm
    mode = detect_mode([node.meta.get("val") for node in nodes])
    if mode is None:
        return gm
    changed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in filter(_is_reshape, changed.graph.nodes):
        node.target, node.args = _aten.view.default, node.args[:2]
    with torch.no_grad(), mode:
        for node in filter(_is_slow, changed.graph.nodes):
            _widen(node)
        done = all(_relay(node, mode) for node in list(changed.graph.nodes))
    changed.recompile()
    return changed if done else gm


def _gains(node: fx.Node) -> bool:
    """Whether `node` reads what should lie otherwise, or is copied later."""
    reads_copies = node.target is _ATTENTION and any(map(_is_copy, node.all_input_nodes))
    return _is_onednns(node) or _is_copied_later(node) or reads_copies or _is_slow(node)


def _is_onednns(node: fx.Node) -> bool:
    return is_plain_convolution(node) and has_onednn()


def _is_copy(node: fx.Node) -> bool:
    """Whether a node is a contiguous copy."""
    return node.target is _aten.clone.default and node.kwargs.get("memory_format") is _CONTIGUOUS


def _is_copied_later(node: fx.Node) -> bool:
    """Whether a new value has permuted strides, and contiguous copies of it are made."""
    fake = node.meta.get("val")
    if not isinstance(fake, torch.Tensor) or not any(map(_is_copy, node.users)):
        return False
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    made = node.op == "call_function" and all(one.alias_info is None for one in returns)
    usual = fake.is_contiguous() or (fake.dim() == 4 and fake.is_contiguous(memory_format=_LAST))
    return made and bool(returns) and not usual


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
    pure = is_pure(node.target) or (node.target is _ATTENTION and not any(node.args[3:4]))
    return node.op != "call_function" or (pure and not reads)


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
        if _is_onednns(node):
            _lay_out(node, _LAST)
            if _copies_weight(node):
                _lay_out(node, _LAST, 1)
        elif node.target is _ATTENTION:
            node.args = fx.map_arg(node.args, _without_copy)
        try:
            value = fake_call(node)
        except (RuntimeError, ValueError):  # a view that these strides do not allow
            _lay_out(node, _CONTIGUOUS)
            value = fake_call(node)
        node.meta["before"], node.meta["val"] = node.meta.get("val"), value
        if _is_copied_later(node):
            made = _copied(node.next, node, _CONTIGUOUS)
            node.replace_all_uses_with(made, lambda user: user is not made)
    return True


def _without_copy(node: fx.Node) -> fx.Node:
    """What a contiguous copy was made of, if its rows are contiguous, too."""
    used = node.args[0] if _is_copy(node) else None
    if isinstance(used, fx.Node) and used.meta["val"].stride()[-1:] == (1,):
        return used
    return node


def fake_call(node: fx.Node) -> Any:
    """The fake of a call, from those of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_slow(node: fx.Node) -> bool:
    """Whether a node is a convolution of 16-bit floats for which the library has no kernel."""
    if node.target is not _aten.convolution.default:
        return False
    fake = node.meta["val"]
    low = fake.dtype in (torch.bfloat16, torch.float16) and fake.device.type == "cpu"
    return low and lacks_16_bit()


def _widen(node: fx.Node) -> None:
    """Compute a convolution in float32, whose result is rounded once."""
    before, cast = node.meta["val"], _aten._to_copy.default
    with node.graph.inserting_before(node):
        for used in node.all_input_nodes:
            wide = node.graph.call_function(cast, (used,), {"dtype": torch.float32})
            wide.meta = {**used.meta, "val": fake_call(wide)}
            node.replace_input_with(used, wide)
    node.meta["val"] = fake_call(node)
    with node.graph.inserting_after(node):
        narrow = node.graph.call_function(cast, (node,), {"dtype": before.dtype})
    narrow.meta = {**node.meta, "val": before}  # whose strides are eager's
    node.replace_all_uses_with(narrow, lambda user: user is not narrow)


def _copies_weight(node: fx.Node) -> bool:
    """Whether ATen would copy a convolution's weight to channels-last memory, which takes it three
    times as long as a kernel of ours; our own convolution takes the weight as it is."""
    weight = node.args[1].meta["val"]  # type: ignore[union-attr]
    batch, filters, *size = fake_call(node).shape
    channels, *window = weight.shape[1:]
    own = node.args[-1] == 1 and weight.dtype is torch.float32
    pixels, places = batch * math.prod(size), math.prod(window)
    return places > 1 and not (own and convolution_wins(pixels, filters, channels * places))


def _lay_out(node: fx.Node, memory_format: torch.memory_format, position: int = 0) -> None:
    """Give `node` an argument in this layout."""
    used = node.args[position]
    if isinstance(used, fx.Node) and isinstance(used.meta["val"], torch.Tensor):
        if not used.meta["val"].is_contiguous(memory_format=memory_format):
            node.update_arg(position, _copied(node, used, memory_format))


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
            known = (_CONTIGUOUS, *([_LAST] if old.dim() == 4 else []))
            formats = [f for f in known if old.is_contiguous(memory_format=f)]
            if not formats:
                return False
            changed[node] = _copied(output, node, formats[0])
            if changed[node].meta["val"].stride() != old.stride():
                return False
    output.args = fx.map_arg(output.args, lambda node: changed.get(node, node))
    return True
