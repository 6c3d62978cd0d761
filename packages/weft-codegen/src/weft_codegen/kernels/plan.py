"""The memory plan: which buffers live in scratch memory, where, and when each dies.

A buffer is reached through its root (a view shares its root's storage): memory of the caller, a
tensor of its own, or an offset (best fit among the free gaps) into one block of small temporaries,
since a tensor takes half a microsecond to make. A kernel that reads each element just before it
stores it writes over its input if that dies there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from weft_codegen.kernels.externs import returns_views, writes_into
from weft_codegen.loops import program as ir

ALIGN = 64
# Bytes from which a temporary is a tensor of its own.
LARGE = 16384


class Allocation(Enum):
    """Where a root buffer's memory comes from."""

    INPUT = "input"
    CONSTANT = "constant"
    OWNED = "owned"
    SCRATCH = "scratch"


def plan_program(program: ir.Program) -> MemoryPlan:
    """The memory plan that the host unit of `program` follows."""
    steps = enumerate(program.steps)
    allocate = (k for k, s in steps if isinstance(s, ir.Extern) and not writes_into(s))
    return make_plan(program, frozenset(allocate))


def make_plan(program: ir.Program, allocates: frozenset[int]) -> MemoryPlan:
    """MemoryPlan the memory of `program`.

    Args:
        allocates: positions of the Extern steps that make their own results.
    """
    root = {name: name for name in program.buffers} | ir.storage_roots(program.steps)
    allocation = _allocations(program, root, allocates)
    last = _last_uses(program, root)
    plan = MemoryPlan(program, root, allocation, last, _exclusive(program, root, allocates))
    for position, step in enumerate(program.steps):
        plan.place_results(position, step)
        plan.release(position)
    return plan


def _allocations(
    program: ir.Program, root: Mapping[str, str], allocates: frozenset[int]
) -> dict[str, Allocation]:
    allocation = {item.name: Allocation.INPUT for item in program.inputs if item.kind == "tensor"}
    allocation |= dict.fromkeys(program.constants, Allocation.CONSTANT)
    for output in program.outputs:
        if isinstance(output, ir.BufferRef):
            allocation.setdefault(root[output.name], Allocation.OWNED)
    for position in allocates:
        step = program.steps[position]
        assert isinstance(step, ir.Extern)
        if returns_views(step):
            # A view must not outlive what it looks at, so that cannot be scratch memory.
            for read in ir.step_reads(step, program.kernels):
                allocation.setdefault(root[read], Allocation.OWNED)
        for result in step.results:
            if result is not None and result in root:
                allocation.setdefault(root[result], Allocation.OWNED)
    for name in root.values():
        size = program.buffers[name].bytes
        small = size.is_const and size.value < LARGE
        small &= program.buffers[name].device == program.device
        allocation.setdefault(name, Allocation.SCRATCH if small else Allocation.OWNED)
    return allocation


def _exclusive(
    program: ir.Program, root: Mapping[str, str], allocates: frozenset[int]
) -> frozenset[str]:
    """The roots whose memory nothing but the program's own steps can know."""
    given = {item.name for item in program.inputs} | program.constants.keys()
    shared = {root[output.name] for output in program.outputs if isinstance(output, ir.BufferRef)}
    for position in allocates:
        step = program.steps[position]
        assert isinstance(step, ir.Extern)
        seen = ir.step_writes(step, program.kernels)
        seen += ir.step_reads(step, program.kernels) if returns_views(step) else ()
        shared.update(root[name] for name in seen if name in root)
    return frozenset(root.values()) - given - shared


def _last_uses(program: ir.Program, root: Mapping[str, str]) -> dict[str, int]:
    last: dict[str, int] = {}
    for position, step in enumerate(program.steps):
        touched = ir.step_reads(step, program.kernels) + ir.step_writes(step, program.kernels)
        for name in touched:
            if name in root:
                last[root[name]] = position
    for output in program.outputs:
        if isinstance(output, ir.BufferRef):
            last[root[output.name]] = len(program.steps)
    return last


@dataclass
class MemoryPlan:
    """Where every buffer is; memory is assigned step by step.

    root: buffer -> the buffer whose storage it shares; allocation: root -> Allocation.
    last: root -> the last step that touches it (len(steps) for outputs).
    exclusive: the roots whose memory nothing but the program's own steps can know.
    over: root -> the root that dies where this one is first written, and whose memory it takes.
    offset: scratch root -> byte offset.  fixed: bytes of the scratch block.
    """

    program: ir.Program
    root: Mapping[str, str]
    allocation: Mapping[str, Allocation]
    last: Mapping[str, int]
    exclusive: frozenset[str]
    over: dict[str, str] = field(default_factory=dict)
    offset: dict[str, int] = field(default_factory=dict)
    fixed: int = 0
    _live: dict[str, tuple[int, int]] = field(default_factory=dict)
    _made: set[str] = field(default_factory=set)

    def place_results(self, position: int, step: ir.Step) -> None:
        """Give memory to what `step` makes."""
        if isinstance(step, ir.Alias):
            return
        for name in ir.step_writes(step, self.program.kernels):
            root = self.root.get(name)
            if root is None or root in self._made:
                continue
            self._made.add(root)
            over = self._reusable(position, step, name)
            if over is not None:
                self.over[root] = over
            if self.allocation[root] is Allocation.SCRATCH:
                self._assign(root, over)

    def _assign(self, name: str, over: str | None) -> None:
        size = self.program.buffers[name].bytes
        extent = max(ALIGN, -(-size.value // ALIGN) * ALIGN)
        if over is not None:
            start = self.offset[over]
            del self._live[over]
        else:
            start = self._best_gap(extent)
        self.offset[name] = start
        self._live[name] = (start, start + extent)
        self.fixed = max(self.fixed, start + extent)

    def _best_gap(self, extent: int) -> int:
        """The start of the smallest free gap that fits; the end of what is live otherwise."""
        gaps: list[tuple[int, int]] = []
        end = 0
        for start, stop in sorted(self._live.values()):
            if start - end >= extent:
                gaps.append((start - end, end))
            end = max(end, stop)
        return min(gaps, default=(0, end))[1]

    def _reusable(self, position: int, step: ir.Step, written: str) -> str | None:
        """A dying input of a kernel whose memory the result `written` may take."""
        kernels = self.program.kernels
        names = ir.step_reads(step, kernels) + ir.step_writes(step, kernels)
        touched = [self.root.get(name) for name in names]
        for source in self._overwritten(step, written):
            name = self.root[source]
            free = name in self.exclusive and name not in self.over.values()
            dies = self.last[name] == position and touched.count(name) == 1
            if free and dies and self._alike(name, written):
                return name
        return None

    def _overwritten(self, step: ir.Step, written: str) -> list[str]:
        """What the step would read just before it writes the same element of `written`."""
        if isinstance(step, ir.Launch) and self.root[written] == written:
            kernel = self.program.kernels[step.kernel]
            actual = dict(zip((param.name for param in kernel.params), step.buffers, strict=True))
            return [actual[old] for new, old in kernel.in_place if actual[new] == written]
        if isinstance(step, ir.Extern) and step.op is torch.ops.aten.addmm.default:
            total, new = (self.program.buffers[name] for name in (step.args[0].name, written))
            owned = (
                self.allocation[written] is Allocation.OWNED and self.root[total.name] == total.name
            )
            return [total.name] if owned and total == replace(new, name=total.name) else []
        return []

    def _alike(self, name: str, written: str) -> bool:
        """Whether one may have the other's memory: the same kind of it, and as much."""
        old, new = self.program.buffers[name], self.program.buffers[written]
        same = self.allocation[name] is self.allocation[written] and old.storage is new.storage
        return same and old.dtype is new.dtype and old.device == new.device

    def release(self, position: int) -> None:
        """Free what nobody needs after step `position`."""
        for name in [name for name in self._live if self.last[name] <= position]:
            del self._live[name]
