"""Groups: loop nodes that share one loop nest, and the rules for joining two of them.

A member is *full* (it covers all axes) or, in a group with reductions, *kept* (what a reduction
leaves, and pointwise work on it). Two groups join when an access to a buffer they share aligns
their axes and every value that passes between them is read exactly where it is made.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from weft_codegen.loops.index import Axis, IndexExpr
from weft_codegen.loops.program import Compute
from weft_codegen.loops.rewrite import Rewriter
from weft_codegen.loops.schedule.align import (
    Mapping,
    align,
    linear,
    pieces,
    replacing,
    walk_order,
)

Accesses = dict[str, list[IndexExpr]]  # where each buffer is touched
_MAX_MEMBERS = 48
_MAX_BUFFERS = 40


@dataclass(frozen=True)
class Member:
    """A loop node in a group, its place in the graph, and how it was rewritten."""

    order: int
    node: Compute

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes the member runs over."""
        return frozenset(self.node.axes) | frozenset(self.node.reduced)

    @functools.cached_property
    def accesses(self) -> Accesses:
        """Where the member touches each buffer; for its result, where it stores."""
        found = {self.node.result: [self.node.index]}
        for load in self.node.loads:
            found.setdefault(load.buffer, []).append(load.index)
        return found


@dataclass(frozen=True)
class Group:
    """Loop nodes over shared axes (outermost first).

    `reduced` is empty without reductions and scans (a scan's are those it runs along).
    """

    members: tuple[Member, ...]
    axes: tuple[Axis, ...]
    reduced: frozenset[Axis] = frozenset()

    @property
    def kept(self) -> tuple[Axis, ...]:
        """The axes that reductions leave."""
        return tuple(loop for loop in self.axes if loop not in self.reduced)

    @property
    def swept(self) -> tuple[Axis, ...]:
        """The other axes, outermost first."""
        return tuple(loop for loop in self.axes if loop in self.reduced)

    def sums_columns(self, member: Member) -> bool:
        """Whether a member reduces kept axes, in a group that reduces others."""
        return not self.reduced.issuperset(member.node.reduced)

    @property
    def accesses(self) -> Accesses:
        """Where the members touch each buffer."""
        found: Accesses = {}
        for member in self.members:
            for name, wheres in member.accesses.items():
                found.setdefault(name, []).extend(wheres)
        return found

    @property
    def results(self) -> dict[str, Member]:
        """The buffers the group makes, and who makes each."""
        return {member.node.result: member for member in self.members}


def single(order: int, node: Compute) -> Group:
    """The group of one node, its axes in the order of its largest access."""
    axes = tuple(dict.fromkeys((*node.axes, *node.reduced)))
    swept = frozenset(node.reduced or node.along)
    return Group((Member(order, node),), _ordered(node, axes), swept)


def _ordered(node: Compute, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """`axes` by descending stride: of the store for pointwise, of the widest load otherwise."""
    wheres = [node.index] if node.op is None else [load.index for load in node.loads]
    best: list[tuple[IndexExpr | None, Axis]] = []
    for where in wheres:
        strides = walk_order(where, axes)
        if len(strides) > len(best):
            best = strides
    seen = [loop for _, loop in best]
    return tuple([loop for loop in axes if loop not in seen] + seen)


def join(left: Group, right: Group, mutated: frozenset[str]) -> Group | str:
    """One group that computes both, or the reason why their loops do not fit.

    `right` is the later one and does not feed `left`.  `mutated` are the inputs that some node
    stores to: they may only be read where they are stored.
    """
    if len(left.members) + len(right.members) > _MAX_MEMBERS:
        return f"more than {_MAX_MEMBERS} loop nodes in one kernel"
    touched_left, touched_right = left.accesses, right.accesses
    if len(touched_left.keys() | touched_right.keys()) > _MAX_BUFFERS:
        return f"more than {_MAX_BUFFERS} buffers in one kernel"
    if any(member.node.update for member in (*left.members, *right.members)):
        return "one of them updates a buffer at computed places"
    reason = "no buffer is walked through by all loops of both"
    for a, b in _candidates(left, right, touched_left, touched_right):
        mapping = align(a, left.axes, b, right.axes)
        if mapping is None:
            reason = f"no common loops make the accesses [{a}] and [{b}] the same"
            continue
        joined = _combine(left, right, mapping)
        if isinstance(joined, str):
            reason = joined
            continue
        refused = _refusal(joined, mutated)
        if refused is None:
            return joined
        reason = refused
    return reason


def _candidates(
    left: Group, right: Group, touched_left: Accesses, touched_right: Accesses
) -> list[tuple[IndexExpr, IndexExpr]]:
    """Pairs of accesses to try, the ones that cover most axes first, at most four."""
    pairs: list[tuple[int, IndexExpr, IndexExpr]] = []
    seen: set[tuple[IndexExpr, IndexExpr]] = set()
    made = left.results.keys()
    for name in [each for each in touched_left if each in touched_right]:  # in a fixed order
        for a in touched_left[name]:
            for b in touched_right[name]:
                if (a, b) in seen:
                    continue
                seen.add((a, b))
                strides_a, strides_b = linear(a, left.axes), linear(b, right.axes)
                if strides_a is None or strides_b is None:
                    continue
                full = len(strides_a) == len(left.axes) and len(strides_b) == len(right.axes)
                if full or name in made:
                    score = len(strides_a) + len(strides_b) + (100 if full else 0)
                    pairs.append((score, a, b))
    pairs.sort(key=lambda pair: -pair[0])
    return [(a, b) for _, a, b in pairs[:4]]


def _combine(left: Group, right: Group, mapping: Mapping) -> Group | str:
    """Both groups over the mapping's axes, or why not: their reductions have to agree."""
    axes_left = pieces(mapping.left, left.axes)
    axes_right = pieces(mapping.right, right.axes)
    reduced_left = frozenset(pieces(mapping.left, left.reduced))
    reduced_right = frozenset(pieces(mapping.right, right.reduced))
    if reduced_left and reduced_right and reduced_left != reduced_right:
        return "they reduce different axes"
    reduced = reduced_left | reduced_right
    # The deeper nest's order; a reduction's when there is one, since it knows its rows.
    order = axes_left if len(axes_left) >= len(axes_right) else axes_right
    if reduced_right and not reduced_left and set(axes_right) == set(order):
        order = axes_right
    if set(order) != set(axes_left) | set(axes_right):
        return "each has loops that the other lacks"
    if not reduced and set(axes_left) != set(axes_right):
        # Pointwise nests of different depth: the shallow one becomes per-row work.
        inner = [loop for loop in order if loop not in axes_left or loop not in axes_right]
        if order[-len(inner) :] != inner:
            return "the loops that only one has are not the inner ones"
        if len(inner) == len(order):
            return "with one value before them, the loops could not run in parallel"
        reduced = frozenset(inner)
    members = [rewritten(m, mapping.left) for m in left.members]
    members += [rewritten(m, mapping.right) for m in right.members]
    members.sort(key=lambda member: member.order)
    return Group(tuple(members), tuple(order), reduced)


def rewritten(member: Member, mapped: dict[Axis, IndexExpr]) -> Member:
    """`member` over new axes: each old one is replaced by its expression in `mapped`."""
    if all(new is loop.at for loop, new in mapped.items()):
        return member
    at = replacing(mapped)
    rewrite = Rewriter(at=at)
    node = member.node
    axes, reduced, along = (
        tuple(pieces(mapped, loops)) for loops in (node.axes, node.reduced, node.along)
    )
    values, index = tuple(map(rewrite, node.values)), rewrite.index(node.index)
    changes = {"axes": axes, "reduced": reduced, "along": along, "values": values, "index": index}
    return replace(member, node=replace(node, **changes))  # type: ignore[arg-type]


def _refusal(group: Group, mutated: frozenset[str]) -> str | None:
    """Why the group is none: a member does not fit the loops, or reads what is not made yet."""
    every, kept = frozenset(group.axes), frozenset(group.kept)
    made: dict[str, Member] = {}
    for member in group.members:
        node = member.node
        if node.scan is not None and node.along != group.swept:
            return f"{node.result} runs along other axes than the rest, or in another order"
        if node.op is not None:
            if frozenset(node.reduced) != group.reduced or frozenset(node.axes) != kept:
                return f"{node.result} reduces other axes than the rest"
        elif member.axes != every and (member.axes != kept or not group.reduced):
            return f"{node.result} runs over some of the loops only"
        for load in node.loads:
            maker = made.get(load.buffer)
            if maker is not None and maker.node.index is not load.index:
                return f"{node.result} reads {load.buffer} at other elements than are made there"
            if maker is not None and member.axes == kept != every and maker.node.op is None:
                # Per-row work reads reductions or other per-row work, not single elements.
                if maker.axes != kept:
                    return f"{node.result} reads single elements of {load.buffer} once a row"
        made[node.result] = member
    return _mutation_refusal(group, made, mutated)


def _mutation_refusal(group: Group, made: dict[str, Member], mutated: frozenset[str]) -> str | None:
    """A mutated input may only be loaded at the very element that is stored."""
    for name in mutated & made.keys():
        store = made[name]
        for member in group.members:
            for load in member.node.loads:
                if load.buffer == name and (
                    load.index is not store.node.index or member.axes != store.axes
                ):
                    return f"{member.node.result} reads {name} elsewhere than it is updated"
    return None
