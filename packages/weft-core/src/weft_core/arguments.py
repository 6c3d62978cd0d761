"""Checks of what users pass against declared types: annotations of settings and functions.

`@checked` on a public function makes its signature the table of its checks. `AtLeast` in an
`Annotated` type adds a limit: `Annotated[int, AtLeast(1)]`.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from weft_core.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class AtLeast:
    """The least value of a number."""

    least: float

    def __str__(self) -> str:
        return f"of at least {self.least:g}"


def hints_of(annotated: Any) -> dict[str, Any]:
    """Return the declared types of a class or function, limits included."""
    return typing.get_type_hints(annotated, include_extras=True)


def fits(value: object, hint: Any) -> bool:
    """Say whether a value is of a declared type; types that no rule is for are not checked."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [limit.least for limit in arms[1:] if isinstance(limit, AtLeast)]
        return fits(value, arms[0]) and all(value >= least for least in limits)  # type: ignore[operator]
    if origin is Literal:
        return any(type(value) is type(arm) and value == arm for arm in arms)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arm) for arm in arms)
    if hint is Any:
        return True
    if isinstance(hint, TypeVar):
        return hint.__bound__ is None or fits(value, hint.__bound__)
    if hint is None:
        return value is None
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if origin in (Callable, type):
        return callable(value) if origin is Callable else isinstance(value, type)
    if isinstance(origin, type):
        return isinstance(value, origin) and _items_fit(value, arms)
    return not isinstance(hint, type) or isinstance(value, hint)


def _items_fit(value: object, arms: tuple[Any, ...]) -> bool:
    """Say whether keys, or items, of a collection are of a type; what runs out is not asked."""
    if not arms or not isinstance(value, Collection):
        return True
    if isinstance(value, Mapping):
        return all(fits(key, arms[0]) for key in value)
    return not isinstance(value, str | bytes) and all(fits(item, arms[0]) for item in value)


def type_name(hint: Any) -> str:
    """Print a declared type for a message."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join(map(str, (type_name(arms[0]), *arms[1:])))
    if origin is Literal:
        return " or ".join(map(repr, arms))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_name, arms))
    if hint is type(None) or hint is None:
        return "None"
    if origin is Callable or isinstance(hint, TypeVar):
        return "a function"
    if hint is int or hint is float:
        return "an int" if hint is int else "a number"
    if isinstance(origin, type):
        inner = ", ".join(arm.__name__ for arm in arms[:1] if isinstance(arm, type))
        return f"{origin.__name__} of {inner}" if inner else origin.__name__
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def check(hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Compare arguments with their declared types.

    Raises:
        InvalidArgument: for the first that does not fit.
    """
    for name, value in given.items():
        if name in hints and not fits(value, hints[name]):
            detail = f"{name} takes {type_name(hints[name])}, not {_shown(value)}."
            raise InvalidArgument(name, detail=detail)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name; of a callable object, that of its class."""
    return str(getattr(function, "__name__", type(function).__name__))


def checked(function: F) -> F:
    """Check a function's arguments against its annotations at each call."""
    signature = inspect.signature(function)
    hints = functools.cache(lambda: hints_of(function))
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    many = {name for name, one in signature.parameters.items() if one.kind in kinds}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says it better
        for name, items in {n: given.pop(n) for n in tuple(given) if n in many}.items():
            rows = items.items() if isinstance(items, dict) else ((name, item) for item in items)
            for key, item in rows:
                check({key: hints()[name]}, {key: item})
        check(hints(), given)
        return function(*args, **kwargs)

    return typing.cast(F, call)
