"""The rule table: (callable, argument kinds) -> handler. How to add rows: `rules/__init__`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from weft_capture.breaks import Break
from weft_capture.values.base import Kwargs, Value
from weft_capture.values.constant import fold

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer

RuleHandler = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One rule: holds for arguments of `kinds`, and any further ones when `open_ended`."""

    kinds: tuple[type[Value], ...]
    open_ended: bool
    keywords: bool
    handler: RuleHandler

    def fits(self, args: list[Value], kwargs: Kwargs) -> bool:
        """Say whether the row holds for these arguments."""
        if kwargs and not self.keywords:
            return False
        if len(args) < len(self.kinds) or (len(args) > len(self.kinds) and not self.open_ended):
            return False
        return all(isinstance(arg, kind) for arg, kind in zip(args, self.kinds, strict=False))


_rows: defaultdict[Any, list[Row]] = defaultdict(list)
_foldable: set[Any] = set()
_graph: set[Any] = set()
_inlined: dict[Any, Callable[..., Any]] = {}


def rule(
    function: Any, *kinds: type[Value] | EllipsisType, keywords: bool = False
) -> Callable[[RuleHandler], RuleHandler]:
    """Add a row for one callable; see the package docstring."""
    open_ended = bool(kinds) and kinds[-1] is ...
    fixed = tuple(kind for kind in kinds if not isinstance(kind, EllipsisType))

    def add(handler: RuleHandler) -> RuleHandler:
        _rows[function].insert(0, Row(fixed, open_ended, keywords, handler))
        return handler

    return add


def foldable(*functions: Any) -> None:
    """Declare functions without side effects: on constants they run during capture."""
    _foldable.update(functions)


def graph_function(*functions: Any) -> None:
    """Declare functions that become graph nodes as they are."""
    _graph.update(functions)


def inline(function: Any, body: Callable[..., Any]) -> None:
    """Declare a Python body that is traced in the place of a builtin or C function."""
    _inlined[function] = body


def inlined_body(function: Any) -> Callable[..., Any] | None:
    """Return the Python body declared for a function, if any."""
    return _inlined.get(function)


def is_graph_function(function: Any) -> bool:
    """Say whether a function was declared with `graph_function`."""
    return _hashable(function) and function in _graph


def is_foldable(function: Any) -> bool:
    """Say whether a function was declared with `foldable`."""
    return _hashable(function) and function in _foldable


def has_rule(function: Any) -> bool:
    """Say whether calls of a function are decided by this table."""
    if not _hashable(function):
        return False
    return function in _rows or function in _foldable or function in _graph or function in _inlined


def _hashable(function: Any) -> bool:
    try:
        hash(function)
    except TypeError:
        return False
    return True


def apply_rules(tx: Tracer, function: Any, args: list[Value], kwargs: Kwargs) -> Value:
    """Call a function through the table; NotImplemented when no row fits.

    Raises:
        Break: from a handler.
    """
    if not _hashable(function):
        return NotImplemented
    for row in _rows.get(function, ()):
        if row.fits(args, kwargs):
            result = row.handler(tx, *args, **kwargs)
            if result is not NotImplemented:
                value: Value = result
                return value
    if function in _foldable:
        constant_args = all(a.is_constant() for a in args) and all(
            v.is_constant() for v in kwargs.values()
        )
        if constant_args:
            return fold(tx, function, args, kwargs)
    body = _inlined.get(function)
    if body is not None:
        return tx.const_object(body).call(tx, args, kwargs)
    if function in _graph:
        return tx.graph.emit("call_function", function, args, kwargs)
    return NotImplemented


def no_rule(function: Any, args: list[Value]) -> Break:
    """Return the break for a call that no rule covers."""
    name = getattr(function, "__qualname__", None) or repr(function)
    module = getattr(function, "__module__", None)
    kinds = ", ".join(arg.describe() for arg in args)
    return Break("unknown-call", f"{module + '.' if module else ''}{name}({kinds})")
