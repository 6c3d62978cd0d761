"""What capture asks of libraries by name, beside rules: tables that `libraries/` fills.

They are filled when weft_capture is imported, as long as no rule is loaded yet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

IMMUTABLE_PACKAGES = {"torch"}
"""Packages whose globals and classes are taken to be constant, as the standard library's are."""

UNGUARDED_PACKAGES: set[str] = set()
"""Packages whose classes are read without a guard."""

EAGER_PACKAGES: set[str] = set()
"""Packages whose functions are never captured on their own."""

LAUNCHER_MODULES: set[str] = set()
"""Prefixes of modules that launch kernels: what they call runs as it is, too."""

ARRAY_CLASSES: dict[str, str] = {}
"""Module -> name of a class whose objects hold what tensors do."""

DEBUGGER_MODULES: set[str] = set()
"""Parts of the names of modules of debuggers, beside those of `bdb`."""

LOG_HANDLER_MODULES: set[str] = set()
"""Modules of handlers and formatters that do to a record what those of `logging` do."""

COUNTED_HASHES: set[str] = set()
"""Modules of classes whose `__hash__` counts its calls."""


@dataclass(frozen=True)
class ScalarLibrary:
    """A library whose scalars are constants as Python's numbers are.

    Args:
        raising: returns a context in which its functions raise FloatingPointError for a warning.
        is_quiet: says whether the program lets them raise none.
        fits_tensor: says whether a tensor of int64 or float64 holds a scalar.
        of_tensor: returns what a 0-dim tensor holds as a scalar.
        attributes: names of what a scalar's class decides alone.
        break_code: of breaks at what capture does not take of it.
    """

    raising: Callable[[], AbstractContextManager[Any]]
    is_quiet: Callable[[], bool]
    fits_tensor: Callable[[Any], bool]
    of_tensor: Callable[[torch.Tensor], Any]
    attributes: frozenset[str]
    break_code: str


SCALAR_LIBRARIES: dict[str, ScalarLibrary] = {}
"""Module of a scalar's class -> its library."""


def scalar_library(obj: object) -> ScalarLibrary | None:
    """Return the library of a scalar; None for any other object."""
    cls = type(obj)
    is_array = ARRAY_CLASSES.get(cls.__module__) == cls.__name__
    if is_array or not hasattr(cls, "item"):  # a description of a type, for example
        return None
    return SCALAR_LIBRARIES.get(cls.__module__)
