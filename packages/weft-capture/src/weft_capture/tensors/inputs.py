"""Inputs of a graph: their sources, and checks of writes to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import CreationMeta
from torch.fx import Node
from weft_core.jagged import is_jagged
from weft_core.tensor_versions import version_of
from weft_guards import Guard, MemoryUse
from weft_guards.explain import program_expr
from weft_guards.payloads import shares_memory, writes_are_disjoint
from weft_guards.sources import CallSource, Source

from weft_capture.breaks import Break
from weft_capture.tensors import subclass, symbolic_scalars
from weft_capture.tensors.fake_versions import Layout, State

_LONGEST_NAME = 36


def input_name(source: Source) -> str:
    """Return a short name for an input: `blocks_0_weight` for `self.blocks[0].weight`."""
    words = re.findall(r"[a-z0-9]+", program_expr(source).lower())
    name = "_".join(words).removeprefix("self_")
    while len(name) > _LONGEST_NAME and "_" in name:
        name = name.partition("_")[2]
    return name[-_LONGEST_NAME:]


@dataclass(eq=False)
class GraphInput:
    """A placeholder: where the caller loads it from, and the object seen while capturing.

    `history` is the `grad_fn` of the fake, `recorded_at` the step of the first write that autograd
    records; `requires_grad` is what the program makes it before the graph, None while it leaves it
    alone; `layout` is the fake's at the start of the graph, where the graph changes it in place.
    """

    node: Node
    source: Source
    example: object
    node_example: object
    version: int
    history: object
    recorded_at: int = -1
    requires_grad: bool | None = None
    layout: Layout | None = None

    def graph_example(self) -> object:
        """Return the example as the graph will get such an object."""
        if self.requires_grad is None:
            return self.example
        assert isinstance(self.example, torch.Tensor)
        return self.example.detach().requires_grad_(self.requires_grad)

    def is_shared(self) -> bool:
        """Say whether other code may hold this tensor, which is not created for the call."""
        deferred = (
            isinstance(self.source, CallSource)
            and self.source.function is symbolic_scalars.scalar_tensor
        )
        return isinstance(self.example, torch.Tensor) and not deferred

    def is_written(self) -> bool:
        """Say whether the graph may write to this input in place."""
        fake: Any = self.node_example
        uncounted = isinstance(fake, torch.Tensor) and fake.is_inference()
        uncounted |= is_jagged(type(fake)) and fake._values.fake_mode.writes > 0
        return uncounted or version_of(fake) != self.version


def is_writable(tensor: torch.Tensor) -> bool:
    """Say whether autograd may record a write to a tensor, and no hook observes its history."""
    if not tensor._is_view():
        return not tensor.retains_grad and not (tensor.requires_grad and tensor.is_leaf)
    if torch._C._autograd._get_creation_meta(tensor) != CreationMeta.DEFAULT:
        return False
    base: Any = tensor._base
    # Of a written view only the base keeps its earlier history, with hooks.
    watched = tensor.retains_grad or base.retains_grad or tensor._backward_hooks
    return not watched and not (base.requires_grad and base.is_leaf)


def note_writes(inputs: list[GraphInput], step: int) -> Callable[[], None]:
    """Mark the inputs to which autograd recorded a write; returns a function that undoes that.

    It is called when the fakes are restored.
    """
    marked = []
    for entry in inputs:
        history = getattr(entry.node_example, "grad_fn", None)
        if history is not entry.history:
            marked.append((entry, entry.recorded_at))
            entry.history = history
            entry.recorded_at = step if entry.recorded_at < 0 else entry.recorded_at

    def forget() -> None:
        for entry, before in marked:
            entry.recorded_at, entry.history = before, getattr(entry.node_example, "grad_fn", None)

    return forget


def note_layouts(inputs: list[GraphInput], before: list[State]) -> Callable[[], None]:
    """Record the old layout of inputs that an operation changed; returns the undo function."""
    layouts = {id(tensor): layout for tensor, *_, layout in before if layout is not None}
    unset = [e for e in inputs if e.layout is None and id(e.node_example) in layouts]
    for entry in unset:
        entry.layout = layouts[id(entry.node_example)]

    def forget() -> None:
        for entry in unset:
            entry.layout = None

    return forget


def check_writes(inputs: list[GraphInput]) -> None:
    """Break where eager may refuse a recorded write, or other inputs share its memory."""
    for entry in inputs:
        real: Any = entry.example
        if entry.recorded_at < 0:
            continue
        if not is_writable(real):
            raise Break("tensor-storage", "a write to a view, or to a leaf with hooks")
        shared = [
            tensor
            for other in inputs
            if other is not entry and other.is_shared()
            for tensor in subclass.inside(other.example, other.source).values()
        ]
        if shares_memory(list(subclass.inside(real, entry.source).values()), shared):
            raise Break("tensor-storage", "a recorded write to memory that two inputs share")


def write_guards(inputs: list[GraphInput]) -> list[Guard]:
    """Guard that written inputs share memory with other inputs as they do now.

    A backend may reorder reads and writes of tensors that it assumes not to overlap.
    """
    guards = [
        Guard.of(CallSource(is_writable, (entry.source,)), "CONST", True)
        for entry in inputs
        if entry.recorded_at >= 0
    ]
    written: dict[Source, Any] = {}
    read: dict[Source, Any] = {}
    for entry in inputs:
        if entry.is_shared():
            inner = subclass.inside(entry.example, entry.source)
            target = written if entry.is_written() else read
            target_ids = set(map(id, target.values()))  # the same objects: an alias guard
            target.update(
                {at: tensor for at, tensor in inner.items() if id(tensor) not in target_ids}
            )
    read = {at: t for at, t in read.items() if all(t is not tensor for tensor in written.values())}
    if not written or len(written) + len(read) == 1:
        return guards
    tensors = list(written.values()), list(read.values())
    shared = shares_memory(*tensors)
    use = MemoryUse(tuple(written), tuple(read), shared, shared and writes_are_disjoint(*tensors))
    return [*guards, Guard.of(use.written[0], "MEMORY", use)]


def check_views(inputs: list[GraphInput]) -> None:
    """Break where an input is a view of a tensor that the program has made require grad."""
    changed = [entry.example for entry in inputs if entry.requires_grad]
    for entry in inputs if changed else ():
        base = getattr(entry.example, "_base", None)
        if base is not None and any(base is tensor for tensor in changed):
            raise Break("autograd-state", "a view of a tensor whose requires_grad changed")
