"""Collectives run beside the kernels: started early, waited for late.

The order in which collectives start depends on nothing but their order in the graph, so processes
with equal programs start them alike:

    all-gathers of inputs   where the one before was waited for: one is on its way while the
                            results of another are used (FSDP's prefetch)
    others                  as soon as what they send is there
    waits                   before the first step that takes the result
"""

from __future__ import annotations

from collections.abc import Iterable

from weft_core.collectives import is_collective, is_wait

from weft_codegen.loops import program as ir


def overlap_collectives(steps: list[ir.Step], kernels: ir.Kernels, kept: Iterable[str]) -> None:
    """Move collectives, waits, and what prepares the inputs of all-gathers.

    Args:
        steps: scheduled steps, changed in place.
        kernels: of the launches among them.
        kept: the buffers that the program does not make: inputs and constants.
    """
    if any(isinstance(step, ir.Extern) and is_collective(step.op) for step in steps):
        _Mover(steps, kernels, frozenset(kept)).run()


class _Mover:
    def __init__(self, steps: list[ir.Step], kernels: ir.Kernels, kept: frozenset[str]) -> None:
        roots = ir.storage_roots(steps)
        self._steps, self._kept = steps, kept
        self._reads = {id(s): _roots(ir.step_reads(s, kernels), roots) for s in steps}
        self._writes = {id(s): _roots(ir.step_writes(s, kernels), roots) for s in steps}
        self._readers, self._writers = _by_root(steps, self._reads), _by_root(steps, self._writes)
        self._place = {id(step): place for place, step in enumerate(steps)}

    def run(self) -> None:
        calls = [step for step in self._steps if isinstance(step, ir.Extern)]
        self._sink([call for call in calls if is_wait(call.op)])
        gather: ir.Step | None = None
        last: ir.Step | None = None
        for start in calls:
            if not is_collective(start.op) or is_wait(start.op):
                continue
            if start.mutates:  # what it writes was read before
                last = start
                continue
            before = self._preparation(start) if "all_gather" in str(start.op) else None
            if before is None:
                sources = map(self._position, self._producers(start))
                self._move(start, max(self._position(last), *sources, -1) + 1)
                last = start
                continue
            place = self._position(last) + 1 if gather is None else self._first_use(gather)
            for step in (*before, start):
                if self._position(step) >= place:
                    self._move(step, place)
                    place += 1
            gather = start
            if self._position(last) < self._position(start):
                last = start

    def _position(self, step: ir.Step | None) -> int:
        return -1 if step is None else self._place[id(step)]

    def _move(self, step: ir.Step, place: int) -> None:
        now = self._position(step)
        del self._steps[now]
        self._steps.insert(place - (now < place), step)
        self._place = {id(other): at for at, other in enumerate(self._steps)}

    def _producers(self, step: ir.Step) -> list[ir.Step]:
        """The steps before `step` that write what it reads."""
        found = [w for root in self._reads[id(step)] for w in self._writers.get(root, ())]
        return [other for other in found if self._position(other) < self._position(step)]

    def _first_use(self, start: ir.Step) -> int:
        """The position behind the first wait for a collective."""
        users = [u for root in self._writes[id(start)] for u in self._readers.get(root, ())]
        return min(map(self._position, users), default=self._position(start)) + 1

    def _sink(self, waits: list[ir.Extern]) -> None:
        """Move waits to the first step that takes their result, or writes what was sent."""
        moved: dict[int, list[ir.Step]] = {}
        for wait in waits:
            held = set(self._reads[id(wait)])
            for producer in self._producers(wait):
                held |= self._reads[id(producer)]
            users = [u for r in self._writes[id(wait)] for u in self._readers.get(r, ())]
            users += [w for root in held for w in self._writers.get(root, ())]
            later = [p for p in map(self._position, users) if p > self._position(wait)]
            moved.setdefault(min(later, default=len(self._steps)), []).append(wait)
        sunk = set(map(id, waits))
        order: list[ir.Step] = []
        for place, step in enumerate(self._steps):
            order += moved.get(place, ())
            order += [] if id(step) in sunk else [step]
        self._steps[:] = order + moved.get(len(self._steps), [])
        self._place = {id(step): place for place, step in enumerate(self._steps)}

    def _preparation(self, start: ir.Step) -> list[ir.Step] | None:
        """The steps, in order, that make what `start` sends out of inputs; None for others."""
        found: dict[int, ir.Step] = {}
        pending = [start]
        while pending:
            for step in self._producers(pending.pop()):
                if isinstance(step, ir.Extern) or self._writes[id(step)] & self._kept:
                    return None
                if id(step) not in found:
                    found[id(step)] = step
                    pending.append(step)
        return sorted(found.values(), key=self._position)


def _by_root(steps: list[ir.Step], names: dict[int, frozenset[str]]) -> dict[str, list[ir.Step]]:
    found: dict[str, list[ir.Step]] = {}
    for step in steps:
        for name in names[id(step)]:
            found.setdefault(name, []).append(step)
    return found


def _roots(names: Iterable[str], roots: dict[str, str]) -> frozenset[str]:
    return frozenset(roots.get(name, name) for name in names)
