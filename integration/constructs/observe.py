"""Run a construct and see what it does: results, arguments after, exceptions, text, warnings."""

import contextlib
import enum
import io
import logging
import random
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from constructs import Case

# torch warns once in a process, so whoever comes first would differ; weft says what runs eagerly.
_NOT_OURS = ("torch.jit", "runs eagerly")
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, range)


@dataclass
class Outcome:
    """What one call did; `error` is the exception that left it."""

    result: Any = None
    error: BaseException | None = None
    arguments: Any = None
    text: str = ""
    warned: tuple[str, ...] = ()


def observe(function: Callable[..., Any], case: Case, calls: int = 2) -> list[Outcome]:
    """Call a case's function some times with fresh arguments and note what each call did."""
    random.seed(11)
    torch.manual_seed(11)
    outcomes = []
    root = logging.getLogger("constructs")
    root.setLevel(logging.INFO)
    for _ in range(calls):
        outcome = Outcome()
        arguments = case.inputs()
        text = io.StringIO()
        handler = logging.StreamHandler(text)
        root.addHandler(handler)
        try:
            with (
                warnings.catch_warnings(record=True) as seen,
                contextlib.redirect_stdout(text),
                contextlib.redirect_stderr(text),
            ):
                warnings.simplefilter("always")
                try:
                    outcome.result = function(*arguments)
                except Exception as error:
                    outcome.error = error
        finally:
            root.removeHandler(handler)
        outcome.arguments = arguments
        outcome.text = text.getvalue()
        texts = (f"{w.category.__name__}: {w.message}" for w in seen)
        outcome.warned = tuple(t for t in texts if not any(part in t for part in _NOT_OURS))
        outcomes.append(outcome)
    return outcomes


def differences(expected: list[Outcome], got: list[Outcome]) -> list[str]:
    """Return what differs between two rows of outcomes, in words."""
    found = []
    for number, (left, right) in enumerate(zip(expected, got, strict=True)):
        for name in ("result", "error", "arguments", "text", "warned"):
            a, b = getattr(left, name), getattr(right, name)
            if not same(a, b, {}):
                found.append(f"call {number}: {name}: {a!r} is {b!r}")
    return found


def same(a: Any, b: Any, seen: dict[tuple[int, int], bool]) -> bool:
    """Say whether two objects are alike, tensors and objects of the program included."""
    if (id(a), id(b)) in seen:
        return True
    seen[id(a), id(b)] = True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if type(a).__qualname__ != type(b).__qualname__:
        return False
    if isinstance(a, float) and a != a:
        return b != b
    if isinstance(a, _PLAIN):
        return bool(a == b)
    if isinstance(a, enum.Enum):
        return a.name == b.name
    if isinstance(a, type | types.FunctionType | types.BuiltinFunctionType):
        return a.__qualname__ == b.__qualname__
    if isinstance(a, BaseException):
        links = ("args", "__cause__", "__context__", "__suppress_context__")
        return all(same(getattr(a, n), getattr(b, n), seen) for n in links)
    return _same_contents(a, b, seen)


def _same_tensors(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    about = ("dtype", "shape", "requires_grad", "device")
    return all(getattr(a, n) == getattr(b, n) for n in about) and bool(
        torch.allclose(a, b, equal_nan=True)
    )


def _same_contents(a: Any, b: Any, seen: dict[tuple[int, int], bool]) -> bool:
    if isinstance(a, torch.nn.Module):
        return same(dict(a.state_dict()), dict(b.state_dict()), seen)
    if isinstance(a, set | frozenset):
        return same(sorted(a, key=repr), sorted(b, key=repr), seen)
    if isinstance(a, dict):
        items = same(list(a.items()), list(b.items()), seen)
        return items and same(getattr(a, "__dict__", None), getattr(b, "__dict__", None), seen)
    if hasattr(a, "__len__") and hasattr(a, "__iter__"):
        left, right = list(a), list(b)
        return len(left) == len(right) and all(
            same(x, y, seen) for x, y in zip(left, right, strict=True)
        )
    if hasattr(a, "__dict__"):
        return same(vars(a), vars(b), seen)
    slots = getattr(type(a), "__slots__", ())
    return all(same(getattr(a, n, None), getattr(b, n, None), seen) for n in slots)
