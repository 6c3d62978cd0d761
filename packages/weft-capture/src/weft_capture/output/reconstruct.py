"""`Output`: writes bytecode that loads values at the end of the captured frame.

A value with a source is loaded from it, and a tensor of the graph from the graph's outputs. Any
other value is rebuilt once by its `reconstruct` and kept in a temporary, so that identity holds.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch.fx import Node
from weft_guards.sources import ClosureSource

from weft_capture.breaks import Break
from weft_capture.bytecode import Writer
from weft_capture.functions.generators import GeneratorValue
from weft_capture.model.attributes import is_hidden
from weft_capture.model.constant import (
    FRAME_CLASSES,
    NULL,
    Constant,
    Varying,
    class_value,
    constant,
)
from weft_capture.model.containers import TupleValue
from weft_capture.model.dicts import LazyValue
from weft_capture.model.functions import CellValue
from weft_capture.model.iterators import IteratorValue
from weft_capture.model.objects import DELETED
from weft_capture.model.protocol import Tracer, Value
from weft_capture.model.slots import leads_to
from weft_capture.model.weakrefs import WeakRefValue
from weft_capture.tensors.tensor import SymValue, TensorValue

GRAPH_RESULT = "_weft_graph_result"


@dataclass(eq=False)
class Output:
    """Loads values into the code being written.

    Args:
        writer: the code.
        cells: the frame's own cell variables by value; the new code creates their cells.
        tx: the capture.
        ended: returns the call that creates a tensor whose history a backward pass has freed.
        exist: values created while capturing that the new code has in any case.

    `last` has calls on new objects that read what `writes` write.
    """

    writer: Writer
    cells: dict[CellValue, str]
    tx: Tracer
    ended: Callable[[TensorValue], tuple[object, list[Value]] | None]
    exist: Set[Value] = frozenset()
    graph_outputs: dict[Node, int] = field(default_factory=dict)
    writes: list[Callable[[], None]] = field(default_factory=list)
    last: list[tuple[object, Value]] = field(default_factory=list)
    _temps: dict[Value, str] = field(default_factory=dict)
    _building: set[Value] = field(default_factory=set)

    def load(self, value: Value) -> None:
        """Push a value."""
        if isinstance(value, LazyValue) and value.forced is not None:
            value = value.forced
        temp = self._temps.get(value)
        if temp is not None:
            self.writer.load_local(temp)
            return
        if isinstance(value, Constant) and type(value.value) in FRAME_CLASSES:
            enum_class = class_value(type(value.value))
            name = str(getattr(value.value, "_name_", None))
            if name not in getattr(type(value.value), "__members__", ()):
                detail = f"{value.describe()} of a class made in the frame"
                raise Break("class-definition", detail, self.tx.steps.restart_step_of(enum_class))
            self.load(enum_class)
            self.writer.load_attr(name)
            return
        if isinstance(value, Constant) or value is NULL:
            value.reconstruct(self)
            return
        cell = self._cell_of(value)
        if cell is not None:
            self.writer.load_closure(cell)
            return
        if value.source is not None:
            owner = self.tx.effects.owner_of_input(value.source)
            if owner is not None:
                detail = f"a part of {owner.describe()}, which is made again"
                raise Break("class-definition", detail, self.tx.steps.restart_step_of(owner))
            value.source.emit(self.writer)
            return
        self._rebuild(value)
        if value not in self._temps and not isinstance(value, TensorValue | SymValue):
            self.remember(value)

    def _rebuild(self, value: Value) -> None:
        if value in self._building:
            detail = f"rebuilding {value.describe()}, which leads to itself"
            raise Break("cannot-rebuild", detail, self.tx.steps.restart_step_of(value))
        iterates = isinstance(value, IteratorValue | GeneratorValue)
        if iterates or getattr(value, "base", None) is not None:
            self._building.add(value)
        try:
            value.reconstruct(self)
        except Break as error:
            if error.restart_step < 0:
                error.restart_step = self.tx.steps.restart_step_of(value)
            raise
        if isinstance(value, TupleValue) and value in self._temps:  # it contains itself
            self.writer.pop()
            self.writer.load_local(self._temps[value])

    def _cell_of(self, value: Value) -> str | None:
        """Return the name of the frame's own cell that a value is."""
        if not isinstance(value, CellValue):
            return None
        source = value.source  # the source of a cell that an inlined comprehension saved
        return self.cells.get(value, source.name if isinstance(source, ClosureSource) else None)

    def load_all(self, values: Iterable[Value]) -> None:
        """Push several values in order."""
        for value in values:
            self.load(value)

    def call(
        self, function: object, args: Sequence[Value], kwargs: Mapping[str, Value] | None = None
    ) -> None:
        """Push the result of calling a function, or a value that is one, on values."""
        names = kwargs or {}
        self.writer.begin_call()
        if isinstance(function, Value):
            self.load(function)
        else:
            self.writer.load_const(function)
        self.load_all(args)
        self.load_all(names.values())
        self.writer.call(len(args) + len(names), tuple(names))

    def do(self, function: object, *args: Value) -> None:
        """Call a function for its effect on a new object."""
        self.call(function, args)
        self.writer.pop()

    def fill_attributes(self, owner: Value, attributes: Mapping[str, Value]) -> None:
        """Set the attributes of a new object, bypassing any `__setattr__`."""
        hidden = [name for name in attributes if is_hidden(owner.python_type(), name)]
        shown = {name: value for name, value in attributes.items() if name not in hidden}
        if shown:
            self.call(set_attributes, [owner], shown)
            self.writer.pop()
        for name in hidden:
            self.do(_set_hidden, owner, constant(name), attributes[name])

    def load_graph_output(self, value: TensorValue | SymValue) -> None:
        """Push a result of the graph."""
        node = value.node
        if isinstance(value, TensorValue) and value.hooked_at >= 0:
            raise Break("autograd-state", "a tensor with a hook leaves the graph", value.hooked_at)
        if isinstance(value, TensorValue) and value.is_new_leaf():
            # The tracer of the next stage would give it a `grad_fn`, or no gradient.
            step = self.tx.graph.step_of_node.get(node, -1)
            raise Break("autograd-state", "a new leaf that requires grad leaves the graph", step)
        ending = self.ended(value) if isinstance(value, TensorValue) else None
        if ending is not None:
            self.call(*ending)
            self.remember(value)
            return
        index = self.graph_outputs.setdefault(node, len(self.graph_outputs))
        self.writer.load_local(GRAPH_RESULT)
        self.writer.load_const(index)
        self.writer.binary_subscr()

    def rebuilt(self) -> Set[Value]:
        """Return the values that this code creates or keeps."""
        return self._temps.keys()

    def kept(self, variables: Mapping[str, Value]) -> frozenset[str]:
        """Return the variables that hold objects whose death the program may see.

        CPython releases them when the frame ends, read or not. Results of a graph die early.
        """
        return frozenset(name for name, value in variables.items() if self._may_live(value))

    def _may_live(self, value: Value) -> bool:
        if isinstance(value, LazyValue):
            if value.forced is None:
                return gc.is_tracked(value.obj) and not issubclass(type(value.obj), torch.Tensor)
            value = value.forced
        if isinstance(value, Constant | Varying | TensorValue | CellValue):
            return False
        if isinstance(value, WeakRefValue):  # other code may count them
            return True
        return value.source is not None or value in self.exist

    def remember(self, value: Value) -> None:
        """Store the top of the stack as the object of `value`; it stays on the stack."""
        temp = self.writer.temp()
        self._temps[value] = temp
        self.writer.dup()
        self.writer.store_local(temp)

    def pin(self, value: Value) -> None:
        """Load an object into a temporary now, before writes change its source."""
        if isinstance(value, LazyValue) and value.forced is not None:
            value = value.forced
        if value in self._temps or value in self.cells:
            return
        if (
            isinstance(value, Constant)
            and value.origin is None
            and type(value.value) not in FRAME_CLASSES
        ):
            return
        self.load(value)
        if value not in self._temps:
            self.remember(value)
        self.writer.pop()

    def store_temp(self) -> str:
        """Pop into a new temporary."""
        temp = self.writer.temp()
        self.writer.store_local(temp)
        return temp

    def load_temp(self, value: Value) -> str:
        """Load a value into a new temporary."""
        self.load(value)
        return self.store_temp()

    def later(self, function: Callable[..., object], *args: Value) -> None:
        """Queue a call that changes an existing object: after all loads, with today's arguments."""
        for arg in args:
            self.pin(arg)

        self.writes.append(functools.partial(self.do, function, *args))

    def write(self) -> None:
        """Emit the queued calls."""
        for write in self.writes:
            write()
        for function, value in self.last:
            self.do(function, value)
        self.last.clear()
        self.writes.clear()  # they refer to this object, and to the program's objects

    def is_cyclic(self, value: Value) -> bool:
        """Say whether a container (indirectly) contains itself."""
        return leads_to([*value.tp_traverse()], value)

    def replay_attributes(
        self,
        owner: Value,
        attributes: dict[str, Value],
        set_one: Callable[..., None] = setattr,
        delete_one: Callable[..., None] = delattr,
    ) -> None:
        """Set (or delete) attributes of an existing object later.

        Args:
            set_one: sets an attribute, bypassing a `__setattr__` that was captured already.
            delete_one: deletes an attribute.
        """
        for name, value in attributes.items():
            if value is not DELETED and is_hidden(owner.python_type(), name):
                self.later(_set_hidden, owner, constant(name), value)
            elif value is DELETED:
                self.later(_delete_if_set, constant(delete_one), owner, constant(name))
            else:
                self.later(set_one, owner, constant(name), value)


def set_attributes(obj: object, /, **attributes: object) -> None:
    """Set attributes, bypassing any `__setattr__`."""
    for name, value in attributes.items():
        object.__setattr__(obj, name, value)


def _set_hidden(obj: object, name: str, value: object) -> None:
    """Store in the `__dict__` under the name of a data descriptor."""
    object.__getattribute__(obj, "__dict__")[name] = value


def _delete_if_set(delete: Callable[..., None], owner: object, name: str) -> None:
    """Delete an attribute, if it exists; the captured code may have set and deleted it."""
    with suppress(AttributeError):
        delete(owner, name)
