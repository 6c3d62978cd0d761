"""Small immutable things of the standard library: computed while capturing when all is known.

`CONSTANT_TYPES` gets the types whose objects never change; `PURE` gets functions whose result
depends on nothing but their arguments.
"""

from __future__ import annotations

import ast
import datetime
import decimal
import importlib
import inspect
import json
import pathlib
import pprint
import re
import struct
import types
import typing
from typing import Any

from weft_guards.sources import CallSource, Source

from weft_capture.rules.table import CALLING, PURE, rule
from weft_capture.values.base import Tracer, Value
from weft_capture.values.constant import CONSTANT_TYPES, NONE, Constant
from weft_capture.values.objects import UserObject
from weft_capture.values.replayed import FACTORIES, Log, ReplayedValue
from weft_capture.values.wrap import EXACT

_MADE = (
    datetime.date,
    datetime.time,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    struct.Struct,
)
CONSTANT_TYPES.update((*_MADE, re.Pattern, re.Match))
PURE.update((*_MADE, decimal.Decimal, ast.literal_eval))
for _kind in (datetime.date, datetime.datetime):
    PURE.update((_kind.fromisoformat, _kind.fromordinal, datetime.datetime.strptime))
for _name in ("binascii", "_string", "_json"):
    PURE.update(filter(inspect.isbuiltin, vars(importlib.import_module(_name)).values()))
PURE.update((struct.pack, struct.unpack, struct.unpack_from, struct.iter_unpack, struct.calcsize))
CALLING.update((json.dumps, json.loads, re.sub, pprint.pformat, typing.get_origin))
PURE.update(CALLING)


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


def _wrap_decimal(tx: Tracer, obj: decimal.Decimal, source: Source) -> Value:
    """A constant; what is computed with it depends on the context, and leaves its marks there."""
    tx.guard(source, "TYPE", decimal.Decimal)
    tx.guard(CallSource(repr, (source,)), "CONST", repr(obj))
    tx.guard_same(_same_context, CallSource(decimal.getcontext, ()), decimal.getcontext().copy())
    return Constant(obj)


def _same_context(now: decimal.Context, then: decimal.Context) -> bool:
    merged = then.copy()
    for flag, is_set in now.flags.items():  # marks only add up
        merged.flags[flag] = merged.flags[flag] or is_set
    return repr(merged) == repr(now)


EXACT[decimal.Decimal] = _wrap_decimal
