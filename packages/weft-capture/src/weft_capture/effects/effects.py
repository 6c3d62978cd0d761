"""Effects of a captured frame: changes of objects that existed before it, and deferred calls.

The new code makes the changes after the graph: only the final state is written, object by object in
the order of first change. No other code can read the objects while the graph runs.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weft_guards import WeakIdentity
from weft_guards.sources import (
    CallSource,
    ConstSource,
    DictSource,
    ItemSource,
    LocalSource,
    ProgramSource,
    Source,
)

from weft_capture import frame as hook
from weft_capture.breaks import Break, BreakAtStep
from weft_capture.effects.checks import has_checks
from weft_capture.model.attributes import dict_of
from weft_capture.model.constant import NONE, constant
from weft_capture.model.containers import Container
from weft_capture.model.dicts import DictValue
from weft_capture.model.objects import DELETED, UserObject
from weft_capture.model.protocol import MutableValue, Output, Tracer, Value
from weft_capture.model.scope import globals_source
from weft_capture.model.weakrefs import has_finalizer
from weft_capture.tensors.runtime_values import RuntimeSource, TensorSnapshot, origins


class Effects:
    """The changes of one capture."""

    def __init__(self, tx: Tracer) -> None:
        self.tx = tx
        self.changed: dict[MutableValue, bool] = {}  # True for a list not yet read
        self.globals: dict[tuple[int, str], tuple[Any, Value]] = {}
        self.frozen_inputs: dict[int, Value] = {}
        self.keys: dict[type, dict[int, Source]] = {}

    def freeze_class_inputs(self, owner: Value, inputs: Iterable[object]) -> None:
        """Record the inputs of a class statement: generated code creates the class again."""
        self.frozen_inputs.update(dict.fromkeys(map(id, inputs), owner))

    def owner_of_input(self, source: Source | None) -> Value | None:
        """Return the class that was created from the object of a source."""
        while source is not None and source.base is not None:
            source = source.base
        return self.frozen_inputs.get(id(source.value)) if isinstance(source, ConstSource) else None

    def change(self, value: MutableValue) -> None:
        """Record that an object is about to change, if it existed before.

        Raises:
            Break: when a class that the frame created depends on it.
        """
        if self.frozen_inputs and (
            id(value) in self.frozen_inputs or self.owner_of_input(value.source)
        ):
            raise Break("class-definition", "a change of an object that a new class depends on")
        if value.source is not None:
            self.note(value)

    def note(self, value: MutableValue) -> None:
        """Record that an existing object changes; a rollback of the step undoes it."""
        unread = getattr(value, "read", None) is not None
        if self.changed.get(value, True):  # the first time, and the first since it was read
            if isinstance(value, Container) and not unread and has_finalizer(value):
                raise Break("finalizer", "a container that holds objects with a __del__")
            if value not in self.changed:
                self.tx.journal.on_rollback(lambda: self.changed.pop(value, None))
            elif not unread:
                self.tx.journal.on_rollback(lambda: self.changed.update({value: True}))
            self.changed[value] = unread

    def store_global(self, global_dict: Any, name: str, value: Value) -> None:
        """Record the write of a global, or of an attribute of a class."""
        key = (id(global_dict), name)
        old = self.globals.get(key)
        self.globals[key] = (global_dict, value)
        real = global_dict.get(name) if isinstance(global_dict, dict) else None
        current, source = self.tx.values_by_id.get(id(real), (None, None))
        if current is value and source == ItemSource(globals_source(self.tx, global_dict), name):
            del self.globals[key]  # the value is unchanged

        def undo() -> None:
            if old is None:
                self.globals.pop(key, None)
            else:
                self.globals[key] = old

        self.tx.journal.on_rollback(undo)

    def global_value(self, global_dict: Any, name: str) -> Value | None:
        """Return the last value of `store_global`, or None."""
        if not self.globals:
            return None
        entry = self.globals.get((id(global_dict), name))
        return None if entry is None else self.tx.force(entry[1])

    def touches(self, *objects: object) -> bool:
        """Say whether a change of one of these objects, or of its dict, is pending."""
        every = {id(object_id) for obj in objects for object_id in (obj, dict_of(obj))}
        values = [self.tx.values_by_id[o][0] for o in every if o in self.tx.values_by_id]
        return any(key in every for key, _ in self.globals) or not self.changed.keys().isdisjoint(
            values
        )

    def keyed(self, value: Value) -> None:
        """Record an object that is a dict key or set element, or was looked up, by identity."""
        source, real = value.source, getattr(value, "obj", None)
        if source is None or any(origins(source)):
            return
        real = getattr(value, "real", None) if real is None else real
        key_type, at = (value.python_type() if real is None else type(real)), id(real)
        if real is None:  # of an exception, say
            at = self.tx.real_id(value) or id(value)
        first = self.keys.setdefault(key_type, {}).setdefault(at, source)
        if real is not None and first != source:
            self.tx.guard_alias(first, source, real)

    def guard_keys(self) -> None:
        """Guard that keys that are compared by identity are different objects."""
        for sources_by_id in self.keys.values():
            varies = any(not isinstance(source, ConstSource) for source in sources_by_id.values())
            if varies and len(sources_by_id) > 1:
                sources = tuple(map(weakly, sources_by_id.values()))
                self.tx.guard(CallSource(_all_differ, sources), "CONST", True)

    def guard_distinct(self) -> None:
        """Guard that a changed object is none of the other objects of its type that were read."""
        self.guard_keys()
        changing: dict[type, list[Source]] = {}
        staying: dict[type, list[Source]] = {}
        for value, source in self.tx.values_by_id.values() if self.changed else ():
            side = changing if value in self.changed else staying
            side.setdefault(value.python_type(), []).append(source)
        for key_type, sources in changing.items():
            pairs = itertools.product(sources, staying.get(key_type, ()))
            for first, second in (*itertools.combinations(sources, 2), *pairs):
                self.tx.guard_distinct(first, second)
        tracked = self.tx.values_by_id.values() if self.changed else ()
        keywords = LocalSource(str(inspect.getargs(self.tx.function.__code__).varkw))
        dicts = [s for v, s in tracked if type(v) is DictValue and type(s) is LocalSource]
        dicts = [source for source in dicts if source != keywords]
        objects = [s for v, s in tracked if isinstance(v, UserObject) and v.cls.__dictoffset__]
        for first, second in itertools.product(map(DictSource, objects), dicts):
            # None of these dicts is the namespace of an object.
            self.tx.guard_distinct(first, second)

    def __bool__(self) -> bool:
        return bool(self.changed or self.globals)

    def prepare(self, out: Output) -> None:
        """Load the operands of all writes, and queue the writes in `out`."""
        for value in self.changed:
            out.pin(value)
        for value in self.changed:
            value.replay(out)
        for (_, name), (holder, written) in self.globals.items():
            if written is DELETED:
                out.later(dict.pop, constant(holder), constant(name), NONE)
            else:
                set_one = type.__setattr__ if isinstance(holder, type) else operator.setitem
                out.later(set_one, constant(holder), constant(name), written)


def weakly(source: Source) -> Source:
    """Return a source of the same object that does not keep it alive, where there is one."""
    if not isinstance(source, ConstSource):
        return source
    try:
        return ProgramSource(WeakIdentity(source.value))
    except TypeError:
        return source


def _all_differ(*objects: object) -> bool:
    return len(set(map(id, objects))) == len(objects)


# ---- calls that run eagerly in each call of the function: output, clocks, random numbers
#
# Capture only records such a call. The replacement code makes it before the graph (early) or right
# after it (late), in the program's order, and before writes to objects.
# docs/architecture/capture-effects.md lists the conditions under which the program cannot notice.


@dataclass(frozen=True, eq=False)
class DeferredCall:
    """One call; `result` is where its result is stored."""

    function: Callable[..., Any]
    args: list[Value]
    result: RuntimeSource
    snapshot: TensorSnapshot


class DeferredCalls:
    """The calls of one capture; `count` includes calls that were rolled back."""

    def __init__(self, tx: Tracer) -> None:
        self.tx = tx
        self.calls: list[DeferredCall] = []
        self.clock_at = -1
        self.count = 0
        self.settings: dict[Any, Value] = {}  # what reads a setting -> what was set
        self.written: set[int] = set()  # ids of lists that warnings go to

    def add(self, function: Callable[..., Any], *args: Value, early: bool = False) -> RuntimeSource:
        """Record a call and return the source of its result.

        Args:
            function: takes positional arguments.
            early: the call may run before the operations that precede it.

        Raises:
            Break: when an argument is computed after the call.
        """
        tx = self.tx
        handlers = tx.overrides
        if handlers.modes or handlers.level or handlers.overriding(list(args), {}):
            raise Break("torch-function", "a side effect inside a function mode")
        late = bool(tx.graph.op_count) and not early
        if not late and has_checks(tx.graph):
            raise Break("side-effect", "a call before a graph that may have to run again")
        if not late and any(origin.late for arg in args for origin in origins(arg.source)):
            raise Break("data-dependent-value", "an argument that the graph computes")
        result = RuntimeSource(f"_weft_runtime_{self.count}", late)
        self.count += 1
        self.calls.append(DeferredCall(function, list(args), result, TensorSnapshot(tx, args)))
        tx.journal.on_rollback(self.calls.pop)
        return result

    def read_clock(self, function: Callable[[], Any]) -> Value:
        """Record the reading of a clock."""
        source = self.add(function)
        self._stay_last(source)
        return self.tx.runtime_value(source, function())

    def change_setting(self, setter: Any, values: Iterable[Value], known: dict[Any, Value]) -> None:
        """Record the change of a setting; `known` is what its readers return from now on."""
        self._stay_last(self.add(setter, *values))
        before = self.settings
        self.tx.journal.on_rollback(lambda: setattr(self, "settings", before))
        self.settings = before | known

    def _stay_last(self, source: RuntimeSource) -> None:
        """Allow no operations after a call that is made after the graph."""
        if source.late and self.clock_at < 0:
            self.clock_at = self.tx.steps.now
            self.tx.journal.on_rollback(self.forget_clock)

    def forget_clock(self) -> None:
        """Allow operations again."""
        self.clock_at = -1

    def check_clock(self) -> None:
        """Break at a clock that an operation follows."""
        if self.clock_at >= 0:
            raise BreakAtStep(
                self.clock_at,
                Break("side-effect", "a clock is read, or a setting changed, between operations"),
            )

    def emit(self, out: Output, late: bool) -> None:
        """Write the calls before or after the graph."""
        for call in self.calls:
            if call.result.late is late:
                if late:
                    call.snapshot.check()
                # With the frame hook off, so that a handler or a stream is not captured.
                out.call(hook.run, [NONE, constant(call.function), *call.args])
                out.writer.store_local(call.result.name)
