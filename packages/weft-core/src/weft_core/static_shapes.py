"""Put off loading sympy (0.3 s) until a program has a symbolic size.

torch's fake tensors ask `torch.fx.experimental.symbolic_shapes`, which imports sympy, at every
operator. `install` puts a module in its place that answers the questions asked of plain sizes, and
becomes a way to the real one when asked anything else. Only that one makes symbols.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental

_PACKAGE, _NAME = "torch.fx.experimental", "symbolic_shapes"
_FULL_NAME = f"{_PACKAGE}.{_NAME}"
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def install() -> None:
    """Put the stand-in in place, unless the real module is loaded already."""
    if _FULL_NAME not in sys.modules:
        stand_in = _StandIn(_FULL_NAME)
        sys.modules[_FULL_NAME] = stand_in
        setattr(torch.fx.experimental, _NAME, stand_in)


class _StandIn(types.ModuleType):
    """The module until the real one is needed; afterwards a way to it for who still holds this."""

    def __init__(self, name: str) -> None:
        super().__init__(name, __doc__)
        self.__spec__ = importlib.util.find_spec(name)
        self._real: types.ModuleType | None = None
        self._lent: list[tuple[dict[str, Any], str]] = []
        self._lock = threading.RLock()
        self._static = {plain: _asker(self, plain, answer) for plain, answer in _ANSWERS.items()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        static = self._static.get(name) if self._real is None else None
        if static is None:
            return getattr(self.load(), name)
        importer = sys._getframe(1)
        if importer.f_code.co_name == "<module>":
            self._lent.append((importer.f_globals, name))
        return static

    def load(self) -> types.ModuleType:
        """Import the real module, and hand it to the modules that had names of this one."""
        with self._lock:
            if self._real is None:
                if sys.modules.get(_FULL_NAME) is self:
                    del sys.modules[_FULL_NAME]
                self._real = importlib.import_module(_FULL_NAME)
                for scope, name in self._lent:
                    if scope.get(name) is self._static[name]:
                        scope[name] = getattr(self._real, name)
                self._lent.clear()
            return self._real


def _asker(stand_in: _StandIn, name: str, answer: Callable[..., Any]) -> Any:
    """The stand-in's function `name`: `answer`, or the real one's if that cannot tell."""
    if isinstance(answer, type):
        return answer

    def ask(*args: Any, **kwargs: Any) -> Any:
        if vars(stand_in)["_real"] is None and not any(isinstance(a, _SYMBOLIC) for a in args):
            result = answer(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return getattr(stand_in.load(), name)(*args, **kwargs)

    ask.__name__ = ask.__qualname__ = name
    return ask


class LazySympy:
    """What `import sympy` gives in the functions of torch that only ask for a class of it."""

    class _NoExpression:
        """Stands for sympy.Basic, of which there are no objects before sympy is loaded."""

    @property
    def Basic(self) -> type:  # noqa: N802
        """The class of all expressions."""
        return sys.modules["sympy"].Basic if "sympy" in sys.modules else self._NoExpression

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("sympy"), name)


class LazySympyFunctions:
    """What `from torch.utils._sympy.functions import Max` gives there."""

    @staticmethod
    def Max(*args: Any) -> Any:  # noqa: N802
        """torch's symbolic maximum."""
        return importlib.import_module("torch.utils._sympy.functions").Max(*args)


# ---- what is true of plain sizes


def _itself(value: Any, *_: Any, **__: Any) -> Any:
    return value if type(value) in (bool, int) else NotImplemented


def _equal(left: Any, right: Any) -> Any:
    pair = [tuple(x) if isinstance(x, list | tuple) else (x,) for x in (left, right)]
    plain = all(type(number) is int for numbers in pair for number in numbers)
    return pair[0] == pair[1] if plain else NotImplemented


class _DataDependent(RuntimeError):
    """Stands for GuardOnDataDependentSymNode, which only the real module can raise."""


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


_ITSELF = """
    guard_or_true guard_or_false guard_size_oblivious statically_known_true expect_true guard_bool
    guard_int guarding_hint_or_throw
"""
_ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_ITSELF.split(), _itself),
    "sym_eq": _equal,
    "sym_and": lambda *values: all(values),
    "sym_or": lambda *values: any(values),
    "has_guarding_hint": _always(True),
    "has_hint": _always(True),  # this and the next in torch 2.11
    "size_hint": _itself,
    "is_nested_int": _always(False),
    "has_free_unbacked_symbols": _always(False),
    "free_unbacked_symbols": _always(()),
    "_iterate_exprs": _always(()),
    "_iterate_nodes": _always(()),
    "compute_unbacked_bindings": lambda env, *_, **__: None if env is None else NotImplemented,
    "GuardOnDataDependentSymNode": _DataDependent,
}
