"""Finalizers: objects with a `__del__`, and generators suspended in a `try` statement."""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from typing import Any

from weft_guards.sources import CallSource, ConstSource, LocalSource

from weft_capture.breaks import Break
from weft_capture.bytecode import decode, stack_name
from weft_capture.model.containers import Container
from weft_capture.model.protocol import Frame, Value


def release(frame: Frame, old: Value | None) -> None:
    """Break where an input object with a `__del__` or weak references may die here."""
    if old is None or any(old is value for value in frame.stack):
        return
    if has_finalizer(old):
        raise Break("finalizer", "a variable releases an object with a __del__")
    if old.source is None or isinstance(old.source, ConstSource):
        return
    obj = getattr(old, "obj", None)
    frame.tx.released_ids.add(id(obj))
    if isinstance(old.source, LocalSource | CallSource):  # no object leads to it, that we know of
        if any(map(_is_programs, weakref.getweakrefs(obj))):
            raise Break("weak-reference", "a variable releases an object that has weak references")
        frame.tx.released_ids.add(frame.tx.real_id(old))


def pop_dying(frame: Frame, value: Value) -> None:
    """Record that the operand stack releases a value, perhaps its last reference."""
    if isinstance(value.source, LocalSource) and value.source.name.startswith(_FROM_STACK):
        if all(value is not local for local in frame.locals.values()):
            release(frame, value)


_FROM_STACK = stack_name(0).removesuffix("0")


def _is_programs(reference: weakref.ref[Any]) -> bool:
    module = getattr(reference.__callback__, "__module__", None) or "torch"
    return not module.startswith(("torch", "weft_"))


def has_finalizer(value: Value) -> bool:
    """Say whether an input object with a `__del__` may die with a value."""
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        obj = getattr(current, "obj", None)
        if isinstance(getattr(type(obj), "__del__", None), types.FunctionType) or _unwinds(obj):
            return True
        if current not in seen and isinstance(current, Container):
            seen.add(current)
            current.build(pending.append)
    return False


def holds_finalizer(obj: Any, depth: int = 4) -> bool:
    """Say the same of a real object, or of a container that may hold one."""
    plain = obj if isinstance(obj, list | tuple | deque) else ()
    inside = obj.values() if isinstance(obj, dict) else plain
    direct = isinstance(getattr(type(obj), "__del__", None), types.FunctionType) or _unwinds(obj)
    return direct or depth == 0 or any(holds_finalizer(item, depth - 1) for item in inside)


def _unwinds(obj: object, depth: int = 5) -> bool:
    """Say whether this is, or iterates over, a generator whose handlers run when it is dropped."""
    cls = type(obj)
    if isinstance(obj, types.GeneratorType | types.AsyncGeneratorType):
        code = decode(obj.gi_code if isinstance(obj, types.GeneratorType) else obj.ag_code)
        if any(instr.opname == "YIELD_VALUE" and code.unwinds(instr) for instr in code.instrs):
            return True
    elif cls is not tuple and not (hasattr(cls, "__next__") and not cls.__flags__ & 1 << 9):
        return False
    return depth > 0 and any(_unwinds(referent, depth - 1) for referent in gc.get_referents(obj))
