"""Methods of generators that the captured program made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft_capture.breaks import Raised
from weft_capture.frames import GeneratorValue
from weft_capture.values.base import Value, method
from weft_capture.values.constant import NONE
from weft_capture.values.exceptions import ExceptionValue
from weft_capture.values.functions import ClassValue

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


def _item_or_stop(self: GeneratorValue, item: Value | None) -> Value:
    if item is not None:
        return item
    returned = self.returned
    args = [] if returned is None or returned is NONE else [returned]
    raise Raised(ExceptionValue(StopIteration, args))


@method(GeneratorValue, "__next__")
def _next(tx: Tracer, self: GeneratorValue) -> Value:
    return _item_or_stop(self, self.next(tx))


@method(GeneratorValue, "send")
def _send(tx: Tracer, self: GeneratorValue, value: Value) -> Value:
    if not self.started and value is not NONE:
        tx.raise_(TypeError, "can't send non-None value to a just-started generator")
    return _item_or_stop(self, self.send(tx, value))


@method(GeneratorValue, "throw")
def _throw(tx: Tracer, self: GeneratorValue, error: Value, *rest: Value) -> Value:
    # The old form: class, value, traceback.
    value = rest[0] if rest and rest[0] is not NONE else error
    if isinstance(value, ClassValue):
        value = value.call(tx, [], {})
    return _item_or_stop(self, self.throw(tx, value))


@method(GeneratorValue, "close")
def _close(tx: Tracer, self: GeneratorValue) -> Value:
    if self.frame is None or not self.started:
        tx.journal.touch(self)
        self.frame = None
        return NONE
    try:
        item = self.throw(tx, ExceptionValue(GeneratorExit, []))
    except Raised as raised:
        if issubclass(raised.value.python_type(), GeneratorExit | StopIteration):
            return NONE
        raise
    if item is not None:
        tx.raise_(RuntimeError, "generator ignored GeneratorExit")
    return NONE
