"""What the captured code did to objects that existed before it, to be redone after the graph.

Only the final state is written, object by object in the order of first change: nothing else can
look at the objects while the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft_capture.values.base import MutableValue, Value
from weft_capture.values.objects import DELETED

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer


class Effects:
    """The changes of one capture."""

    def __init__(self, tx: Tracer) -> None:
        self.tx = tx
        self.changed: dict[MutableValue, None] = {}
        self.globals: dict[tuple[int, str], tuple[Any, Value]] = {}

    def note(self, value: MutableValue) -> None:
        """Record that an existing object changes; taken back with the step."""
        if value not in self.changed:
            self.changed[value] = None
            self.tx.journal.on_rollback(lambda: self.changed.pop(value, None))

    def store_global(self, global_dict: Any, name: str, value: Value) -> None:
        """Record the write of a global, or of an attribute of a class."""
        key = (id(global_dict), name)
        old = self.globals.get(key)
        self.globals[key] = (global_dict, value)

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
        every = {id(one) for obj in objects for one in (obj, getattr(obj, "__dict__", obj))}
        known = [self.tx.known[one][0] for one in every if one in self.tx.known]
        return any(key in every for key, _ in self.globals) or not self.changed.keys().isdisjoint(
            known
        )

    def __bool__(self) -> bool:
        return bool(self.changed or self.globals)

    def prepare(self, out: Output) -> Callable[[], None]:
        """Load all that the writes need; the function returned emits the writes."""
        for value in self.changed:
            out.pin(value)
        writes = [value.replay(out) for value in self.changed]
        temps: list[tuple[Any, str, str | None]] = []
        for (_, name), (global_dict, written) in self.globals.items():
            if written is DELETED:
                temps.append((global_dict, name, None))
                continue
            out.load(written)
            temps.append((global_dict, name, out.store_temp()))

        def write() -> None:
            for one in writes:
                one()
            for global_dict, name, temp in temps:
                if temp is None:
                    out.writer.load_const(global_dict)
                    out.writer.load_method("pop")
                    out.writer.load_const(name)
                    out.writer.load_const(None)
                    out.writer.call_method(2)
                    out.writer.pop()
                    continue
                out.writer.load_local(temp)
                out.writer.load_const(global_dict)
                if isinstance(global_dict, type):
                    out.writer.store_attr(name)
                    continue
                out.writer.load_const(name)
                out.writer.store_subscr()

        return write
