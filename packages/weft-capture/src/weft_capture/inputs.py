"""What a graph takes: where it is loaded from, and what the program may do to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from weft_core.jagged import is_jagged
from weft_core.versions import version_of
from weft_guards import Guard, MemoryUse
from weft_guards.payloads import shares_memory
from weft_guards.sources import CallSource, Source

from weft_capture.breaks import Break
from weft_capture.values import floats, wrappers


@dataclass(eq=False)
class GraphInput:
    """A placeholder: where the caller loads it from, and the object seen while capturing.

    `requires_grad` is what the program makes it before the graph, None while it leaves it alone.
    """

    node: Node
    source: Source
    example: object
    node_example: object
    version: int
    requires_grad: bool | None = None

    def given(self) -> object:
        """Return the example as the graph will get such an object."""
        if self.requires_grad is None:
            return self.example
        assert isinstance(self.example, torch.Tensor)
        return self.example.detach().requires_grad_(self.requires_grad)

    def is_shared(self) -> bool:
        """Say whether this is a tensor that others may hold too, not one made for the call."""
        made = isinstance(self.source, CallSource) and self.source.function is floats.scalar_tensor
        return isinstance(self.example, torch.Tensor) and not made

    def is_written(self) -> bool:
        """Say whether the graph may write to this input in place."""
        twin: Any = self.node_example
        uncounted = isinstance(twin, torch.Tensor) and twin.is_inference()
        uncounted |= is_jagged(type(twin)) and twin._values.fake_mode.writes > 0
        return uncounted or version_of(twin) != self.version


def memory_guards(inputs: list[GraphInput]) -> list[Guard]:
    """Guard that what a graph writes shares memory with other inputs as it does now.

    A backend may reorder reads and writes of what it takes for different tensors.
    """
    written: dict[Source, Any] = {}
    read: dict[Source, Any] = {}
    for entry in inputs:
        if entry.is_shared():
            parts = wrappers.inside(entry.example, entry.source)
            target = written if entry.is_written() else read
            known = set(map(id, target.values()))  # the same objects: an alias guard
            target.update({at: one for at, one in parts.items() if id(one) not in known})
    read = {at: t for at, t in read.items() if all(t is not one for one in written.values())}
    if not written or len(written) + len(read) == 1:
        return []
    shared = shares_memory(list(written.values()), list(read.values()))
    use = MemoryUse(tuple(written), tuple(read), shared)
    return [Guard.of(use.written[0], "MEMORY", use)]


def check_views(inputs: list[GraphInput]) -> None:
    """Break where a view came in of a tensor that the program has made require grad."""
    changed = [entry.example for entry in inputs if entry.requires_grad]
    for entry in inputs if changed else ():
        base = getattr(entry.example, "_base", None)
        if base is not None and any(base is one for one in changed):
            raise Break("unsupported-value", "a view of a tensor whose requires_grad changed")
