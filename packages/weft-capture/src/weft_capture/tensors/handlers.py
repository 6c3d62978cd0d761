"""What the handlers of a wrapper class read, guarded; handlers that do more than compute, refused.

Handlers (`__torch_dispatch__` and what it calls) run while capturing and are not executed
symbolically. So their code is looked through: the globals, closures and class attributes that
it names must be constants, functions, classes, modules or tables, which later calls must find
again, and it must not change or show anything that outlives it.
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


def guard_class(tx: Tracer, kind: type) -> None:
    """Guard what a class's handlers depend on.

    Raises:
        Break: for handlers that do more than compute, or depend on what cannot be guarded.
    """
    seen: set[Any] = set()
    for name in _ENTRIES:
        found = attributes.lookup(kind, name)
        if found is not None and not issubclass(torch.Tensor, found[0]):
            _look_through(tx, kind, _function(found[1]), seen, name in _MAKING)


def _function(attribute: Any) -> Any:
    return getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)


def _look_through(tx: Tracer, kind: type, function: Any, seen: set[Any], makes: bool) -> None:
    known = not isinstance(function, types.FunctionType) or function in seen
    if known or attributes.is_immutable_module(function.__module__):
        return
    seen.add(function)
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        done = {one.opname for one in steps}
        stores = "STORE_ATTR" in done and not makes
        outer = function.__code__.co_freevars
        stores |= any(one.opname == "STORE_DEREF" and one.argval in outer for one in steps)
        if done & _WRITES or stores or _SHOWS.intersection(code.co_names):
            raise Break("torch-function", f"a handler of {kind.__name__} that has effects")
        changes = bool(done & _SETS) or _changes_others(steps)
        for value, read, *where in _named(kind, function, code):
            source = CallSource(read, tuple(map(ConstSource, where)))
            _depend(tx, kind, value, source, seen, changes)


def _changes_others(steps: list[dis.Instruction]) -> bool:
    """Say whether code calls a method that changes a container which is no local variable."""
    return any(
        now.argval in _CHANGES and now.opname in _READS and "LOAD_FAST" not in before.opname
        for before, now in itertools.pairwise(steps)
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _named(kind: type, function: types.FunctionType, code: types.CodeType) -> Iterator[Any]:
    """Yield what code names: the object, a function that reads it, and what that takes."""
    for name in code.co_names:
        if name in function.__globals__:
            yield function.__globals__[name], operator.getitem, function.__globals__, name
        found = attributes.lookup(kind, name)
        if found is not None and not issubclass(torch.Tensor, found[0]):
            yield _function(found[1]), _of_class, kind, name
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in code.co_freevars:
        if name in cells and name != "__class__":
            yield cells[name].cell_contents, getattr, cells[name], "cell_contents"


def _of_class(kind: type, name: str) -> Any:
    found = find_in_class(kind, name)
    return found and _function(found[1])


def _depend(
    tx: Tracer, kind: type, value: Any, source: CallSource, seen: set[Any], changes: bool
) -> None:
    """Guard something that a handler names, or refuse it."""
    if is_constant_object(value):
        tx.guard_constant(source, value)
    elif isinstance(value, types.FunctionType):
        _look_through(tx, kind, value, seen, False)
        tx.guard_identity(source, value)
    elif type(value) in _CONTAINERS and not changes:
        kept = _kept(tx, kind, value, seen)
        tx.guard(CallSource(_is_still, (source, ConstSource(kept))), "CONST", True)
    else:
        _refuse_unknown(kind, value)


def _kept(tx: Tracer, kind: type, value: Any, seen: set[Any]) -> Any:
    """Return a copy of a container that a handler reads, of whose objects each may be named."""
    if type(value) is dict:
        return {key: _kept(tx, kind, entry, seen) for key, entry in value.items()}
    if type(value) in _CONTAINERS:
        return type(value)(_kept(tx, kind, entry, seen) for entry in value)
    if isinstance(value, types.FunctionType):
        _look_through(tx, kind, value, seen, False)
    elif not is_constant_object(value):
        _refuse_unknown(kind, value)
    return value


def _is_still(value: Any, before: Any) -> bool:
    """Say whether what a handler reads holds what it held."""
    if type(value) is not type(before):
        return False
    if type(value) is dict:
        same = len(value) == len(before) and all(map(value.__contains__, before))
        return same and all(_is_still(value[key], before[key]) for key in before)
    if type(value) in _CONTAINERS:
        return len(value) == len(before) and all(map(_is_still, value, before))
    return value is before or (is_constant_object(value) and value == before)


def _refuse_unknown(kind: type, value: Any) -> None:
    known = type(value).__module__.startswith("torch") or isinstance(value, _NAMED)
    if isinstance(value, torch.Tensor | torch.nn.Module) or not known:
        what = type(value).__name__
        raise Break("torch-function", f"a {what} that a handler of {kind.__name__} uses")
