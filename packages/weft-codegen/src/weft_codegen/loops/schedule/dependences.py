"""Which item must run before which, and an order of items that keeps values alive briefly."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import torch
from weft_core.collectives import is_collective
from weft_core.eager_error_probe import may_raise

from weft_codegen.loops import program as ir

Edges = dict[int, set[int]]


def live_items(lowered: ir.Program) -> list[ir.Step]:
    """The items whose results somebody needs, random draws and checks."""
    needed = {output.name for output in lowered.outputs if isinstance(output, ir.BufferRef)}
    needed.update(lowered.mutations)
    kept: list[ir.Step] = []
    for item in reversed(lowered.steps):
        if needed.intersection(ir.step_writes(item)) or _draws(item) or _checks(item):
            kept.append(item)
            needed.update(ir.step_reads(item))
    return kept[::-1]


def _draws(item: ir.Step) -> bool:
    """Whether an item draws random numbers, or waits for other processes."""
    if not isinstance(item, ir.Extern):
        return False
    drawn = torch.Tag.nondeterministic_seeded in item.op.tags
    return drawn or is_collective(item.op)


def _checks(item: ir.Step) -> bool:
    return isinstance(item, ir.Extern) and (not item.op._schema.returns or may_raise(item.op))


def dependences(items: list[ir.Step], mutated: frozenset[str]) -> tuple[Edges, Edges]:
    """(before, after) of each item: writer and reader, reader and later writer, draw and draw.

    A check comes before later checks and before inputs are written: it may raise.
    """
    roots = ir.storage_roots(items)
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    last_draw: int | None = None
    last_check: int | None = None
    edges: Edges = {}
    for order, item in enumerate(items):
        before: set[int] = set()
        for name in ir.step_reads(item):
            root = roots.get(name, name)
            before.update(w for w in (writer.get(name), writer.get(root)) if w is not None)
            readers.setdefault(root, []).append(order)
        for name in ir.step_writes(item):
            if name in mutated or (isinstance(item, ir.Extern) and name in item.mutates):
                before.update(readers.get(name, ()))
                before.update(w for w in (writer.get(name), last_check) if w is not None)
            writer[name] = order
        if _draws(item):
            before.update(() if last_draw is None else (last_draw,))
            last_draw = order
        if _checks(item):
            before.update(() if last_check is None else (last_check,))
            last_check = order
        before.discard(order)
        edges[order] = before
    after: Edges = {order: set() for order in edges}
    for order, before in edges.items():
        for earlier in before:
            after[earlier].add(order)
    return edges, after


def as_late_as_possible(items: list[ir.Step], mutated: frozenset[str]) -> list[ir.Step]:
    """`items` with each one just before the first that needs it; what only makes an output, early.

    Backward graphs begin with everything that is recomputed; run in that order, recomputation
    would save no memory. And they may end with what is done to finished gradients (the user's
    hooks, copies): left there, everything that the gradients are made of would wait for it.
    """
    before, after = dependences(items, mutated)
    ends = _ends(after)
    place: dict[int, int] = {}
    for order in reversed(range(len(items))):
        place[order] = min((place[user] for user in after[order]), default=order)
    start = dict.fromkeys(ends.values(), 0)
    for order, end in ends.items():
        outside = [place[source] for source in before[order] if ends.get(source) != end]
        start[end] = max([start[end], *outside])
    place.update((order, start[end]) for order, end in ends.items())
    return [items[order] for order in in_order(before, after, place)]


def in_order(before: Edges, after: Edges, place: dict[int, int]) -> Iterator[int]:
    """What the edges join, each after what comes before it and otherwise by its place."""
    waiting = {order: len(sources) for order, sources in before.items()}
    ready = [(place.get(order, order), order) for order, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    while ready:
        _, order = heapq.heappop(ready)
        yield order
        for user in after[order]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, (place.get(user, user), user))


def _ends(after: Edges) -> dict[int, int]:
    """The items that serve one final item only, and that item itself, by item."""
    ends: dict[int, int] = {}
    for order in sorted(after, reverse=True):
        served = {ends.get(user) for user in after[order]}
        if not served:
            ends[order] = order
        elif len(served) == 1 and None not in served:
            ends[order] = served.pop()  # type: ignore[assignment]
    return ends
