"""Which loop nodes share a kernel: greedy joining along data flow, without making cycles.

Each node in graph order tries to join the groups that make what it reads, the nearest first, then
those that read the same elements. The reasons of refusals go to the `fusion` log.
"""

from __future__ import annotations

from weft_core import events

from weft_codegen.loops.expr import index_text
from weft_codegen.loops.index import ZERO
from weft_codegen.loops.program import Compute, Program, Step, step_reads, step_writes
from weft_codegen.loops.schedule.dependences import dependences, in_order
from weft_codegen.loops.schedule.group import Group, join, single

_log = events.logger("codegen", "fusion")

Unit = Group | Step

# Readers of the same elements share a kernel only when their places in the program are this close:
# computing a value long before its use keeps it alive all the while.
_NEAR = 24


class Fusion:
    """The dependence graph of a lowered program while its nodes are being joined.

    Units keep a topological order, so that a search for a path between two units visits only units
    between them (Pearce and Kelly, "A dynamic topological sort algorithm", 2006).
    """

    def __init__(self, lowered: Program, items: list[Step]) -> None:
        self._mutated = frozenset(lowered.mutations)
        self._buffers = lowered.buffers
        self._items = items
        self.units: dict[int, Unit] = {}
        self._before, self._after = dependences(items, self._mutated)
        for order, item in enumerate(items):
            self.units[order] = single(order, item) if isinstance(item, Compute) else item
        self._unit_of = {order: order for order in self.units}
        self._items_of = {order: [order] for order in self.units}
        # None where a unit was merged into another.
        self._order: list[int | None] = list(self.units)
        self._rank = {order: order for order in self.units}

    def run(self, join_groups: bool = True) -> list[Unit]:
        """Join what can be joined; the units in an order that respects every edge."""
        if not join_groups:
            return self._sorted()
        touching: dict[str, list[int]] = {}
        for order, item in enumerate(self._items):
            if not isinstance(item, Compute):
                continue
            self._join_earlier(order, item, touching)
            for name in (*step_reads(item), item.result):
                touching.setdefault(name, []).append(order)
        return self._sorted()

    def _join_earlier(self, order: int, item: Compute, touching: dict[str, list[int]]) -> None:
        """Try the makers of what `item` reads, nearest first, then its fellow readers."""
        made = [
            o
            for name in step_reads(item)
            for o in touching.get(name, ())
            if name in step_writes(self._items[o])
        ]
        shared = [
            o for name in step_reads(item) for o in touching.get(name, ()) if order - o <= _NEAR
        ]
        tried: set[int] = set()
        for earlier in (*sorted(made, reverse=True), *sorted(shared, reverse=True)):
            a, b = self._unit_of[earlier], self._unit_of[order]
            if a == b or a in tried:
                continue
            tried.add(a)
            self._try(a, b)

    def _try(self, a: int, b: int) -> None:
        left, right = self.units[a], self.units[b]
        assert isinstance(left, Group) and isinstance(right, Group)
        descendants = self._between(a, b)
        if descendants is None:
            joined: Group | str = "another step has to run between the two"
        else:
            joined = join(left, right, self._mutated)
        if events.enabled("fusion"):
            verdict, gain = f"not fused ({joined})", ""
            if isinstance(joined, Group):
                verdict, gain = "fused", f" (at most {self._saved(left, right)} bytes moved less)"
            _log.info("%s: %s | %s%s", verdict, _names(left), _names(right), gain)
        if descendants is not None and isinstance(joined, Group):
            self._reorder(a, b, descendants)
            self._merge(a, b, joined)

    def _saved(self, left: Group, right: Group) -> str:
        """The size of what both groups touch: as one kernel they load it once."""
        shared = left.accesses.keys() & right.accesses.keys()
        return index_text(sum((self._buffers[name].bytes for name in shared), ZERO))

    def _between(self, a: int, b: int) -> set[int] | None:
        """Return the units between two that run after the first; None if the second needs one."""
        first, second = sorted((a, b), key=self._rank.__getitem__)
        end = self._rank[second]
        stack, found = [first], set[int]()
        while stack:
            unit = stack.pop()
            if unit != first and second in self._after[unit]:
                return None
            fresh = {u for u in self._after[unit] if self._rank[u] < end} - found
            found |= fresh
            stack.extend(fresh)
        return found

    def _reorder(self, a: int, b: int, descendants: set[int]) -> None:
        """Put `a`, which `b` is merged into, in front of those that run after either of them."""
        begin, end = sorted((self._rank[a], self._rank[b]))
        region = [unit for unit in self._order[begin : end + 1] if unit not in (a, b, None)]
        front = [unit for unit in region if unit not in descendants]
        back = [unit for unit in region if unit in descendants]
        region = [*front, a, *back]
        self._order[begin : end + 1] = [*region, *[None] * (end + 1 - begin - len(region))]
        self._rank.update((unit, begin + k) for k, unit in enumerate(region))

    def _merge(self, a: int, b: int, joined: Group) -> None:
        moved = self._items_of.pop(b)
        self._unit_of.update((order, a) for order in moved)
        self._items_of[a] += moved
        self.units[a] = joined
        del self.units[b]
        for edges, opposite in ((self._before, self._after), (self._after, self._before)):
            for other in edges.pop(b):
                opposite[other].discard(b)
                if other != a:
                    opposite[other].add(a)
                    edges[a].add(other)
            edges[a].discard(a)

    def _sorted(self) -> list[Unit]:
        """Units in dependence order, otherwise by their earliest item."""
        result = [self.units[unit] for unit in in_order(self._before, self._after, {})]
        assert len(result) == len(self.units), "fusion made a cycle"
        return result


def _names(group: Group) -> str:
    """The buffers a group makes, each with the operator and line it comes from."""
    made = ((m.node.result, "".join(m.node.origins[-1:]).split(": ")[0]) for m in group.members)
    return ", ".join(f"{name} ({origin})" if origin else name for name, origin in made)
