"""The memory plan: which buffers live in scratch memory, where, and when each dies.

A buffer is reached through its root (a view shares its root's storage): memory of the caller, a
tensor of its own, or an offset (best fit among the free gaps) into one block of small temporaries,
since a tensor takes half a microsecond to make. A kernel that reads each element just before it
stores it writes over its input if that dies there.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import torch
from weft_core.collectives import is_collective

from weft_codegen.kernels.externs import returns_views, writes_into
from weft_codegen.loops import program as ir
from weft_codegen.loops.schedule.linear import ADDMM

ALIGN = 64
# Bytes from which a temporary is a tensor of its own.
LARGE = 16384


class Allocation(Enum):
    """Where a root buffer's memory comes from."""

    INPUT = "input"
    CONSTANT = "constant"
    OWNED = "owned"
    SCRATCH = "scratch"


class MemoryPlan:
    """The memory of a program.

    root: buffer -> the buffer whose storage it shares; allocation: root -> Allocation.
    last: root -> the last step that touches it (len(steps) for outputs).
    over: root -> the root that dies where this one is first written, and whose memory it takes.
    offset: scratch root -> byte offset.  fixed: bytes of the scratch block.
    """

    def __init__(self, program: ir.Program) -> None:
        self._program = program
        self.root = {name: name for name in program.buffers} | ir.storage_roots(program.steps)
        self.allocation: dict[str, Allocation] = {}
        self.last: dict[str, int] = {}
        self.over: dict[str, str] = {}
        self.offset: dict[str, int] = {}
        self.fixed = 0
        self._exclusive = frozenset(self.root.values()) - self._allocate()
        self._taken: set[str] = set()
        self._live: dict[str, tuple[int, int]] = {}
        self._made: set[str] = set()
        for position, step in enumerate(program.steps):
            for name in self._touched(step):
                self.last[name] = position
        self.last.update((self.root[name], len(program.steps)) for name in self._outputs())
        for position, step in enumerate(program.steps):
            self._place_results(position, step)
            for name in [name for name in self._live if self.last[name] <= position]:
                del self._live[name]

    def _outputs(self) -> list[str]:
        return [o.name for o in self._program.outputs if isinstance(o, ir.BufferRef)]

    def _touched(self, step: ir.Step) -> list[str]:
        """The roots of what a step reads and writes, once for each time."""
        kernels = self._program.kernels
        names = ir.step_reads(step, kernels) + ir.step_writes(step, kernels)
        return [self.root[name] for name in names if name in self.root]

    def _allocate(self) -> set[str]:
        """Fill `allocation`; the roots whose memory others than the program's steps may know."""
        program, kernels = self._program, self._program.kernels
        tensors = [item.name for item in program.inputs if item.kind == "tensor"]
        self.allocation.update(dict.fromkeys(tensors, Allocation.INPUT))
        self.allocation.update(dict.fromkeys(program.constants, Allocation.CONSTANT))
        owned, known = self._outputs(), [*tensors, *program.constants]
        for step in program.steps:
            if not isinstance(step, ir.Extern) or writes_into(step):
                continue  # it writes where the plan says
            # A view must not outlive what it looks at, and a collective may still read what it
            # was given when later steps run: neither can be scratch memory.
            lasting = returns_views(step) or is_collective(step.op)
            owned += ir.step_reads(step, kernels) if lasting else ()
            owned += [name for name in step.results if name in self.root]
            known += [name for name in step.mutates if name in self.root]
        for name in owned:
            self.allocation.setdefault(self.root[name], Allocation.OWNED)
        for name in self.root.values():
            buffer = program.buffers[name]
            small = buffer.bytes.is_const and buffer.bytes.value < LARGE
            small &= buffer.device == program.device
            self.allocation.setdefault(name, Allocation.SCRATCH if small else Allocation.OWNED)
        return {self.root[name] for name in (*owned, *known)}

    def _place_results(self, position: int, step: ir.Step) -> None:
        """Give memory to what `step` makes."""
        if isinstance(step, ir.Alias):
            return
        for name in ir.step_writes(step, self._program.kernels):
            root = self.root.get(name)
            if root is None or root in self._made:
                continue
            self._made.add(root)
            over = self._reusable(position, step, name)
            if over is not None:
                self.over[root] = over
                self._taken.add(over)
            if self.allocation[root] is Allocation.SCRATCH:
                self._assign(root, over)

    def _assign(self, name: str, over: str | None) -> None:
        size = self._program.buffers[name].bytes
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
        touched = self._touched(step)
        for source in self._overwritten(step, written):
            name = self.root[source]
            free = name in self._exclusive and name not in self._taken
            dies = self.last[name] == position and touched.count(name) == 1
            if free and dies and self._alike(name, written):
                return name
        return None

    def _overwritten(self, step: ir.Step, written: str) -> list[str]:
        """What the step would read just before it writes the same element of `written`."""
        if isinstance(step, ir.Launch) and self.root[written] == written:
            kernel = self._program.kernels[step.kernel]
            actual = dict(zip((param.name for param in kernel.params), step.buffers, strict=True))
            return [actual[old] for new, old in kernel.in_place if actual[new] == written]
        if isinstance(step, ir.Extern) and step.op in (torch.ops.aten.addmm.default, ADDMM):
            total, new = (self._program.buffers[name] for name in (step.args[0].name, written))
            owned = (
                self.allocation[written] is Allocation.OWNED and self.root[total.name] == total.name
            )
            return [total.name] if owned and total == replace(new, name=total.name) else []
        return []

    def _alike(self, name: str, written: str) -> bool:
        """Whether one may have the other's memory: the same kind of it, and as much."""
        old, new = self._program.buffers[name], self._program.buffers[written]
        same = self.allocation[name] is self.allocation[written] and old.storage is new.storage
        return same and old.dtype is new.dtype and old.device == new.device
