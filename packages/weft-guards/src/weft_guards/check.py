"""Guards to one function that tests them all: in Python always, in C where `native` can.

The function walks the tree of sources: a source is fetched once, its own guards run (types first),
and only then what is read from it. Conditions on several values come last. Whatever a read raises
is a miss. `explain` tells which guard it was, by checks of ever fewer guards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

from weft_guards.abi import extension
from weft_guards.guards import KINDS, Guard
from weft_guards.native import Assembler, usable_extension
from weft_guards.sources import CallSource, Source, TorchStateSource

Check = Callable[..., bool]
_ORDER = ("GRAD_MODE", "GLOBAL_STATE", "NONE", "TYPE", "ID", "TENSOR")


def arg_names_of(code: CodeType) -> tuple[str, ...]:
    """Return a code object's argument names: positional, keyword-only, *args, **kwargs."""
    flags = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]


class CheckNames:
    """Names of roots and constants inside a generated check."""

    def __init__(self, arg_names: Sequence[str], free_names: Sequence[str]) -> None:
        self.arguments = {name: f"a{index}" for index, name in enumerate(arg_names)}
        self.cells = {name: index for index, name in enumerate(free_names)}
        # math and torch are what the printer of shape conditions may name.
        self.namespace: dict[str, Any] = {"MODULES": sys.modules, "math": math, "torch": torch}
        self._by_id: dict[int, str] = {}

    def root(self, kind: str, name: str | None = None) -> str:
        if kind == "L":
            return self.arguments[str(name)]
        if kind in ("C", "cell"):
            cell = f"func.__closure__[{self.cells[str(name)]}]"
            return cell if kind == "cell" else f"{cell}.cell_contents"
        roots = {"G": "func.__globals__", "M": "MODULES"}[kind]
        return roots if name is None else f"{roots}[{name!r}]"

    def const(self, value: object) -> str:
        known = self._by_id.get(id(value))
        if known is None:
            known = self._by_id[id(value)] = f"k{len(self._by_id)}"
            self.namespace[known] = value  # also keeps the id from being used again
        return known


class _Writer:
    """Writes the body of a check, one line a fetch or a guard."""

    def __init__(self, names: CheckNames) -> None:
        self.names = names
        self.lines: list[str] = []
        self.fetched: dict[Source, str] = {}

    def fetch(self, source: Source) -> str:
        """Return an expression for a source's value, having written the reads it needs."""
        known = self.fetched.get(source)
        if known is None:
            base = "" if source.base is None else self.fetch(source.base)
            known = source.render(base, self.names)
            if not known.isidentifier():
                local = f"v{len(self.fetched)}"
                self.lines.append(f"{local} = {known}")
                known = local
            self.fetched[source] = known
        return known

    def test(self, guard: Guard) -> None:
        """Write one guard."""
        values = [self.fetch(source) for source in guard.sources()]
        condition = KINDS[guard.kind].test(values, guard.payload, self.names)
        self.lines.append(f"if not ({condition}): return False")

    def text(self, name: str) -> str:
        """Return the whole function."""
        arguments = "".join(f", {local}" for local in self.names.arguments.values())
        body = [f"        {line}" for line in self.lines or ["pass"]]
        tail = ["    except Exception:", "        return False", "    return True", ""]
        return "\n".join([f"def {name}(func{arguments}):", "    try:", *body, *tail])


def read_sources(
    sources: Sequence[Source], func: FunctionType, flat_locals: Sequence[Any]
) -> list[Any]:
    """Read the values of sources as they are in a call, each base once; raises what that raises."""
    code = func.__code__
    names = CheckNames(arg_names_of(code), code.co_freevars)
    writer = _Writer(names)
    writer.lines.append(f"out = [{', '.join([writer.fetch(source) for source in sources])}]")
    names.namespace.update(zip(names.arguments.values(), flat_locals), func=func)
    exec("\n".join(writer.lines), names.namespace)
    return names.namespace["out"]  # type: ignore[no-any-return]


def in_order(guards: Iterable[Guard]) -> list[Guard]:
    """Return guards in the order to test them; see the module's docstring."""
    rank = {kind: index for index, kind in enumerate(_ORDER)}
    own: dict[Source, list[Guard]] = {}
    relations: list[Guard] = []
    for guard in guards:
        if len(guard.sources()) == 1:
            own.setdefault(guard.source, []).append(guard)
        else:
            relations.append(guard)
    order: list[Guard] = []
    placed: set[Source | None] = {None}

    def place(source: Source) -> None:
        """Put a source's guards behind those of all it is read from."""
        if source not in placed:
            placed.add(source)
            place(source.base)
            order.extend(sorted(own.get(source, ()), key=lambda g: rank.get(g.kind, len(rank))))

    for source in sorted(own, key=_turn):
        place(source)
    return order + relations


def _turn(source: Source) -> int:
    """Say when a source is read: settings first, what functions return last."""
    while source.base is not None:
        source = source.base
    return 0 if isinstance(source, TorchStateSource) else 2 if isinstance(source, CallSource) else 1


def compile_check(
    guards: Iterable[Guard], arg_names: Sequence[str], free_names: Sequence[str] = ()
) -> Check:
    """Compile guards to one function `check(func, *flat_locals) -> bool`.

    Args:
        guards: what must hold.
        arg_names: the frame's arguments in order: positional, keyword-only, *args, **kwargs.
        free_names: the code object's free variables, in the order of its closure.

    The function never raises, has no side effects, and holds user objects only weakly.

    Raises:
        KeyError: when a source names an argument or cell that is not there.
    """
    ordered = in_order(guards)
    native = usable_extension()
    if native is None:
        return _python_check(ordered, arg_names, free_names)
    assembler = Assembler(arg_names, free_names)
    left = [guard for guard in ordered if not assembler.add(guard)]
    residual = _python_check(left, arg_names, free_names) if left else None
    whole = cache(lambda: _python_check(ordered, arg_names, free_names))
    unsure = (lambda *values: whole()(*values)) if assembler.amounts else None
    check: Check = native.Check(tuple(assembler.rows), len(arg_names), residual, unsure)
    return check


def _python_check(
    guards: Iterable[Guard], arg_names: Sequence[str], free_names: Sequence[str]
) -> Check:
    """Write and compile the Python form of guards in order."""
    names = CheckNames(arg_names, free_names)
    writer = _Writer(names)
    for guard in guards:
        writer.test(guard)
    text = writer.text("check")
    exec(compile(text, "<weft check>", "exec"), names.namespace)
    check: Any = names.namespace.pop("check")
    check.source_text = text
    return check  # type: ignore[no-any-return]


def describe_check(check: Check) -> str:
    """Return what a check does, as text: rows of the C form, then the Python form."""
    rows = getattr(check, "program", ())
    names = {getattr(extension(), name): name for name in dir(extension()) if name.isupper()}
    lines = [f"{names[code]:<10} r{a} {n} {value!r}" for code, a, n, value in rows]
    text = getattr(check if not rows else getattr(check, "residual", None), "source_text", "")
    return "\n".join([*lines, text])
