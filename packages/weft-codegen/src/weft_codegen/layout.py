"""Values of inference and joint graphs in the memory that suits who reads them.

- Convolutions read channels-last memory: oneDNN has nothing to reorder there but the weight, which
  it takes from that memory, too; and the tensor cores of a GPU take products of whole channels.
- What is copied to contiguous memory later is computed in it: after a permuted convolution, a
  stream of residuals would keep the permuted strides, and each normalisation would gather rows.
- Attention on a CPU reads heads where they lie, and not a contiguous copy of them.
- In inference, convolutions of 16-bit floats are float32's where the library has none for them.

The graph's fake tensors are computed anew from there. Its outputs get the strides they had, and so
does what an operator reads whose results depend on how its arguments lie in memory.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from weft_core.fake import detect_mode, to_fake
from weft_core.node_effects import has_effect

from weft_codegen.loops.lower.fxnodes import attribute, fake_call
from weft_codegen.loops.schedule.attention import FLASH
from weft_codegen.tune import convolution_wins
from weft_codegen.widened import is_slow, widen

_aten = torch.ops.aten
_LAST, _CONTIGUOUS = torch.channels_last, torch.contiguous_format
# Convolutions, and how many tensors they begin with; the last one is the weight.
_CONVOLUTIONS: dict[Any, int] = {
    _aten.convolution.default: 2,
    _aten.convolution_backward.default: 3,
}
# Operators whose values depend on the memory of their arguments.
_READS_MEMORY = frozenset(["as_strided", "as_strided_scatter", "set_", "_reshape_alias"])
_Places = Callable[[fx.Node], range]


def laid_out(gm: fx.GraphModule, *, joint: bool = False) -> fx.GraphModule:
    """An aten graph with the same results, its values in memory that suits their readers.

    Args:
        gm: nodes carry `meta["val"]`; it is left as it is.
        joint: whether it is a forward with its backward. oneDNN gains nothing there.

    Returns:
        `gm` itself where nothing would change, where sizes are symbolic, where operators write to
        values of the graph, or where a GPU convolves groups of several channels.
    """
    nodes = list(gm.graph.nodes)
    places = _for_gpus if joint else _in_channels_last
    slow = not joint and any(map(is_slow, nodes))
    gains = slow or any(_gains(node, places) for node in nodes)
    if not gains or any(map(_forbids, nodes)):
        return gm
    mode = detect_mode([node.meta.get("val") for node in nodes])
    if mode is None:
        return gm
    changed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in filter(_is_reshape, changed.graph.nodes):
        node.target, node.args = _aten.view.default, node.args[:2]
    with torch.no_grad(), mode:
        layout = _Layout(mode, places)
        for node, before in widen(changed.graph) if slow else ():
            layout.note(node, before)
        done = layout.run(changed.graph)
    changed.recompile()
    return changed if done else gm


def _gains(node: fx.Node, places: _Places) -> bool:
    """Whether `node` reads what should lie otherwise, or is copied later."""
    reads_copies = node.target is FLASH and any(map(_is_copy, node.all_input_nodes))
    return bool(places(node)) or _is_copied_later(node) or reads_copies


def _forbids(node: fx.Node) -> bool:
    """Whether the graph of `node` stays as it is."""
    fakes = node.meta.get("val")
    for fake in fakes if isinstance(fakes, list | tuple) else [fakes]:
        sizes = fake.shape if isinstance(fake, torch.Tensor) else (fake,)
        if any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes):
            return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable and not _writes_an_input(node):
        return True
    operands = _operands(node)
    if not operands or not _is_cuda(operands[-1]):
        return False
    groups: Any = node.args[len(operands) + 6]
    # cuDNN's kernels for groups of several channels are slower in channels-last memory.
    return bool(groups > 1 and operands[-1].shape[1] > 1)


def _is_cuda(fake: torch.Tensor) -> bool:
    return fake.device.type == "cuda"


def _writes_an_input(node: fx.Node) -> bool:
    """Whether a node writes what was computed to an input; that has any layout."""
    base = node.args[0] if node.target is _aten.copy_.default else None
    return isinstance(base, fx.Node) and base.op == "placeholder"


def _operands(node: fx.Node) -> list[torch.Tensor]:
    """The fakes of a 2-d convolution, not transposed, or of its backward; the weight comes last."""
    count = _CONVOLUTIONS.get(node.target, 0)
    nodes = [used for used in node.args[:count] if isinstance(used, fx.Node)]
    fakes = [used.meta.get("val") for used in nodes]
    found = [fake for fake in fakes if isinstance(fake, torch.Tensor) and fake.dim() == 4]
    return found if count and len(found) == count and not node.args[count + 4] else []


def _for_gpus(node: fx.Node) -> range:
    """The positions of what a convolution on a GPU multiplies, if tensor cores do."""
    operands = _operands(node)
    half = {fake.dtype for fake in operands} <= {torch.float16, torch.bfloat16}
    single = {fake.dtype for fake in operands} == {torch.float32}
    cores = half or (single and torch.backends.cudnn.allow_tf32)
    return range(len(operands) if cores and all(map(_is_cuda, operands)) else 0)


def _in_channels_last(node: fx.Node) -> range:
    """The positions of what a convolution reads faster in channels-last memory."""
    if has_onednn() and is_plain_convolution(node):
        return range(2 if _copies_weight(node) else 1)
    return _for_gpus(node)


def _copies_weight(node: fx.Node) -> bool:
    """Whether ATen would copy a convolution's weight to channels-last memory, which takes it three
    times as long as a kernel of ours; our own convolution takes the weight as it is."""
    weight = node.args[1].meta["val"]  # type: ignore[union-attr]
    batch, filters, *size = node.meta["val"].shape
    channels, *window = weight.shape[1:]
    own = node.args[-1] == 1 and weight.dtype is torch.float32
    pixels, places = batch * math.prod(size), math.prod(window)
    return places > 1 and not (own and convolution_wins(pixels, filters, channels * places))


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
    operands = _operands(node) if node.target is _aten.convolution.default else []
    return bool(operands) and all(
        fake.dtype in (torch.float32, torch.bfloat16) and fake.device.type == "cpu"
        for fake in operands
    )


def _is_blind(node: fx.Node) -> bool:
    """Whether the results of `node` do not depend on how its arguments lie in memory."""
    if node.op != "call_function" or _writes_an_input(node) or node.target is operator.getitem:
        return node.op != "output"
    known = getattr(node.target, "namespace", "") in ("aten", "prims") and not has_effect(node)
    return known and getattr(node.target, "_opname", "") not in _READS_MEMORY


def _is_reshape(node: fx.Node) -> bool:
    """Whether `as_strided` does what `view` does, as in torch's group norm: one contiguous tensor
    is taken for another."""
    if node.target is not _aten.as_strided.default or len(node.args) != 3:
        return False
    used, fake = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    contiguous = used.is_contiguous() and fake.is_contiguous()
    return bool(contiguous and used.numel() == fake.numel())


class _Layout:
    """Gives the values of a graph their memory, from the first node on."""

    def __init__(self, mode: Any, places: _Places) -> None:
        self._mode, self._places = mode, places
        # The fakes that nodes had which lie otherwise now.
        self._before: dict[fx.Node, torch.Tensor] = {}
        self._copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}

    def run(self, graph: fx.Graph) -> bool:
        """Compute the fakes of what changes anew; whether that worked."""
        return all(map(self._visit, list(graph.nodes)))

    def _visit(self, node: fx.Node) -> bool:
        if node.op == "get_attr" and isinstance(held := attribute(node), torch.Tensor):
            node.meta["val"] = to_fake(self._mode, held)
        if not _is_blind(node) and not self._restore(node):
            return False
        if node.op != "call_function":
            return True
        args = node.args
        for position in self._places(node):
            self._lay_out(node, position, _LAST)
        if node.target is FLASH:
            node.args = fx.map_arg(node.args, _without_copy)
        if node.args != args or any(used in self._before for used in node.all_input_nodes):
            self._compute(node)
        if _is_copied_later(node):
            made = self._copied(node.next, node, _CONTIGUOUS)
            node.replace_all_uses_with(made, lambda user: user is not made)
        return True

    def _compute(self, node: fx.Node) -> None:
        """Compute the fake of `node` from those of its arguments."""
        try:
            value = fake_call(node)
        except (RuntimeError, ValueError):  # a view that these strides do not allow
            self._lay_out(node, 0, _CONTIGUOUS)
            value = fake_call(node)
        old, node.meta["val"] = node.meta.get("val"), value
        self.note(node, old)

    def note(self, node: fx.Node, old: Any) -> None:
        """Remember the fake tensor that was in the place of `node`, if it lay otherwise."""
        new = node.meta["val"]
        one = isinstance(old, torch.Tensor)
        # A tuple of results: those that lie otherwise are taken out of it next.
        if (one and old.stride() != new.stride()) or isinstance(old, list | tuple):
            self._before[node] = old

    def _lay_out(self, node: fx.Node, position: int, memory_format: torch.memory_format) -> None:
        """Give `node` its argument there in this layout."""
        used = node.args[position]
        if isinstance(used, fx.Node) and isinstance(used.meta["val"], torch.Tensor):
            if not used.meta["val"].is_contiguous(memory_format=memory_format):
                node.update_arg(position, self._copied(node, used, memory_format))

    def _copied(
        self, before: fx.Node, used: fx.Node, memory_format: torch.memory_format
    ) -> fx.Node:
        if (known := self._copies.get((used, memory_format))) is not None:
            return known
        with before.graph.inserting_before(before):
            clone = before.graph.call_function(
                _aten.clone.default, (used,), {"memory_format": memory_format}
            )
        clone.meta = {**used.meta, "val": fake_call(clone)}
        self._copies[used, memory_format] = clone
        self.note(clone, self._before.get(used, used.meta["val"]))
        return clone

    def _restore(self, node: fx.Node) -> bool:
        """Give `node` what it reads in the strides that it had; whether that is possible."""
        changed: dict[fx.Node, fx.Node] = {}
        for used in node.all_input_nodes:
            old = self._before.get(used)
            if not isinstance(old, torch.Tensor):
                continue
            known = (_CONTIGUOUS, *([_LAST] if old.dim() == 4 else []))
            formats = [f for f in known if old.is_contiguous(memory_format=f)]
            if not formats:
                return False
            changed[used] = self._copied(node, used, formats[0])
            if changed[used].meta["val"].stride() != old.stride():
                return False
        node.args, node.kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda used: changed.get(used, used)
        )
        return True


def _without_copy(node: fx.Node) -> fx.Node:
    """What a contiguous copy was made of, if its rows are contiguous, too."""
    used = node.args[0] if _is_copy(node) else None
    if isinstance(used, fx.Node) and used.meta["val"].stride()[-1:] == (1,):
        return used
    return node
