"""Join small collectives of a graph: one message costs less than several.

    wait(all_reduce(a)), wait(all_reduce(b))  ->  split(wait(all_reduce(cat(a, b))))

Those of one bucket are of one kind, dtype, reduction and process group, and none needs what another
has sent. A bucket starts where the first of its results is used.

Ranks have to join alike, or they wait for each other for ever. What is decided here follows from
the collectives' order and sizes, and from what they depend on. For gathers of what is nearly an
input (FSDP's parameters) ranks agree about that. Others, which a rank's own branch may make depend
on each other, are joined where the program asks for it.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from weft_core.collectives import is_collective, is_wait
from weft_core.node_effects import has_effect

_aten = torch.ops.aten
_PREFIX = "_c10d_functional."
_KINDS = {
    f"{_PREFIX}{name}{suffix}.default": f"{name}.default"
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    for suffix in ("", "_coalesced")
}
"""Collectives that can be joined, and what they become: that of a single tensor."""
_NEAR = "view reshape cat constant_pad_nd _to_copy convert_element_type clone slice".split()  # noqa: SIM905


@dataclass(frozen=True)
class _Collective:
    """A collective, and for each tensor that it sends the node that waits for the result."""

    node: fx.Node
    waits: tuple[fx.Node, ...]
    key: tuple[Any, ...]
    bytes: int

    def sent(self) -> list[fx.Node]:
        """Return the tensors that it sends now: others may have been joined before it."""
        given: Any = self.node.args[0]
        return [given] if isinstance(given, fx.Node) else list(given)


def join_collectives(gm: fx.GraphModule, limit: int, every: bool) -> fx.GraphModule:
    """A graph with the same results, whose small collectives are sent together.

    Args:
        gm: an aten graph whose nodes carry `meta["val"]`; it is left as it is.
        limit: bytes of a bucket, as the collectives send or receive them.
        every: join collectives of all kinds, not gathers of parameters alone.

    Returns:
        `gm` itself where nothing is joined.
    """
    if not limit or not any(str(node.target) in _KINDS for node in gm.graph.nodes):
        return gm
    changed = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    buckets = [b for b in _buckets(changed.graph, limit, every) if sum(len(c.waits) for c in b) > 1]
    if not buckets:
        return gm
    for bucket in buckets:
        with changed.graph.inserting_before(changed.graph.output_node()):
            _join(changed.graph, bucket)
    _sort(changed.graph)
    changed.recompile()
    return changed


def _buckets(graph: fx.Graph, limit: int, every: bool) -> list[list[_Collective]]:
    """Collectives in groups that may start together."""
    behind: dict[fx.Node, int] = {}  # the collectives that a node depends on, as bits
    depends: list[int] = []  # the same of each collective, then of all in its bucket
    places: list[int] = []
    buckets: list[list[_Collective]] = []
    effect: fx.Node | None = None
    for node in graph.nodes:
        sources = [*node.all_input_nodes, *([effect] if effect and _is_effect(node) else [])]
        bits = 0
        for source in sources:
            bits |= behind[source]
        effect = node if _is_effect(node) else effect
        if is_collective(node.target) and not is_wait(node.target):
            one = _candidate(node, limit, every)
            place = (
                len(buckets) if one is None else _place(one, bits, buckets, depends, places, limit)
            )
            if place == len(buckets):
                buckets.append([])
            depends.append(bits)
            places.append(place)
            buckets[place] += [one] if one else []
            bits |= 1 << (len(places) - 1)
        behind[node] = bits
    return buckets


def _place(
    one: _Collective, bits: int, buckets: list[list[_Collective]],
    depends: list[int], places: list[int], limit: int,
) -> int:  # fmt: skip
    """The last bucket that has room, and which `one` does not need; or a new one."""
    before, pending = set[int](), bits
    while pending:
        index = pending.bit_length() - 1
        pending &= ~(1 << index)
        if places[index] not in before:
            before.add(places[index])
            for other, place in enumerate(places):
                pending |= depends[other] if place == places[index] else 0
    for place in reversed(range(len(buckets))):
        bucket = buckets[place]
        if bucket and bucket[0].key == one.key and place not in before:
            return place if sum(c.bytes for c in bucket) + one.bytes <= limit else len(buckets)
    return len(buckets)


def _candidate(node: fx.Node, limit: int, every: bool) -> _Collective | None:
    """What is to be joined about a collective, or None."""
    kind = _KINDS.get(str(node.target))
    given: Any = node.args[0]
    if kind is None or node.kwargs or not (every or ("gather" in kind and _is_near(node))):
        return None
    sent = (given,) if isinstance(given, fx.Node) else tuple(given)
    results = [node]
    if not isinstance(given, fx.Node):
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        results = [items[k] for k in range(len(sent)) if k in items]
        if not len(results) == len(sent) == len(node.users):
            return None
    waits = [user for result in results for user in result.users]
    values = [one.meta.get("val") for one in (*sent, *waits)]
    if len(waits) != len(sent) or not all(is_wait(w.target) for w in waits):
        return None
    if not all(map(_is_plain, values)) or len({(v.dtype, v.device) for v in values}) != 1:
        return None
    size = max(sum(v.nbytes for v in half) for half in (values[: len(sent)], values[len(sent) :]))
    key = kind, *node.args[1:], values[0].dtype, values[0].device
    return _Collective(node, tuple(waits), key, size) if size <= limit else None


def _is_plain(value: Any) -> bool:
    static = isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in value.shape)
    return static and value.dim() > 0 and value.is_contiguous() and not value.is_complex()


def _is_near(node: fx.Node) -> bool:
    """Whether a collective sends inputs, as they are or cast and laid out anew."""
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        if source.op == "placeholder":
            continue
        if getattr(source.target, "_opname", None) not in _NEAR:
            return False
        pending += source.all_input_nodes
    return True


def _is_effect(node: fx.Node) -> bool:
    return has_effect(node) and not is_collective(node.target)


def _join(graph: fx.Graph, bucket: list[_Collective]) -> None:
    """Put one collective in the place of several."""
    name, *arguments = bucket[0].key[:-2]
    target = getattr(torch.ops._c10d_functional, name.partition(".")[0]).default

    def call(function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(function, args, kwargs)
        node.meta = {"val": function(*fx.map_arg(args, lambda one: one.meta["val"]), **kwargs)}
        node.meta |= {k: v for k, v in bucket[0].node.meta.items() if k != "val"}
        return node

    sent = [tensor for one in bucket for tensor in one.sent()]
    waits = [wait for one in bucket for wait in one.waits]
    scattered, gathered = "scatter" in name, "gather" in name
    ranks = arguments[-2] if scattered or gathered else 1
    rows = [call(_aten.view.default, x, [ranks, -1] if scattered else [-1]) for x in sent]
    flat = call(_aten.cat.default, rows, 1 if scattered else 0)
    flat = call(_aten.view.default, flat, [-1]) if scattered else flat
    received = call(torch.ops._c10d_functional.wait_tensor.default, call(target, flat, *arguments))
    shapes = [tuple(wait.meta["val"].shape) for wait in waits]
    counts = [math.prod(shape) // (ranks if gathered else 1) for shape in shapes]
    if gathered:
        received = call(_aten.view.default, received, [ranks, -1])
    start = 0
    for wait, shape, count in zip(waits, shapes, counts, strict=True):
        piece = call(_aten.slice.Tensor, received, int(gathered), start, start + count)
        if gathered:
            piece = call(_aten.clone.default, piece, memory_format=torch.contiguous_format)
        wait.replace_all_uses_with(call(_aten.view.default, piece, list(shape)))
        start += count
    for one in bucket:
        for node in dict.fromkeys((*one.waits, *one.node.users, one.node)):
            graph.erase_node(node)


def _sort(graph: fx.Graph) -> None:
    """Move nodes before those that use them; what has an effect stays in order."""
    before: dict[fx.Node, list[fx.Node]] = {}
    effect: fx.Node | None = None
    for node in graph.nodes:
        before[node] = [*node.all_input_nodes, *([effect] if effect and _is_effect(node) else [])]
        effect = node if _is_effect(node) else effect
    order: dict[fx.Node, None] = {}
    for node in graph.nodes:
        _visit(node, before, order)
    first = next(iter(order))
    for previous, node in zip(order, list(order)[1:]):
        previous.append(node)
    assert next(iter(graph.nodes)) is first


def _visit(node: fx.Node, before: dict[fx.Node, list[fx.Node]], order: dict[fx.Node, None]) -> None:
    pending = [node]
    while pending:
        missing = [source for source in before[pending[-1]] if source not in order]
        if missing:
            pending += reversed(missing)
        else:
            order.setdefault(pending.pop())
