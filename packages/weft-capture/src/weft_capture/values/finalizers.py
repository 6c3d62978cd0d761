"""What runs code of the program when it dies: objects with a `__del__`, generators in a `try`."""

from __future__ import annotations

import gc
import types
from collections import deque
from typing import Any

from weft_capture.bytecode import decode
from weft_capture.values.base import Value
from weft_capture.values.containers import Container


def may_finalize(value: Value) -> bool:
    """Say whether an object with a `__del__` from outside may die with a value."""
    pending, seen = [value], set()
    while pending:
        one = pending.pop()
        obj = getattr(one, "obj", None)
        if isinstance(getattr(type(obj), "__del__", None), types.FunctionType) or _unwinds(obj):
            return True
        if one not in seen and isinstance(one, Container):
            seen.add(one)
            one.build(pending.append)
    return False


def drops(obj: Any, depth: int = 4) -> bool:
    """Say the same of a real object, or of a container somewhere in which there may be one."""
    plain = obj if isinstance(obj, list | tuple | deque) else ()
    inside = obj.values() if isinstance(obj, dict) else plain
    mine = isinstance(getattr(type(obj), "__del__", None), types.FunctionType) or _unwinds(obj)
    return mine or depth == 0 or any(drops(one, depth - 1) for one in inside)


def _unwinds(obj: object, depth: int = 5) -> bool:
    """Say whether this is, or iterates over, a generator whose handlers run when it is dropped."""
    kind = type(obj)
    if isinstance(obj, types.GeneratorType | types.AsyncGeneratorType):
        code = decode(obj.gi_code if isinstance(obj, types.GeneratorType) else obj.ag_code)
        if any(one.opname == "YIELD_VALUE" and code.unwinds(one) for one in code.instrs):
            return True
    elif kind is not tuple and not (hasattr(kind, "__next__") and not kind.__flags__ & 1 << 9):
        return False
    return depth > 0 and any(_unwinds(one, depth - 1) for one in gc.get_referents(obj))
