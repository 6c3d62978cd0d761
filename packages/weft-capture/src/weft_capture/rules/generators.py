"""Methods of generators and iterators that the captured program made."""

from __future__ import annotations

from weft_capture.breaks import Raised
from weft_capture.classes import ClassValue
from weft_capture.frames import GeneratorValue
from weft_capture.values.base import Tracer, Value, method
from weft_capture.values.constant import NONE
from weft_capture.values.exceptions import ExceptionValue, chain
from weft_capture.values.iterators import IteratorValue


def item_or_stop(tx: Tracer, self: Value, item: Value | None) -> Value:
    """Return what an iterator gave, or raise StopIteration with what its generator returned."""
    if item is not None:
        return item
    returned = getattr(self, "returned", None)
    args = [] if returned is None or returned is NONE else [returned]
    raise Raised(chain(tx, ExceptionValue(StopIteration, args)))


@method(IteratorValue, "__next__")
def _next(tx: Tracer, self: IteratorValue) -> Value:
    return item_or_stop(tx, self, self.next(tx))


@method(GeneratorValue, "send")
def _send(tx: Tracer, self: GeneratorValue, value: Value) -> Value:
    if not self.started and value is not NONE:
        tx.raise_(TypeError, "can't send non-None value to a just-started generator")
    return item_or_stop(tx, self, self.send(tx, value))


@method(GeneratorValue, "throw")
def _throw(tx: Tracer, self: GeneratorValue, error: Value, *rest: Value) -> Value:
    # The old form: class, value, traceback.
    value = rest[0] if rest and rest[0] is not NONE else error
    if isinstance(value, ClassValue):
        value = value.call(tx, [], {})
    return item_or_stop(tx, self, self.throw(tx, value))


@method(GeneratorValue, "close")
def _close(tx: Tracer, self: GeneratorValue) -> None:
    if self.frame is None or not self.started:
        tx.journal.touch(self)
        self.frame = None
        self.returned = None
        return
    try:
        item = self.throw(tx, ExceptionValue(GeneratorExit, []))
    except Raised as raised:
        if issubclass(raised.value.python_type(), GeneratorExit | StopIteration):
            return
        raise
    if item is not None:
        tx.raise_(RuntimeError, "generator ignored GeneratorExit")


@method(IteratorValue, "__iter__")
def _iter(tx: Tracer, self: IteratorValue) -> Value:
    return self
