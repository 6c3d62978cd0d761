"""What lowerings are made with: the table of them, a call, and the program that they add to.

A lowering takes a `Call` (what the graph says about the node) and the node's arguments, tensors as
LazyTensor, and returns a LazyTensor or a tuple of them.  It raises NoLowering for a case it does
not cover; the graph then calls the operator through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx
from weft_core.launches import LAUNCH_

from weft_codegen.loops import checks
from weft_codegen.loops import program as ir
from weft_codegen.loops.expr import Expr, apply, cast, constant
from weft_codegen.loops.index import ZERO, Axis, IndexExpr, as_axis
from weft_codegen.loops.lower import fxnodes
from weft_codegen.loops.lower.lazy_tensor import (
    Element,
    Indices,
    LazyTensor,
    broadcast_at,
    contiguous_strides,
    flatten,
    index_space,
    is_dense,
    offset_of,
)
from weft_codegen.loops.lower.shapes import NoLowering, to_shape
from weft_codegen.loops.lower.shapes import require as require
from weft_codegen.loops.ops import DTYPES

Axes = tuple[Axis, ...]
Shape = tuple[IndexExpr, ...]
IndexMap = Callable[[Indices], Sequence[IndexExpr]]
Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}
"""Operator name -> function, filled by the modules that rows.py imports."""

Row = TypeVar("Row", bound=Lowering)


def lowers(*names: str) -> Callable[[Row], Row]:
    """Register a lowering for these operators (`aten.add`: every functional overload)."""

    def register(function: Row) -> Row:
        for name in names:
            LOWERINGS[name] = function
        return function

    return register


def lowers_each(given: Mapping[str, Any]) -> Callable[[Row], Row]:
    """Register a lowering for several operators, its first argument a value of each's own."""

    def register(function: Row) -> Row:
        LOWERINGS.update((name, partial(function, value)) for name, value in given.items())
        return function

    return register


def normalise_dim(dim: int, rank: int) -> int:
    """`dim` counted from the front."""
    return dim % rank if rank else 0


@dataclass(frozen=True)
class Call:
    """One fx node being lowered: the fake result, how often it is used, where it came from."""

    graph: LoweringContext
    fake: Any
    uses: int
    origins: tuple[str, ...]
    node: Any = None

    @property
    def results(self) -> tuple[Call, ...]:
        """A call for each tensor of a node that returns several."""
        return tuple(replace(self, fake=fake) for fake in self.fake)

    def lazy(self, element: Element) -> LazyTensor:
        """A new tensor shaped like the node's result, computed by `element`."""
        return LazyTensor(
            to_shape(self.fake.shape),
            self.fake.dtype,
            to_shape(self.fake.stride()),
            element,
            uses=self.uses,
            origins=self.origins,
            device=self.fake.device,
        )

    def view(self, base: LazyTensor, element: Element, offset: IndexExpr = ZERO) -> LazyTensor:
        """A view of `base` shaped like the node's result.

        `offset` is how many elements its first one lies after base's.
        """
        view = self.lazy(element)
        view.origins = base.origins
        view.root = base.root or base
        view.offset = base.offset + offset
        return view


class LoweringContext:
    """The buffers and steps of a program while a graph is lowered.

    Attributes:
        fallback_random: random operators are calls.
        seed, draws: the seed of the program's random numbers, and how many operators have drawn.
    """

    def __init__(self, fallback_random: bool) -> None:
        self.fallback_random = fallback_random
        self.seed: LazyTensor | None = None
        self.draws = 0
        self._buffers: ir.Buffers = {}
        self._items: list[ir.Step] = []
        self._written: list[str] = []
        self._aliases: dict[tuple[Any, ...], ir.Buffer] = {}
        self._checked: set[tuple[LazyTensor, IndexExpr, bool]] = set()

    def extern(
        self, call: Call, target: Any, args: Any, kwargs: Any, reason: str = "part of another row"
    ) -> Any:
        """Return the results of a call of `target`, shaped like the fake ones of `call`.

        `reason` says why it is no loop.
        """
        owning = fxnodes.without_alias(target, args)
        if owning._schema.is_mutable and owning is not LAUNCH_:
            raise NoLowering(f"{owning} mutates its arguments")
        for one in args[1] if target.namespace == "weft" else ():
            require(self.materialise(one).strides == one.strides, "a kernel with other strides")
        outs: Sequence[Any] = (call.fake,)
        if isinstance(call.fake, tuple | list):
            outs = fxnodes.without_unused(call.fake, call.node, target)
        outs = outs if target._schema.returns else ()
        if any(isinstance(fake, tuple | list) for fake in outs):
            raise NoLowering(f"{owning} returns lists of tensors")
        tensors: list[LazyTensor | None] = []
        for fake in outs:
            tensors.append(None)
            if isinstance(fake, torch.Tensor):
                buffer = self._new_buffer(fake)
                tensors[-1] = self._in_memory(buffer)
                if owning is not target:
                    # The copying twin of a view operator returns a contiguous tensor.
                    dense = replace(buffer, strides=contiguous_strides(buffer.shape))
                    self._buffers[buffer.name] = dense
                    # Views of it were traced with the strides of the view, which it does not have.
                    tensors[-1] = replace(self._in_memory(dense), strides=buffer.strides)
        plain, keywords = fx.node.map_aggregate((tuple(args), kwargs), self._plain)
        written = tuple(one.buffer.name for one in fxnodes.written_by(owning, args))
        self._written += [name for name in written if name.startswith("in")]
        names = tuple(t.buffer.name if t and t.buffer else None for t in tensors)
        origins = call.origins[-1:]
        self._items.append(
            ir.Extern(owning, plain, tuple(keywords.items()), names, written, origins, None, reason)
        )
        if isinstance(call.fake, tuple | list) or not tensors:
            return tuple(tensors)
        return tensors[0]

    def _plain(self, value: Any) -> Any:
        """An operator argument with tensors as BufferRef."""
        if isinstance(value, LazyTensor):
            return ir.BufferRef(self.materialise(value).name)
        if isinstance(value, Expr):
            raise NoLowering("a number computed from sizes as an operator's argument")
        return value

    def materialise(self, tensor: LazyTensor) -> ir.Buffer:
        """The buffer (or the alias into its root's buffer) that holds `tensor`."""
        if tensor.buffer is not None:
            return tensor.buffer
        root = tensor.root
        if root is None:
            self.realise(tensor)
            assert tensor.buffer is not None
            return tensor.buffer
        self.realise(root)
        base = root.buffer
        assert base is not None
        if base.strides != root.strides:
            # The root is laid out anew, so the view cannot be expressed in its memory.
            tensor.root = None
            return self.materialise(tensor)
        key = (base.name, tensor.shape, tensor.strides, tensor.offset, tensor.dtype)
        if key not in self._aliases:
            if key[1:4] == (base.shape, base.strides, ZERO):
                return base
            name = self._fresh("view")
            self._aliases[key] = replace(
                base, name=name, shape=tensor.shape, strides=tensor.strides
            )
            self._buffers[name] = self._aliases[key]
            self._items.append(ir.Alias(name, base.name, tensor.offset))
        return self._aliases[key]

    def realise(self, tensor: LazyTensor) -> None:
        """Compute `tensor` into a buffer of its own, unless it has one."""
        if tensor.buffer is not None:
            return
        axes, where, value = self._element(tensor)
        dense = is_dense(tensor.shape, tensor.strides)
        strides = tensor.strides if dense else contiguous_strides(tensor.shape)
        buffer = ir.Buffer(self._fresh(), tensor.dtype, tensor.shape, strides, tensor.device)
        self._store(buffer, axes, where, value, tensor.origins)
        tensor.buffer = buffer

    def _store(
        self, buffer: ir.Buffer, axes: Axes, where: Indices, value: Expr, origins: tuple[str, ...]
    ) -> None:
        require(buffer.dtype in DTYPES, f"a kernel that stores {buffer.dtype}")
        self._buffers[buffer.name] = buffer
        position, value = offset_of(where, buffer.strides), cast(value, buffer.dtype)
        self._items.append(ir.Compute(buffer.name, axes, (), None, (value,), position, origins))

    @staticmethod
    def _element(tensor: LazyTensor) -> tuple[Axes, list[IndexExpr], Expr]:
        where, axes = index_space(tensor.shape)
        at = tensor.rounded_at if tensor.is_compared else tensor.at
        return axes, where, at(where)

    def reduction(
        self, call: Call, op: str, axes: Axes, reduced: Axes, values: Any, dtype: torch.dtype
    ) -> LazyTensor:
        """Return a buffer of the extents of `axes` that holds the reduction of `values`."""
        shape = tuple(loop.extent for loop in axes)
        fake = call.fake[0] if isinstance(call.fake, tuple | list) else call.fake
        buffer = ir.Buffer(self._fresh(), dtype, shape, contiguous_strides(shape), fake.device)
        self._buffers[buffer.name] = buffer
        position = flatten([loop.at for loop in axes], shape)
        # Over dimensions of size one there is nothing to combine: the value (or position) itself.
        kind = op if reduced else None
        if not reduced:
            alone = values[-1]
            if op == "sum" and alone.dtype.is_floating_point:
                alone = apply("add", alone, constant(0, alone.dtype))  # 0 + -0.0 is 0.0
            values = (cast(alone, dtype),)
        self._items.append(
            ir.Compute(buffer.name, axes, reduced, kind, values, position, call.origins)
        )
        tensor = self._in_memory(buffer)
        tensor.origins = call.origins
        return tensor

    def scanned(
        self, call: Call, op: str, dim: int, value: Element, inner: torch.dtype
    ) -> LazyTensor:
        """Return a buffer like the result: at each index what `op` makes of all values up to there
        along `dim`. It accumulates in `inner`, the dtype of the values."""
        result = call.lazy(value)
        axes, where, _ = self._element(result)
        self.realise(result)
        node = self._items[-1]
        assert isinstance(node, ir.Compute)
        along = tuple(loop for loop in axes if loop is as_axis(where[dim]))
        values = (cast(value(where), inner),)
        self._items[-1] = replace(node, values=values, scan=op, along=along)
        return result

    def updated(
        self, call: Call, base: LazyTensor, over: Shape, target: IndexMap, value: Element, mode: str
    ) -> LazyTensor:
        """Return a copy of `base` in which value(i) is stored at (or with mode "add", added to)
        target(i), for every index i of the shape `over`.

        An input that the graph itself replaces by that copy is updated where it is.
        """
        copy = base
        if mode == "set" and base.buffer and fxnodes.replaces_its_input(call.node):
            self._written.append(base.buffer.name)
        else:
            copy = call.lazy(lambda where: broadcast_at(base, where))
            self.realise(copy)
        assert copy.buffer is not None
        where, axes = index_space(over, "e")
        position = offset_of(target(where), copy.buffer.strides)
        values = (cast(value(where), copy.dtype),)
        self._items.append(
            ir.Compute(
                copy.buffer.name, axes, (), None, values, position, call.origins, update=mode
            )
        )
        return copy

    def check_index(
        self, call: Call, index: LazyTensor, extent: IndexExpr, *, dim: int, wraps: bool, kind: str
    ) -> None:
        """Raise eager's exception at run time if an element is outside [0, extent) ([-extent,
        extent) if it `wraps`): a reduction finds it, a call raises, or stops a GPU as in eager."""
        key = (index, extent, wraps)
        if key in self._checked:
            return
        self._checked.add(key)
        why = "a loop cannot raise"
        axes, _, value = self._element(index)
        code = checks.violation(cast(value, torch.int64), extent, wraps)
        whole = replace(call, fake=torch.empty((), dtype=torch.int64, device="meta"))
        found = self.reduction(whole, "max", (), axes, (code,), torch.int64)
        assert found.buffer is not None
        name = found.buffer.name
        self._buffers[name] = found.buffer = replace(found.buffer, device=index.device)
        if index.device != ir.CPU:  # to read the code would wait for the GPU
            good = LazyTensor((), torch.bool, (), lambda _: checks.is_good(found.at(())))
            good.device = index.device
            text = f"{kind}: index out of bounds for dimension {dim} with size {extent}"
            self.extern(whole, torch.ops.aten._assert_async.msg, (good, text), {}, why)
            return
        args, origins = (ir.BufferRef(name), extent, dim, kind), call.origins[-1:]
        check = ir.Extern(checks.check_index, args, (), (), (), origins, when=name, reason=why)
        self._items.append(check)

    def _new_buffer(self, fake: torch.Tensor, name: str | None = None) -> ir.Buffer:
        if fake.layout is not torch.strided:
            raise NoLowering(f"tensor of layout {fake.layout}")
        strides = to_shape(fake.stride())
        name = name or self._fresh()
        buffer = ir.Buffer(name, fake.dtype, to_shape(fake.shape), strides, fake.device)
        self._buffers[name] = buffer
        return buffer

    def _fresh(self, kind: str = "buf") -> str:
        return f"{kind}{len(self._buffers)}"

    @staticmethod
    def _in_memory(buffer: ir.Buffer) -> LazyTensor:
        return LazyTensor(
            buffer.shape, buffer.dtype, buffer.strides, buffer=buffer, device=buffer.device
        )
