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
import types
import typing
from typing import TYPE_CHECKING, Any

from weft_capture.rules.table import PURE, rule
from weft_capture.values.base import Value
from weft_capture.values.constant import CONSTANT_TYPES, NONE
from weft_capture.values.objects import UserObject
from weft_capture.values.replayed import FACTORIES, Log, ReplayedValue

if TYPE_CHECKING:
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


def _replayed(factory: Any) -> None:
    @rule(factory)
    def make(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
        first = args[0] if args else NONE
        log = first.log if isinstance(first, ReplayedValue) else Log()
        return log.run(tx, factory, list(args), kwargs)


for _factory in FACTORIES:
    _replayed(_factory)


@rule(types.SimpleNamespace)
def _namespace(tx: Tracer, **members: Value) -> Value:
    made = UserObject(types.SimpleNamespace)
    made.attrs.update(members)
    return made


@rule(typing.NewType)
def _new_type(tx: Tracer, name: Value, kind: Value) -> Value:
    made = typing.NewType(name.as_constant(), kind.as_constant())  # type: ignore[misc]
    assert tx.frame is not None
    made.__module__ = str(tx.frame.function.globals.get("__name__"))
    return tx.const_object(made)
