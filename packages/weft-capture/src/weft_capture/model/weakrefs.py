"""Weak references, from outside or made by the program.

Capture counts no references: an object made here is alive where the frames still lead to it, and
anywhere else nobody knows. One from outside may die where a variable lets go of it.
"""

from __future__ import annotations

import gc
import operator
import types
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from weft_guards.sources import CallSource, ConstSource, LocalSource, Source

from weft_capture.breaks import Break
from weft_capture.bytecode import decode, stack_name
from weft_capture.model.constant import NONE
from weft_capture.model.containers import Container
from weft_capture.model.protocol import Frame, Kwargs, Output, Tracer, Value, method


@dataclass(eq=False)
class WeakRefValue(Value):
    """A `weakref.ref`, or that part of an instance of a subclass.

    Args:
        ref: the real one, where it existed before the frame.
        target: what one made here refers to.
        callback: what is to run when that dies.
    """

    cls = weakref.ref

    tx: Tracer
    ref: Any = None
    source: Source | None = None
    target: Value = NONE
    callback: Value = NONE

    def __post_init__(self) -> None:
        self.created_at = self.tx.steps.now

    def tp_hash(self) -> object:
        if self.ref is not None:
            return self.ref
        asks = getattr(self.target, "has_special", None)
        if asks is not None and asks("__eq__"):  # it compares other references to the object
            raise Break("weak-reference", "a weak reference as a key, whose object has an __eq__")
        key = self.target.tp_hash()
        real = key is getattr(self.target, "obj", self)
        return weakref.ref(key) if real else (weakref.ref, key)

    def same_object(self, other: Value) -> bool:
        # The interpreter makes one reference without a callback for each object.
        if not isinstance(other, WeakRefValue) or not self.callback is other.callback is NONE:
            return self is other
        return self.target is other.target is not NONE or self.tp_hash() is other.tp_hash()

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        if self.ref is None:
            self.check(tx)
            return tx.force(self.target)
        target = self.ref()
        if target is not None and _is_released(tx, target):
            raise _may_be_dead()
        if self.source is None or isinstance(self.source, ConstSource):
            return tx.const_object(target)
        return tx.wrap(target, CallSource(operator.call, (self.source,)))

    def check(self, tx: Tracer, out: object = None) -> None:
        """Break, where the reference was made, if the object may have died."""
        real = tx.real_id(self.target)
        if real in tx.released_ids if real else not tx.leads_to(self.target):
            raise _may_be_dead(self.created_at)

    def reconstruct(self, out: Output) -> None:
        self.check(self.tx)
        out.call(weakref.ref, [self.target, self.callback])


def _is_released(tx: Tracer, obj: object) -> bool:
    """Say whether what a variable let go of, or a container that changed here, is or held it."""
    changed = {id(value) for value in tx.effects.changed if isinstance(value, Container)}
    lost = [k for k in tx.keep_alive if id(k) in tx.released_ids or _id_of(tx, k) in changed]
    referents = gc.get_referents(*lost)
    every = (*referents, *gc.get_referents(*referents))
    return id(obj) in tx.released_ids or any(referenced is obj for referenced in every)


def _id_of(tx: Tracer, obj: object) -> int:
    value, _ = tx.values_by_id.get(id(obj), (None, None))
    return id(getattr(value, "forced", value))


def _may_be_dead(step: int = -1) -> Break:
    detail = "a weak reference whose object may have died here"
    return Break("weak-reference", detail, step)


def make_ref(tx: Tracer, target: Value, callback: Value = NONE) -> WeakRefValue:
    """Do what `weakref.ref` does.

    Raises:
        Break: with a callback of the program's own: capture does not see objects die.
    """
    target = tx.force(target)
    cls = target.python_type()
    if not cls.__weakrefoffset__:
        tx.raise_(TypeError, f"cannot create weak reference to '{cls.__name__}' object")
    if callback is NONE:
        return WeakRefValue(tx, target=target)
    if getattr(getattr(callback, "code", None), "co_qualname", "") not in _LIBRARYS:
        raise Break("weak-reference", "a weak reference with a callback")
    reference = WeakRefValue(tx, target=target, callback=callback)
    tx.watch(reference)
    return reference


_LIBRARYS = (
    "WeakValueDictionary.__init__.<locals>.remove",
    "WeakKeyDictionary.__init__.<locals>.remove",
    "WeakSet.__init__.<locals>._remove",
)
"""Callbacks that take an object that died out of a container of the library, and nothing else."""


method(WeakRefValue, "__call__")(lambda tx, self: self.tp_call(tx, [], {}))


# ---- finalizers: objects with a `__del__`, and generators suspended in a `try` statement


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
