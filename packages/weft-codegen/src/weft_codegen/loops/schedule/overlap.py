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

    def run(self) -> None:
        calls = [step for step in self._steps if isinstance(step, ir.Extern)]
        starts = [step for step in calls if is_collective(step.op) and not is_wait(step.op)]
        for call in reversed(calls):
            if is_wait(call.op):
                self._sink(call)
        gather: ir.Step | None = None
        last: ir.Step | None = None
        for start in starts:
            before = self._preparation(start) if "all_gather" in str(start.op) else None
            if before is None:
                after = max([self._position(last), *map(self._position, self._producers(start))])
                self._move(start, after + 1)
                last = start
                continue
            place = 0 if gather is None else self._first_use(gather)
            if last is not None and gather is None:
                place = self._position(last) + 1
            for step in (*before, start):
                if self._position(step) >= place:
                    self._move(step, place)
                    place += 1
            gather = start
            if last is None or self._position(last) < self._position(start):
                last = start

    def _position(self, step: ir.Step | None) -> int:
        return next((i for i, other in enumerate(self._steps) if other is step), -1)

    def _move(self, step: ir.Step, place: int) -> None:
        now = self._position(step)
        del self._steps[now]
        self._steps.insert(place - (now < place), step)

    def _producers(self, step: ir.Step) -> list[ir.Step]:
        """The steps before `step` that write what it reads."""
        earlier = self._steps[: self._position(step)]
        return [other for other in earlier if self._writes[id(other)] & self._reads[id(step)]]

    def _first_use(self, start: ir.Step) -> int:
        """The position behind the first wait for a collective."""
        for position, step in enumerate(self._steps):
            if self._reads[id(step)] & self._writes[id(start)]:
                return position + 1
        return self._position(start) + 1

    def _sink(self, wait: ir.Extern) -> None:
        """Move a wait to the first step that takes its result, or writes what was sent."""
        held = set(self._reads[id(wait)])
        for producer in self._producers(wait):
            held |= self._reads[id(producer)]
        begin = self._position(wait)
        for position in range(begin + 1, len(self._steps)):
            other = id(self._steps[position])
            if self._reads[other] & self._writes[id(wait)] or self._writes[other] & held:
                self._move(wait, position)
                return
        self._move(wait, len(self._steps))

    def _preparation(self, start: ir.Step) -> list[ir.Step] | None:
        """The steps, in order, that make what `start` sends out of inputs; None for others."""
        found: list[ir.Step] = []
        pending = [start]
        while pending:
            for step in self._producers(pending.pop()):
                if isinstance(step, ir.Extern) or self._writes[id(step)] & self._kept:
                    return None
                if step not in found:
                    found.append(step)
                    pending.append(step)
        return sorted(found, key=self._position)


def _roots(names: Iterable[str], roots: dict[str, str]) -> frozenset[str]:
    return frozenset(roots.get(name, name) for name in names)
