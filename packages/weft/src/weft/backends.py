"""Which compiler a captured graph goes to.

A backend is a callable `(gm: fx.GraphModule, example_inputs: list) -> callable`, the protocol of
torch.compile. Built-in ones are loaded on first use; others come from `register_backend` or from
distributions that name one under the entry-point group `torch_dynamo_backends`, or from torch's own
registry where the program has loaded it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast, overload

from weft_core.arguments import checked, name_of
from weft_core.errors import InvalidBackend

Compiled = Callable[..., Any]
Backend = Callable[..., Compiled]

_GROUP = "torch_dynamo_backends"

# name -> where the built-in backend is; a table of texts, so that naming one imports nothing.
_BUILT_IN = {
    "codegen": "weft.pipeline:codegen",
    "inductor": "weft.pipeline:codegen",
    "aot_eager": "weft.pipeline:aot_eager",
    "eager": "weft.pipeline:eager",
    "cudagraphs": "weft.pipeline:cudagraphs",
}
# Ours is registered for stock torch.compile too; here it has its own names above.
_NOT_FOR_US = {"weft"}

_registered: dict[str, Backend] = {}
_default: str | Backend = "codegen"


@overload
def register_backend(compiler_fn: Backend, name: str | None = None) -> Backend: ...
@overload
def register_backend(
    compiler_fn: None = None, name: str | None = None
) -> Callable[[Backend], Backend]: ...


@checked
def register_backend(compiler_fn: Backend | None = None, name: str | None = None) -> Any:
    """Make a backend known by name; usable as a decorator, with or without arguments.

    Args:
        compiler_fn: `(gm, example_inputs) -> callable`.
        name: defaults to the function's own name.
    """
    if compiler_fn is None:
        return lambda fn: register_backend(fn, name)
    _registered[name or name_of(compiler_fn)] = compiler_fn
    return compiler_fn


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """Return the backends that other distributions offer, without loading them."""
    found = {point.name: point for point in entry_points(group=_GROUP)}
    return {name: point for name, point in found.items() if name not in _NOT_FOR_US}


def _torch_registered() -> dict[str, Callable[[], Backend]]:
    """Return the backends that a program registered with torch.compile, by name."""
    registry = importlib.import_module("weft_core.torch_compiler_shim").backend_registry()
    names = registry.list_backends(()) if hasattr(registry, "lookup_backend") else ()
    return {n: partial(registry.lookup_backend, n) for n in names if n not in _NOT_FOR_US}


@checked
def set_default_backend(backend: str | Backend | None) -> None:
    """Set what `weft.compile` uses without `backend=`; None puts back `codegen`.

    Raises:
        InvalidBackend: for an unknown backend.
    """
    global _default
    chosen = "codegen" if backend is None else backend
    lookup_backend(chosen)
    _default = chosen


def get_default_backend() -> str | Backend:
    """Return what `weft.compile` uses without `backend=`."""
    return _default


def is_own(backend: str | Backend) -> bool:
    """Say whether a backend is one of weft's, which take weft's options."""
    if isinstance(backend, str):
        return backend in _BUILT_IN and backend not in _registered
    return getattr(backend, "__module__", None) == _BUILT_IN["codegen"].partition(":")[0]


@checked
def list_backends(exclude_tags: Sequence[str] = ()) -> list[str]:
    """Return the names that `backend=` takes, sorted.

    Args:
        exclude_tags: accepted as torch.compiler.list_backends does; weft's backends have no tags.
    """
    return sorted({*_BUILT_IN, *_registered, *_entry_points(), *_torch_registered()})


def lookup_backend(backend: str | Backend) -> Backend:
    """Return the backend of that name; a callable is returned as it is.

    Raises:
        InvalidBackend: for an unknown name, or a thing that is neither a name nor a callable.
    """
    if not isinstance(backend, str):
        if not callable(backend):
            detail = f"backend takes a name or a callable, not {backend!r}."
            raise InvalidBackend(repr(backend), list_backends(), detail)
        return backend
    if backend in _registered:
        return _registered[backend]
    if backend in _BUILT_IN:
        module, attribute = _BUILT_IN[backend].split(":")
        return cast(Backend, getattr(importlib.import_module(module), attribute))
    if backend in _entry_points():
        return cast(Backend, _entry_points()[backend].load())
    if backend in (registered := _torch_registered()):
        return registered[backend]()
    raise InvalidBackend(backend, list_backends())
