"""Order of work inside one group: which sweep over the elements computes what.

A reduction's result is complete only after a sweep, so a member that depends on it belongs to a
later one.  Per-row work sits between sweeps.  A value made in one sweep and needed in another is
reloaded when it is stored anyway, recomputed when that is cheap, and else kept in a row temporary.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft_codegen.loops.expr import cost, walk
from weft_codegen.loops.index import product
from weft_codegen.loops.schedule.group import Group, Member

# Keep a value between sweeps when computing it again costs more than this (in float adds): in a row
# temporary, in memory, and in a GPU's memory, whose threads would wait for it longer.
_RECOMPUTE_COST, _GPU_RECOMPUTE_COST = 8, 64
# Largest row temporary, in elements: it should stay in the first-level cache.
_TEMPORARY_LIMIT = 4096


@dataclass(frozen=True)
class SweepPlan:
    """When each member of a group runs.

    sweep: the sweep of each full member; sums of columns have the last or the next number.  ready:
    for per-row members, the first sweep that may read the result.  stored: members whose buffer
    must be written.  temporaries: full members whose value is kept in a row temporary, filled in
    the given sweep.
    """

    sweeps: int
    sweep: dict[str, int]
    ready: dict[str, int]
    stored: frozenset[str]
    temporaries: dict[str, int]


def plan_sweeps(
    group: Group,
    needed: frozenset[str],
    mutated: frozenset[str],
    *,
    rows: bool = True,
    on_cpu: bool = True,
) -> SweepPlan:
    """Assign members to sweeps.

    Args:
        needed: the buffers somebody outside the group reads.
        rows: whether a value may be kept in a row temporary.
        on_cpu: where the loops run.
    """
    makers = group.results
    every = frozenset(group.axes)
    sweep: dict[str, int] = {}
    ready: dict[str, int] = {}
    columns = [member for member in group.members if group.sums_columns(member)]
    for member in group.members:
        if member in columns:
            continue
        name = member.node.result
        sources = _sources(member, makers)
        start = max((ready.get(source, sweep.get(source, 0)) for source in sources), default=0)
        if member.node.op is not None:
            sweep[name], ready[name] = start, start + 1
        elif member.axes == every:
            sweep[name] = start
        else:
            ready[name] = start
    sweeps = max(sweep.values(), default=-1) + 1
    for name in mutated & makers.keys():
        # The old value may be read until the last sweep, or by per-row work of a later one.
        if name in sweep:
            sweep[name] = sweeps - 1
        if name in ready:
            readers = [m for m in group.members if name in {x.buffer for x in m.node.loads}]
            ready[name] = max(ready[name], *(ready.get(m.node.result, 0) for m in readers), 0)
    # Sums of columns join the last sweep, unless that sums rows.
    pointwise = all(
        m.node.op is None for m in group.members if sweep.get(m.node.result) == sweeps - 1
    )
    sweep.update((member.node.result, sweeps - pointwise) for member in columns)
    stored = frozenset(name for name in makers if name in needed or name in mutated)
    draft = SweepPlan(sweeps, sweep, ready, stored, {})
    kept, spilled = _temporaries(group, draft, rows, on_cpu)
    return SweepPlan(sweeps, sweep, ready, stored | spilled, kept)


def _sources(member: Member, makers: dict[str, Member]) -> list[str]:
    """The members of the group that `member` reads; not itself, nor an input stored later."""
    loads = (load.buffer for load in member.node.loads)
    return [n for n in dict.fromkeys(loads) if n in makers and makers[n].order < member.order]


def _temporaries(
    group: Group, draft: SweepPlan, rows: bool, on_cpu: bool
) -> tuple[dict[str, int], frozenset[str]]:
    """Values to keep between sweeps: in row temporaries, or (too long for one) in their buffer."""
    makers = group.results
    used_in = _use_sweeps(group, draft)
    length = product(loop.extent for loop in group.swept)
    small = rows and length.is_const and length.value <= _TEMPORARY_LIMIT
    limit = _RECOMPUTE_COST if small or on_cpu else _GPU_RECOMPUTE_COST
    temporaries: dict[str, int] = {}
    spilled: set[str] = set()
    for name, sweeps in used_in.items():
        if name in draft.stored or len(sweeps) < 2:
            continue
        node = makers[name].node
        if node.scan is None and cost(walk(*node.values), load=1) <= limit:
            continue
        if small:
            temporaries[name] = min(sweeps)
        else:
            spilled.add(name)
    return temporaries, frozenset(spilled)


def _use_sweeps(group: Group, draft: SweepPlan) -> dict[str, set[int]]:
    """The sweeps in which each unstored full pointwise member is evaluated."""
    makers = group.results
    used: dict[str, set[int]] = {}
    for member in reversed(group.members):
        name = member.node.result
        if name not in draft.sweep:
            continue
        pinned = member.node.op is not None or name in draft.stored
        sweeps = {draft.sweep[name]} if pinned else used.get(name, set())
        if member.node.scan is not None:
            used[name] = {draft.sweep[name], *sweeps}
            sweeps = {draft.sweep[name]}
        for source in _sources(member, makers):
            if makers[source].node.op is None and source in draft.sweep:
                used.setdefault(source, set()).update(sweeps)
    return used
