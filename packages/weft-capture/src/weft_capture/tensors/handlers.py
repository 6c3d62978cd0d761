"""Guards on what the handlers of a wrapper subclass read; handlers with side effects break.

Handlers (`__torch_dispatch__` and the functions that it calls) run while capturing and are not
executed symbolically. So their code is inspected: the globals, closures and class attributes that
it names must be constants, functions, classes, modules or tables, which become guards, and it must
not change or print anything that outlives the call.
"""

from __future__ import annotations

import dis
import enum
import itertools
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from weft_guards.payloads import find_in_class
from weft_guards.sources import CallSource, ConstSource

from weft_capture.breaks import Break
from weft_capture.model import attributes
from weft_capture.model.constant import is_constant_object
from weft_capture.model.protocol import Tracer

_MAKING = ("__new__", "__init__", "__setattr__", "__tensor_unflatten__")
_ENTRIES = (*_MAKING, "__tensor_flatten__", "__torch_dispatch__", "__torch_function__")
_WRITES = frozenset("STORE_GLOBAL DELETE_GLOBAL DELETE_ATTR IMPORT_NAME".split())  # noqa: SIM905
_SETS = frozenset(["STORE_SUBSCR", "DELETE_SUBSCR"])
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_CHANGES = frozenset(
    "append extend insert pop popitem remove reverse sort clear update setdefault".split()  # noqa: SIM905
)
_CONTAINERS = (dict, list, tuple)
_SHOWS = frozenset(["print", "open", "input", "exec", "eval", "globals", "setattr", "breakpoint"])
_NAMED = (
    type, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.GetSetDescriptorType, enum.Enum,
)  # fmt: skip


def guard_class(tx: Tracer, cls: type) -> None:
    """Guard what a class's handlers depend on.

    Raises:
        Break: for handlers that have side effects, or depend on objects that have no guard.
    """
    seen: set[Any] = set()
    for name in _ENTRIES:
        mro_entry = attributes.lookup(cls, name)
        if mro_entry is not None and not issubclass(torch.Tensor, mro_entry[0]):
            _look_through(tx, cls, _function(mro_entry[1]), seen, name in _MAKING)


def _function(attribute: Any) -> Any:
    return getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)


def _look_through(tx: Tracer, cls: type, function: Any, seen: set[Any], makes: bool) -> None:
    skipped = not isinstance(function, types.FunctionType) or function in seen
    if skipped or attributes.is_immutable_module(function.__module__):
        return
    seen.add(function)
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        done = {instr.opname for instr in steps}
        stores = "STORE_ATTR" in done and not makes
        outer = function.__code__.co_freevars
        stores |= any(instr.opname == "STORE_DEREF" and instr.argval in outer for instr in steps)
        if done & _WRITES or stores or _SHOWS.intersection(code.co_names):
            raise Break("torch-function", f"a handler of {cls.__name__} with side effects")
        changes = bool(done & _SETS) or _changes_others(steps)
        for value, read, *where in _named(cls, function, code):
            source = CallSource(read, tuple(map(ConstSource, where)))
            _depend(tx, cls, value, source, seen, changes)


def _changes_others(steps: list[dis.Instruction]) -> bool:
    """Say whether code calls a mutating method of a container that is not a local variable."""
    return any(
        now.argval in _CHANGES and now.opname in _READS and "LOAD_FAST" not in before.opname
        for before, now in itertools.pairwise(steps)
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _named(cls: type, function: types.FunctionType, code: types.CodeType) -> Iterator[Any]:
    """Yield each object that code names, a function that reads it, and its arguments."""
    for name in code.co_names:
        if name in function.__globals__:
            yield function.__globals__[name], operator.getitem, function.__globals__, name
        mro_entry = attributes.lookup(cls, name)
        if mro_entry is not None and not issubclass(torch.Tensor, mro_entry[0]):
            yield _function(mro_entry[1]), _of_class, cls, name
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in code.co_freevars:
        if name in cells and name != "__class__":
            yield cells[name].cell_contents, getattr, cells[name], "cell_contents"


def _of_class(cls: type, name: str) -> Any:
    mro_entry = find_in_class(cls, name)
    return mro_entry and _function(mro_entry[1])


def _depend(
    tx: Tracer, cls: type, value: Any, source: CallSource, seen: set[Any], changes: bool
) -> None:
    """Guard an object that a handler names, or break."""
    if is_constant_object(value):
        tx.guard_constant(source, value)
    elif isinstance(value, types.FunctionType):
        _look_through(tx, cls, value, seen, False)
        tx.guard_identity(source, value)
    elif type(value) in _CONTAINERS and not changes:
        kept = _kept(tx, cls, value, seen)
        tx.guard(CallSource(_is_still, (source, ConstSource(kept))), "CONST", True)
    else:
        _refuse_unknown(cls, value)


def _kept(tx: Tracer, cls: type, value: Any, seen: set[Any]) -> Any:
    """Return a copy of a container that a handler reads, after checking each object in it."""
    if type(value) is dict:
        return {key: _kept(tx, cls, entry, seen) for key, entry in value.items()}
    if type(value) in _CONTAINERS:
        return type(value)(_kept(tx, cls, entry, seen) for entry in value)
    if isinstance(value, types.FunctionType):
        _look_through(tx, cls, value, seen, False)
    elif not is_constant_object(value):
        _refuse_unknown(cls, value)
    return value


def _is_still(value: Any, before: Any) -> bool:
    """Say whether an object that a handler reads is unchanged."""
    if type(value) is not type(before):
        return False
    if type(value) is dict:
        same = len(value) == len(before) and all(map(value.__contains__, before))
        return same and all(_is_still(value[key], before[key]) for key in before)
    if type(value) in _CONTAINERS:
        return len(value) == len(before) and all(map(_is_still, value, before))
    return value is before or (is_constant_object(value) and value == before)


def _refuse_unknown(cls: type, value: Any) -> None:
    allowed = type(value).__module__.startswith("torch") or isinstance(value, _NAMED)
    if isinstance(value, torch.Tensor | torch.nn.Module) or not allowed:
        type_name = type(value).__name__
        raise Break("torch-function", f"a {type_name} that a handler of {cls.__name__} uses")
