"""Guards as bytes: an object known by identity is written as the path it is imported from.

A `GuardPickler` pickles guards, sources and what else belongs to compiled code: modules, classes
and functions as import paths, code objects by a digest (`bind` looks for them at the guard's own
source), metadata and literals as they are. Anything else raises `NotSerializable`: another process
could not find it. What is another by then raises `Stale`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import marshal
import pickle
import pkgutil
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from traceback import FrameSummary
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from weft_guards.check import arg_names_of, compile_check, read_sources
from weft_guards.guards import Guard
from weft_guards.payloads import ClassUse, NamespaceUse, WeakIdentity, find_in_class, name_of
from weft_guards.sources import is_literal


class NotSerializable(Exception):
    """Another process could not find this again: a code, and what it is."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"[{code}] not found again in another process: {detail}")


class Stale(Exception):
    """What was saved does not fit this process, or this call."""


def digest(code: types.CodeType) -> str:
    """Return a digest of a code object; marshal's version 2 writes equal ones alike."""
    return hashlib.sha256(marshal.dumps(_plain(code), 2)).hexdigest()


def _plain(code: types.CodeType) -> types.CodeType:
    """Return equal code as `replace` makes it: without what 3.14 marks arguments with."""
    consts = (_plain(one) if isinstance(one, types.CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=tuple(consts))


_PARTS = ("", ".__wrapped__", ".fget", ".fset", ".fdel", ".__func__", ".func")  # in decorators
_IMPORTED = ("torch", "weft_core", "weft_guards", "weft_capture")


def import_path_of(obj: Any) -> tuple[str, str] | None:
    """Return module and path where an object is found, also inside of what decorators made."""
    if isinstance(obj, types.ModuleType):
        return obj.__name__, ""
    if isinstance(obj, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return "torch", f"ops.{obj}"
    module = str(getattr(getattr(obj, "__objclass__", obj), "__module__", None))
    for name in (getattr(obj, "__qualname__", ""), getattr(obj, "__name__", "")):
        for part in _PARTS:
            with suppress(Stale):
                if find(module, f"{name}{part}") is obj:
                    return module, f"{name}{part}"
    return None


def find(module: str, path: str) -> Any:
    """Return the object at a place; only what comes with torch, weft or Python is imported for it.

    Raises:
        Stale: when there is none.
    """
    root = module.partition(".")[0]
    if module not in sys.modules and root not in (*sys.stdlib_module_names, *_IMPORTED):
        raise Stale(f"{module} is not imported")
    try:
        return pkgutil.resolve_name(f"{module}:{path}")
    except (ImportError, AttributeError, ValueError) as error:
        raise Stale(f"{module}.{path}: {error}") from None


def bind(
    saved: Sequence[Guard], func: types.FunctionType, flat_locals: Sequence[Any]
) -> list[Guard]:
    """Return guards for this process, which hold for this call.

    Raises:
        Stale: when one does not, or something that they name is another.
    """
    marks = [r for r in saved if r.kind in _BY_NAMES or (r.kind == "ID" and type(r.payload) is str)]
    try:
        objects = read_sources([row.source for row in marks], func, flat_locals)
        bound = {id(row): _bound(row, obj) for row, obj in zip(marks, objects, strict=True)}
        guards = [bound.get(id(row), row) for row in saved]
        names = arg_names_of(func.__code__)
        holds = compile_check(guards, names, func.__code__.co_freevars)(func, *flat_locals)
    except Exception as error:
        raise Stale(f"a source gives nothing like it: {error}") from error
    if not holds:
        raise Stale("the guards do not hold")
    return guards


def _bound(row: Guard, obj: Any) -> Guard:
    """Return a guard for the object that its source gives, which has to be like the one seen."""
    if row.kind == "ID":
        if digest(obj) != row.payload:
            raise Stale(f"{row.source} is another")
        return dataclasses.replace(row, payload=WeakIdentity(obj))
    if row.kind == "NAMESPACE":
        found = {name: vars(obj).get(name) for name, _ in row.payload}
        if any(_kind_and_place(found[name]) != was for name, was in row.payload):
            raise Stale(f"{row.source} is another")
        return dataclasses.replace(row, payload=NamespaceUse.of(found))
    names = {name: find_in_class(obj, name) for name, _ in row.payload}
    plain = {name for name, was in row.payload if was == "plain"}
    if any(_member(names[name]) != was for name, was in row.payload if name not in plain):
        raise Stale(f"{row.source} is another")
    return dataclasses.replace(row, payload=ClassUse.of(obj, names, plain))


def _member(found: tuple[type, Any] | None) -> tuple[str, ...]:
    """Name what was found in a class; the code of what is inlined has a guard of its own."""
    return () if found is None else (*(import_path_of(found[0]) or ()), type(found[1]).__qualname__)


def _kind_and_place(obj: object) -> tuple[str, ...]:
    """Name what a library has under a name; what the program put there has no such place."""
    place = (repr(obj),) if is_literal(obj) else import_path_of(obj) or ()
    return (type(obj).__qualname__, *place)


_BY_NAMES = ("CLASS", "NAMESPACE")
_NAMED = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
    types.ModuleType, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_BY_VALUE = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, slice,
    complex, types.EllipsisType, immutable_list, immutable_dict,
)  # fmt: skip


class GuardPickler(pickle.Pickler):
    """Writes guards, and what belongs to them; `dump` raises NotSerializable.

    `known` maps the id of an object to the name under which a `GuardUnpickler` is asked for it.
    """

    def __init__(self, file: Any, known: Mapping[int, tuple[Any, ...]]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.known = known

    def persistent_id(self, obj: Any) -> Any:
        """Name what has an identity of its own though pickle would copy it."""
        found = self.known.get(id(obj))
        if found is not None or type(obj) not in (list, dict, set, bytearray):
            return found
        if obj is sys.modules:
            return ("place", "sys", "modules")
        if type(obj) is list and len(obj) == 1 and type(obj[0]) is str:
            return None  # how a code object holds a text of its own
        module = sys.modules.get(obj.get("__name__", "")) if type(obj) is dict else None
        if module is None or vars(module) is not obj:
            raise NotSerializable("unnamed-object", name_of(obj))
        return ("place", module.__name__, "__dict__")

    def reducer_override(self, obj: Any) -> Any:
        """Say how an object is made again, for each type that may be written."""
        kind = type(obj)  # an object may say that it is of another class
        if kind is Guard:
            return Guard, (obj.source, obj.kind, _payload(obj), obj.user_stack[-1:])
        if kind is WeakIdentity and (obj.immortal or obj.get() is not None):
            return WeakIdentity, (obj.get(),)
        if kind is FrameSummary:
            return FrameSummary, (obj.filename, obj.lineno, obj.name)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith("weft_"):
            return kind, tuple(getattr(obj, f.name) for f in dataclasses.fields(obj))
        if issubclass(kind, enum.Enum):
            return getattr, (kind, obj.name)
        if issubclass(kind, _BY_VALUE) or obj is find:
            return NotImplemented
        place = import_path_of(obj) if issubclass(kind, _NAMED) else None
        if place is None:
            raise NotSerializable("unnamed-object", name_of(obj))
        return find, place


def _payload(guard: Guard) -> Any:
    """Return what stands for a guard's payload; `bind` reads it."""
    if guard.kind == "CLASS":
        cls: Any = guard.source
        kept: Any = cls.identity.get()
        return tuple(
            (name, wanted if wanted == "plain" else _member(find_in_class(kept, name)))
            for name, wanted in guard.payload.names
        )
    if guard.kind == "NAMESPACE":
        return tuple((name, _kind_and_place(of())) for name, of in guard.payload.names)
    seen = guard.payload.get() if guard.kind == "ID" else None
    return digest(seen) if isinstance(seen, types.CodeType) else guard.payload


class GuardUnpickler(pickle.Unpickler):
    """Reads what a `GuardPickler` wrote; `known` has what only the caller can tell."""

    known: Mapping[Any, Any] = {}

    def persistent_load(self, name: Any) -> Any:
        """Return the object that a name stands for."""
        return find(*name[1:]) if name[0] == "place" else self.known[name]
