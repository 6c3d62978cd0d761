"""Small Python functions with tensor work, each around one construct of the language.

A module is a theme and holds functions decorated with `case`. What a case does must not depend on
how often it ran before, so that eager and compiled runs can be compared. `all_cases` lists them.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

THEMES = (
    "control_flow",
    "exceptions",
    "failing_operators",
    "generators",
    "coroutines",
    "managers",
    "classes",
    "data_model",
    "closures",
    "code_texts",
    "comprehensions",
    "calls",
    "matching",
    "strings",
    "builtin_functions",
    "itertools_module",
    "functools_module",
    "operator_module",
    "collections_module",
    "numeric_modules",
    "dataclasses_enum",
    "random_time",
    "messages",
    "introspection",
    "weak_references",
    "library_modules",
    "library_objects",
    "torch_features",
    "training_scripts",
    "numbers_from_data",
    "checks",
)


@dataclass(frozen=True)
class Case:
    """One construct.

    Args:
        name: its name, unique in the theme.
        theme: the module it is in.
        function: takes what `inputs` returns.
        inputs: makes fresh arguments.
        reads_data: whether numbers and sizes out of tensors are to be captured (a setting).
    """

    name: str
    theme: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    reads_data: bool = False

    @property
    def id(self) -> str:
        """Theme and name."""
        return f"{self.theme}.{self.name}"


_CASES: dict[str, list[Case]] = {}


def one_tensor() -> tuple[torch.Tensor]:
    """Return the usual arguments."""
    return (torch.arange(6.0).reshape(2, 3),)


def case(
    function: Callable[..., Any] | None = None,
    *,
    inputs: Callable[[], tuple[Any, ...]] = one_tensor,
    reads_data: bool = False,
) -> Any:
    """Add a function to the corpus."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        theme = function.__module__.rpartition(".")[2]
        name = function.__name__
        rows = _CASES.setdefault(theme, [])
        assert all(row.name != name for row in rows), f"{theme}.{name} occurs twice"
        rows.append(Case(name, theme, function, inputs, reads_data))
        return function

    return add if function is None else add(function)


def all_cases() -> list[Case]:
    """Return every case, theme by theme."""
    with warnings.catch_warnings():
        # CPython 3.14 warns of `break` and `return` in a `finally` block.
        warnings.simplefilter("ignore", SyntaxWarning)
        for theme in THEMES:
            importlib.import_module(f"constructs.{theme}")
    return [row for theme in THEMES for row in _CASES.get(theme, [])]
