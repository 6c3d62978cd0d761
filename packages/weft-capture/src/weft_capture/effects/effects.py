"""What the captured code did to objects that existed before it, to be redone after the graph.

Only the final state is written, object by object in the order of first change: nothing else can
look at the objects while the graph runs.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Iterable
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

from weft_capture.breaks import Break
from weft_capture.model.attributes import dict_of
from weft_capture.model.constant import NONE, constant
from weft_capture.model.containers import Container
from weft_capture.model.dicts import DictValue
from weft_capture.model.finalizers import has_finalizer
from weft_capture.model.objects import DELETED, UserObject
from weft_capture.model.protocol import MutableValue, Output, Tracer, Value
from weft_capture.model.scope import globals_source
from weft_capture.tensors.runtime_values import origins


class Effects:
    """The changes of one capture."""

    def __init__(self, tx: Tracer) -> None:
        self.tx = tx
        self.changed: dict[MutableValue, bool] = {}  # whether it is a list not yet read
        self.globals: dict[tuple[int, str], tuple[Any, Value]] = {}
        self.sealed: dict[int, Value] = {}
        self.keys: dict[type, dict[int, Source]] = {}

    def freeze_class_inputs(self, made: Value, parts: Iterable[object]) -> None:
        """Note what a class was made of, or what making it made: it is made again in the end."""
        self.sealed.update(dict.fromkeys(map(id, parts), made))

    def sealing(self, source: Source | None) -> Value | None:
        """Return the class that was made with what a source leads to."""
        while source is not None and source.base is not None:
            source = source.base
        return self.sealed.get(id(source.value)) if isinstance(source, ConstSource) else None

    def change(self, value: MutableValue) -> None:
        """Record that an object is about to change, if it existed before.

        Raises:
            Break: when a class that was made in the frame depends on it.
        """
        if self.sealed and (id(value) in self.sealed or self.sealing(value.source)):
            raise Break("class-definition", "changing what a class made in the frame is made of")
        if value.source is not None:
            self.note(value)

    def note(self, value: MutableValue) -> None:
        """Record that an existing object changes; taken back with the step."""
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
        known, source = self.tx.values_by_id.get(id(real), (None, None))
        if known is value and source == ItemSource(globals_source(self.tx, global_dict), name):
            del self.globals[key]  # it is as it was

        def undo() -> None:
            if old is None:
                self.globals.pop(key, None)
            else:
                self.globals[key] = old

        self.tx.journal.on_rollback(undo)

    def global_value(self, global_dict: Any, name: str) -> Value | None:
        """Return what `store_global` was told last; None when nothing was."""
        if not self.globals:
            return None
        entry = self.globals.get((id(global_dict), name))
        return None if entry is None else self.tx.force(entry[1])

    def touches(self, *objects: object) -> bool:
        """Say whether a change of one of these objects, or of its dict, is yet to be written."""
        every = {id(one) for obj in objects for one in (obj, dict_of(obj))}
        known = [self.tx.values_by_id[one][0] for one in every if one in self.tx.values_by_id]
        return any(key in every for key, _ in self.globals) or not self.changed.keys().isdisjoint(
            known
        )

    def keyed(self, value: Value) -> None:
        """Note an object that is a dict key or set element, or was sought, by its identity."""
        source, real = value.source, getattr(value, "obj", None)
        if source is None or any(origins(source)):
            return
        real = getattr(value, "real", None) if real is None else real
        kind, at = (value.python_type() if real is None else type(real)), id(real)
        if real is None:  # of an exception, say
            at = self.tx.real_id(value) or id(value)
        first = self.keys.setdefault(kind, {}).setdefault(at, source)
        if real is not None and first != source:
            self.tx.guard_alias(first, source, real)

    def guard_keys(self) -> None:
        """Guard that what was found by identity, or not found, are different objects."""
        for found in self.keys.values():
            varies = any(not isinstance(one, ConstSource) for one in found.values())
            if varies and len(found) > 1:
                sources = tuple(map(weakly, found.values()))
                self.tx.guard(CallSource(_all_differ, sources), "CONST", True)

    def guard_distinct(self) -> None:
        """Guard that what changes is none of the other objects of its type that were looked at."""
        self.guard_keys()
        changing: dict[type, list[Source]] = {}
        staying: dict[type, list[Source]] = {}
        for value, source in self.tx.values_by_id.values() if self.changed else ():
            side = changing if value in self.changed else staying
            side.setdefault(value.python_type(), []).append(source)
        for kind, sources in changing.items():
            pairs = itertools.product(sources, staying.get(kind, ()))
            for one, other in (*itertools.combinations(sources, 2), *pairs):
                self.tx.guard_distinct(one, other)
        known = self.tx.values_by_id.values() if self.changed else ()
        made = LocalSource(str(inspect.getargs(self.tx.function.__code__).varkw))  # for the call
        dicts = [s for v, s in known if type(v) is DictValue and type(s) is LocalSource]
        dicts = [source for source in dicts if source != made]
        objects = [s for v, s in known if isinstance(v, UserObject) and v.cls.__dictoffset__]
        for one, other in itertools.product(map(DictSource, objects), dicts):
            # None holds an object's variables.
            self.tx.guard_distinct(one, other)

    def __bool__(self) -> bool:
        return bool(self.changed or self.globals)

    def prepare(self, out: Output) -> None:
        """Load all that the writes need, and leave the writes with `out`."""
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
