"""The memory plan: which buffers live in scratch memory, where, and when each dies.

A buffer is reached through its root (a view shares its root's storage).  Roots are
    input / constant    memory of the caller
    owned               a tensor of its own: outputs, and results of operators that allocate
    scratch             an offset into one block that is taken for the length of the call
Scratch offsets are chosen by best fit among the gaps that are free at the time; a buffer with a
symbolic size gets a slot behind the fixed part, reused by buffers of the same size.  A kernel that
reads each element just before it stores it writes over its input if that dies there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from weft_codegen.kernels.externs import returns_views
from weft_codegen.loops.index import IndexExpr
from weft_codegen.loops.program import (
    Alias,
    Extern,
    Launch,
    Program,
    Ref,
    Step,
    step_reads,
    step_writes,
)

ALIGN = 64


class Place(Enum):
    """Where a root buffer's memory comes from."""

    INPUT = "input"
    CONSTANT = "constant"
    OWNED = "owned"
    SCRATCH = "scratch"


@dataclass(frozen=True)
class Plan:
    """Where every buffer is.

    root: buffer -> the buffer whose storage it shares; place: root -> Place.
    last: root -> the last step that touches it (len(steps) for outputs).
    offset: scratch root -> byte offset, or (slot number) for symbolic sizes in `slots`.
    fixed: bytes of the fixed part.  slot_sizes: bytes of each symbolic slot.
    """

    root: Mapping[str, str]
    place: Mapping[str, Place]
    last: Mapping[str, int]
    offset: Mapping[str, int]
    slots: Mapping[str, int]
    fixed: int
    slot_sizes: tuple[IndexExpr, ...]

    @property
    def uses_scratch(self) -> bool:
        """Whether a call needs a scratch block at all."""
        return self.fixed > 0 or bool(self.slot_sizes)


def make_plan(program: Program, allocates: frozenset[int]) -> Plan:
    """Plan the memory of `program`.

    Args:
        allocates: positions of the Extern steps that make their own results.
    """
    root = _roots(program)
    place = _places(program, root, allocates)
    last = _last_uses(program, root)
    layout = _Layout(program, root, place, last)
    for position, step in enumerate(program.steps):
        layout.place_results(position, step)
        layout.release(position)
    return Plan(
        root, place, last, layout.offset, layout.slots, layout.fixed, tuple(layout.slot_sizes)
    )


def _roots(program: Program) -> dict[str, str]:
    root = {name: name for name in program.buffers}
    for step in program.steps:
        if isinstance(step, Alias):
            root[step.name] = root[step.base]
    return root


def _places(
    program: Program, root: Mapping[str, str], allocates: frozenset[int]
) -> dict[str, Place]:
    place: dict[str, Place] = {}
    for item in program.inputs:
        if item.kind == "tensor":
            place[item.name] = Place.INPUT
    for name in program.constants:
        place[name] = Place.CONSTANT
    for output in program.outputs:
        if isinstance(output, Ref):
            place.setdefault(root[output.name], Place.OWNED)
    for position in allocates:
        step = program.steps[position]
        assert isinstance(step, Extern)
        if returns_views(step):
            # A view must not outlive what it looks at, so that cannot be scratch memory.
            for read in step_reads(step, program.kernels):
                place.setdefault(root[read], Place.OWNED)
        for result in step.results:
            if result is not None and result in root:
                place.setdefault(root[result], Place.OWNED)
    for name in root.values():
        place.setdefault(name, Place.SCRATCH)
    return place


def _last_uses(program: Program, root: Mapping[str, str]) -> dict[str, int]:
    last: dict[str, int] = {}
    for position, step in enumerate(program.steps):
        touched = step_reads(step, program.kernels) + step_writes(step, program.kernels)
        for name in touched:
            if name in root:
                last[root[name]] = position
    for output in program.outputs:
        if isinstance(output, Ref):
            last[root[output.name]] = len(program.steps)
    return last


def storage_bytes(program: Program, name: str) -> IndexExpr:
    """The bytes that buffer `name` needs."""
    buffer = program.buffers[name]
    return buffer.storage * buffer.dtype.itemsize


@dataclass
class _Layout:
    """Assigns scratch memory step by step."""

    program: Program
    root: Mapping[str, str]
    place: Mapping[str, Place]
    last: Mapping[str, int]
    offset: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    slot_sizes: list[IndexExpr] = field(default_factory=list)
    fixed: int = 0
    _live: dict[str, tuple[int, int]] = field(default_factory=dict)
    _idle_slots: list[int] = field(default_factory=list)

    def place_results(self, position: int, step: Step) -> None:
        """Give memory to what `step` makes."""
        if isinstance(step, Alias):
            return
        for name in step_writes(step, self.program.kernels):
            if name in self.root and self._is_new(self.root[name]):
                self._assign(self.root[name], self._reusable(position, step, name))

    def _is_new(self, name: str) -> bool:
        scratch = self.place[name] is Place.SCRATCH
        return scratch and name not in self.offset and name not in self.slots

    def _assign(self, name: str, over: str | None) -> None:
        size = storage_bytes(self.program, name)
        if not size.is_const:
            self.slots[name] = self._slot(size)
            return
        extent = max(ALIGN, -(-size.value // ALIGN) * ALIGN)
        if over is not None:
            start = self.offset[over]
            del self._live[over]
        else:
            start = self._best_gap(extent)
        self.offset[name] = start
        self._live[name] = (start, start + extent)
        self.fixed = max(self.fixed, start + extent)

    def _slot(self, size: IndexExpr) -> int:
        for slot in self._idle_slots:
            if self.slot_sizes[slot] is size:
                self._idle_slots.remove(slot)
                return slot
        self.slot_sizes.append(size)
        return len(self.slot_sizes) - 1

    def _best_gap(self, extent: int) -> int:
        """The start of the smallest free gap that fits; the end of what is live otherwise."""
        best: tuple[int, int] | None = None
        end = 0
        for start, stop in sorted(self._live.values()):
            gap = start - end
            if gap >= extent and (best is None or gap < best[0]):
                best = (gap, end)
            end = max(end, stop)
        if best is not None:
            return best[1]
        return end

    def _reusable(self, position: int, step: Step, written: str) -> str | None:
        """A dying input of a kernel whose memory the result `written` may take."""
        if not isinstance(step, Launch) or self.root[written] != written:
            return None
        kernel = self.program.kernels[step.kernel]
        actual = dict(zip((param.name for param in kernel.params), step.buffers, strict=True))
        size = storage_bytes(self.program, written)
        for target, source in kernel.in_place:
            name = actual[source]
            if actual[target] != written or self.root[name] not in self._live:
                continue
            alone = [self.root[other] for other in step.buffers].count(self.root[name]) == 1
            dies = self.last[self.root[name]] == position
            if alone and dies and storage_bytes(self.program, self.root[name]) is size:
                return self.root[name]
        return None

    def release(self, position: int) -> None:
        """Free what nobody needs after step `position`."""
        for name in [name for name in self._live if self.last[name] <= position]:
            del self._live[name]
        for name, slot in self.slots.items():
            if self.last[name] == position and slot not in self._idle_slots:
                self._idle_slots.append(slot)
