"""Small immutable things of the standard library: computed while capturing when all is known.

`CONSTANT_TYPES` gets the types whose objects never change; `PURE` gets functions whose result
depends on nothing but their arguments.
"""

from __future__ import annotations

import binascii
import datetime
import json
import pathlib
import re
import struct
import threading
import types
import typing
from typing import TYPE_CHECKING, Any

from weft_capture.breaks import Break
from weft_capture.rules.table import PURE, rule
from weft_capture.values.base import MutableValue, Value, method
from weft_capture.values.constant import CONSTANT_TYPES, NONE, TRUE, constant
from weft_capture.values.objects import UserObject

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer

_MADE = (
    datetime.date,
    datetime.time,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
)
CONSTANT_TYPES.update((*_MADE, re.Pattern, re.Match))
PURE.update(_MADE)
PURE.update((struct.pack, struct.unpack, struct.calcsize, binascii.b2a_base64, binascii.a2b_base64))
PURE.update((json.dumps, json.loads))


@rule(types.SimpleNamespace)
def _namespace(tx: Tracer, **members: Value) -> Value:
    made = UserObject(types.SimpleNamespace)
    made.attrs.update(members)
    return made


class LockValue(MutableValue):
    """A lock made in the frame: nobody else has it yet."""

    __slots__ = ("depth", "factory")
    changing = ("depth",)

    def __init__(self, factory: Any) -> None:
        super().__init__(None)
        self.factory = factory
        self.depth = 0

    def python_type(self) -> type:
        return type(self.factory())

    def hash_key(self) -> object:
        return self

    def reconstruct(self, out: Output) -> None:
        if self.depth:
            raise Break("unsupported-value", "a lock that is held")
        out.call(self.factory, ())


def _lock(factory: Any) -> None:
    @rule(factory)
    def make(tx: Tracer) -> Value:
        return LockValue(factory)


_lock(threading.Lock)
_lock(type(threading.RLock()))


@rule(typing.NewType)
def _new_type(tx: Tracer, name: Value, kind: Value) -> Value:
    made = typing.NewType(name.as_constant(), kind.as_constant())  # type: ignore[misc]
    assert tx.frame is not None
    made.__module__ = str(tx.frame.function.globals.get("__name__"))
    return tx.const_object(made)


@method(LockValue, "acquire", "__enter__")
def _acquire(tx: Tracer, self: LockValue, *args: Value, **kwargs: Value) -> Value:
    if self.depth and self.factory is threading.Lock:
        raise Break("unsupported-method", "acquiring a lock that is held")
    tx.journal.touch(self)
    self.depth += 1
    return TRUE


@method(LockValue, "release", "__exit__")
def _release(tx: Tracer, self: LockValue, *args: Value) -> Value:
    if not self.depth:
        tx.raise_(RuntimeError, "release unlocked lock")
    tx.journal.touch(self)
    self.depth -= 1
    return NONE


@method(LockValue, "locked")
def _locked(tx: Tracer, self: LockValue) -> Value:
    return constant(self.depth > 0)
