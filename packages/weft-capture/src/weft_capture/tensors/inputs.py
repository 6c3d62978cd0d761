"""Inputs of a graph: sources, layouts, memory, and checks of writes to them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import CreationMeta
from torch.fx import Node
from weft_core.jagged import is_jagged
from weft_core.tensor_versions import version_of
from weft_guards import Guard, MemoryUse
from weft_guards.payloads import shares_memory, writes_are_disjoint
from weft_guards.sources import CallSource, ConstSource, DictSource, ItemSource, LocalSource, Source

from weft_capture.breaks import Break, NeedsSymbols
from weft_capture.model.constant import constant
from weft_capture.model.containers import SequenceValue
from weft_capture.model.protocol import Kwargs, Tracer, Value
from weft_capture.tensors import subclass, symbolic_scalars
from weft_capture.tensors.tensor import TensorValue

Layout = tuple[Any, Any, Any]
"""Sizes, strides and storage offset."""
State = tuple[torch.Tensor, int, bool, Layout | None]
"""A fake, how often it was written, whether it requires grad, its layout if that may change."""


def states(values: Iterable[Any], target: Any) -> list[State]:
    """Return the states of the tensors among values, and in lists of them, before `target`."""
    reshapes = changes_layout(getattr(target, "__name__", target))
    snapshot: list[State] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            laid_out = reshapes and value.layout is torch.strided
            layout = layout_of(value) if laid_out else None
            snapshot.append((value, version_of(value), value.requires_grad, layout))
        elif isinstance(value, list | tuple):
            snapshot += states(value, target)
    return snapshot


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the sizes, strides and storage offset of a tensor."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


@functools.cache
def changes_layout(name: str) -> bool:
    """Say whether an operation changes the layout of its first argument in place (`t_`)."""
    in_place = name[-1:] == "_" and name[-2:] != "__"
    packet: Any = getattr(torch.ops.aten, name.partition(".")[0], None) if in_place else None
    tags = {tag for o in packet.overloads() for tag in getattr(packet, o).tags} if packet else ()
    return torch.Tag.inplace_view in tags


def restore(before: list[State]) -> None:
    """Restore tensors; a view whose base now has a `grad_fn` keeps its own."""
    for tensor, version, requires_grad, layout in before:
        if layout is not None:
            with torch.no_grad():
                tensor.as_strided_(*layout)
        if tensor.requires_grad and not requires_grad:
            with suppress(RuntimeError):
                _ = tensor.requires_grad_(False) if tensor.is_leaf else tensor.detach_()
        if version_of(tensor) != version:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


_LONGEST_NAME = 36
_WORD = re.compile("[A-Za-z0-9]+")
_NOISE = ("dict", "modules", "parameters", "buffers")  # where modules keep their members


def input_name(source: Source) -> str:
    """Return a short name for an input: `blocks_0_weight` for `self.blocks[0].weight`."""
    words = _WORD.findall(source.expr())
    name = "_".join([word for word in words[1:] if word not in _NOISE]).lower()
    name = name.removeprefix("self_")
    while len(name) > _LONGEST_NAME and "_" in name:
        name = name.partition("_")[2]
    return name[-_LONGEST_NAME:] or "input"


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


# ---- `as_strided` depends on the storage of its argument


_NAMES = ("as_strided", "as_strided_", "as_strided_copy")


def begins_its_memory(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has no storage offset."""
    return tensor.storage_offset() == 0


def guard_strided(tx: Tracer, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Guard what `as_strided` of a fake assumes: offsets count from the start of the memory.

    The fake of an argument begins its memory and has no more than its own elements.

    Raises:
        Break: it would reach memory that the fake does not have.
    """
    name = getattr(target, "__name__", target)
    if not isinstance(name, str) or name.partition(".")[0] not in _NAMES:
        return
    x, sizes, strides, offset = _arguments(*args, **kwargs)
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or 0 in sizes:
        return
    first = x.storage_offset() if offset is None else offset
    end = first + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1
    if end * x.element_size() > x.untyped_storage().nbytes():
        raise Break("tensor-storage", f"{name} beyond the elements of the tensor")
    entry = None if offset is None else _owner(tx.graph.inputs, x)
    if entry is None:
        return
    if not begins_its_memory(entry.example):  # type: ignore[arg-type]
        raise Break("tensor-storage", f"{name} with an offset, of a tensor with an offset")
    tx.guard(CallSource(begins_its_memory, (entry.source,)), "CONST", True)


def _arguments(
    self: Any = None, size: Any = (), stride: Any = (), storage_offset: Any = None, **rest: Any
) -> tuple[Any, Any, Any, Any]:
    return rest.get("input", self), size, stride, storage_offset


def _owner(inputs: Sequence[GraphInput], x: torch.Tensor) -> GraphInput | None:
    memory = x.untyped_storage()._cdata
    for entry in inputs:
        fake = entry.node_example
        if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
            if fake.untyped_storage()._cdata == memory:
                return entry
    return None


# ---- which sizes, strides and ints from outside become symbolic in one capture


Dims = tuple[int, ...]


def dynamic_layout(tx: Tracer, tensor: torch.Tensor, source: Source) -> tuple[Dims, Dims]:
    """Return the dimensions of an input that become symbolic, and those whose strides do."""
    if tx.policy is None or isinstance(source, ConstSource):
        return (), ()
    dims = tuple(d for d, varies in enumerate(tx.policy.dims(source, tensor)) if varies)
    strides = tx.policy.free_strides(source, tensor)
    if (dims or strides) and not tx.symbolic:
        raise NeedsSymbols
    return dims, strides


def dynamic_int(tx: Tracer, number: int, source: Source) -> Value | None:
    """Return a symbolic int for an input that varies; None to keep it constant."""
    root = source
    while isinstance(root, ItemSource) and not isinstance(root.base, DictSource):
        root = root.base
    if tx.policy is None or (root is not source and tx.steps.no_tensor_yet):
        return None  # it would create hundreds of symbols
    argument = isinstance(root, LocalSource)
    if not tx.policy.int_is_dynamic(source, number, argument=argument):
        return None
    if not tx.symbolic:
        raise NeedsSymbols
    value = tx.graph.symint_input(number, source)
    if value is not None:
        tx.guard(source, "TYPE", int)
    return value


def unread_length(tx: Tracer, container: Any) -> Value | None:
    """Return the length of an untouched container from outside; None for another one."""
    if not container.is_untouched():
        return None
    length = len(container.real)
    varying = tx.dynamic_int(length, CallSource(len, (container.source,)))
    if varying is None:
        tx.guard(container.source, "LEN", length)
    return varying or constant(length)


_RESHAPES = ("resize_", "resize_as_", "as_strided_")


def refuse_reshaping(target: Any, args: list[Value], kwargs: Kwargs) -> None:
    """Break where an input is resized (only its fake would be), or a view (its base would not)."""
    out = kwargs.get("out")
    object_of = args[:1] if getattr(target, "__name__", target) in _RESHAPES else []
    into = out.items if isinstance(out, SequenceValue) else [out] if out else object_of
    tensors = [value for value in into if isinstance(value, TensorValue)]
    from_outside = any(value.real is not None for value in tensors)
    if not from_outside and not any(value.example()._is_view() for value in tensors):
        return
    same = out is not None
    with suppress(Exception):  # an operation that fails raises later
        rest = {name: value.example() for name, value in kwargs.items() if name != "out"}
        results: Any = target(*(arg.example() for arg in args), **rest) if same else None
        results = [results] if len(into) == 1 else results
        same = same and [t.shape for t in results] == [value.example().shape for value in into]
    if not same:
        raise Break("tensor-storage", f"resizing {'an input tensor' if from_outside else 'a view'}")
