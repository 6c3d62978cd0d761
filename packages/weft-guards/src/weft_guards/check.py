"""Guards to one function that tests them all: in Python always, in C where `native` can.

The function first tests the state of torch, then walks the tree of sources: a source is
fetched once into a local, its own guards run (types first), and only then what is read from it.
So a value is read only after the type that makes reading it harmless was confirmed. Conditions on
several values (aliasing, shapes) come last. Whatever a read raises, such as a missing attribute,
is a miss. With `positions=True` the function returns the position of the guard that failed
instead of False; `explain` builds that variant when somebody asks why.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch

from weft_guards.abi import extension
from weft_guards.config import settings
from weft_guards.guards import KINDS, Guard
from weft_guards.native import Assembler
from weft_guards.sources import Source, TorchStateSource

Check = Callable[..., bool]
_ORDER = ("GRAD_MODE", "GLOBAL_STATE", "NONE", "NOT_NONE", "TYPE", "ID", "TENSOR")
HIT = -1  # what a check with positions returns when all guards hold


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
        self.uses_globals = False

    def local(self, name: str) -> str:
        return self.arguments[name]

    def globals(self) -> str:
        self.uses_globals = True
        return "G"

    def cell(self, name: str) -> str:
        return f"func.__closure__[{self.cells[name]}].cell_contents"

    def module(self, name: str) -> str:
        return f"MODULES[{name!r}]"

    def const(self, value: object) -> str:
        known = self._by_id.get(id(value))
        if known is None:
            known = self._by_id[id(value)] = f"k{len(self._by_id)}"
            self.namespace[known] = value  # also keeps the id from being used again
        return known


class _Writer:
    """Writes the body of a check, one line a fetch or a guard."""

    def __init__(self, guards: Sequence[Guard], names: CheckNames, positions: bool) -> None:
        self.guards = guards
        self.names = names
        self.positions = positions
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

    def test(self, position: int) -> None:
        """Write one guard."""
        guard = self.guards[position]
        if self.positions:
            self.lines.append(f"at = {position}")
        values = [self.fetch(source) for source in guard.sources()]
        condition = KINDS[guard.kind].test(values, guard.payload, self.names)
        failed = str(position) if self.positions else "False"
        self.lines.append(f"if not ({condition}): return {failed}")

    def text(self, name: str) -> str:
        """Return the whole function."""
        arguments = "".join(f", {local}" for local in self.names.arguments.values())
        head = [f"def {name}(func{arguments}):"]
        if self.positions:
            head.append("    at = 0")
        body = [f"        {line}" for line in self.lines]
        if self.names.uses_globals:
            body.insert(0, "        G = func.__globals__")
        failed, passed = ("at", str(HIT)) if self.positions else ("False", "True")
        tail = ["    except Exception:", f"        return {failed}", f"    return {passed}", ""]
        return "\n".join([*head, "    try:", *(body or ["        pass"]), *tail])


def _in_order(guards: Sequence[Guard]) -> list[int]:
    """Return positions of guards in the order to test them; see the module's docstring."""
    rank = {kind: index for index, kind in enumerate(_ORDER)}
    own: dict[Source, list[int]] = {}
    relations: list[int] = []
    for position, guard in enumerate(guards):
        if len(guard.sources()) == 1:
            own.setdefault(guard.source, []).append(position)
        else:
            relations.append(position)
    children: dict[Source | None, list[Source]] = {}
    placed: set[Source] = set()
    for source in own:
        _place(source, children, placed)
    order: list[int] = []
    roots = children.get(None, [])
    roots.sort(key=lambda source: not isinstance(source, TorchStateSource))
    stack = roots[::-1]
    while stack:
        source = stack.pop()
        order += sorted(own.get(source, ()), key=lambda i: rank.get(guards[i].kind, len(rank)))
        stack += children.get(source, [])[::-1]
    return order + relations


def _place(
    source: Source, children: dict[Source | None, list[Source]], placed: set[Source]
) -> None:
    """Hang a source, and all it is read from, into the tree."""
    current: Source | None = source
    while current is not None and current not in placed:
        placed.add(current)
        children.setdefault(current.base, []).append(current)
        current = current.base


def compile_check(
    guards: Iterable[Guard],
    arg_names: Sequence[str],
    free_names: Sequence[str] = (),
    *,
    positions: bool = False,
) -> Check:
    """Compile guards to one function `check(func, *flat_locals) -> bool`.

    Args:
        guards: what must hold.
        arg_names: the frame's arguments in order: positional, keyword-only, *args, **kwargs.
        free_names: the code object's free variables, in the order of its closure.
        positions: return the position of the first failing guard, or -1 when all hold.

    The function never raises, has no side effects, and holds user objects only weakly.

    Raises:
        KeyError: when a source names an argument or cell that is not there.
    """
    listed = list(guards)
    order = _in_order(listed)
    native = extension() if settings.native_checks and not positions else None
    if native is None:
        return _python_check(listed, order, arg_names, free_names, positions)
    assembler = Assembler(arg_names, free_names)
    left = [position for position in order if not assembler.add(listed[position])]
    residual = _python_check(listed, left, arg_names, free_names, False) if left else None
    check: Check = native.Check(tuple(assembler.rows), len(arg_names), residual)
    return check


def _python_check(
    guards: Sequence[Guard],
    order: Sequence[int],
    arg_names: Sequence[str],
    free_names: Sequence[str],
    positions: bool,
) -> Check:
    """Write and compile the Python form, with the guards at the given positions."""
    names = CheckNames(arg_names, free_names)
    writer = _Writer(guards, names, positions)
    for position in order:
        writer.test(position)
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
