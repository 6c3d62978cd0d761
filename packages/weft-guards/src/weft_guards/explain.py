"""Why a call did not fit: the failed guard, what it saw when it was made, and what it sees now.

Texts come from a table by kind of guard. They are made without the user's `__repr__`, and nothing
here raises on odd values, since a recompile message must never stop a program.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from weft_guards.check import arg_names_of, compile_check, in_order, read_sources
from weft_guards.guards import KINDS, Guard
from weft_guards.payloads import TensorSpec, name_of
from weft_guards.sources import Source


@dataclass(frozen=True)
class Miss:
    """Why a check failed: one property of one value, in texts."""

    guard: Guard
    what: str
    old: str
    new: str
    fix: str = ""

    @property
    def remedy(self) -> str:
        """What a user can do about it in general."""
        return KINDS[self.guard.kind].remedy

    @property
    def user_line(self) -> str:
        """The file and line of the innermost user frame, or an empty text."""
        return "".join(f"{frame.filename}:{frame.lineno}" for frame in self.guard.user_stack[-1:])

    def __str__(self) -> str:
        lines = [f"{self.what}: {self.old} -> {self.new}", f"    failed guard: {self.guard}"]
        stack = [f"{f.filename}:{f.lineno} in {f.name}" for f in self.guard.user_stack[::-1]]
        if stack:
            lines.append(f"    used at {', called from '.join(stack)}")
        lines.append(f"    what to do: {self.remedy}")
        return "\n".join([*lines, f"    for example: {self.fix}"] if self.fix else lines)


def explain_miss(
    guards: Iterable[Guard], func: FunctionType, flat_locals: Sequence[Any]
) -> list[Miss]:
    """Return why guards do not hold for a call: the differences that the first failing guard sees.

    Args:
        guards: those of one cache entry.
        func: the function called.
        flat_locals: its arguments in the order of `arg_names_of(func.__code__)`.

    Returns an empty list when all guards hold.
    """
    code = func.__code__
    ordered = in_order(guards)

    def fails(count: int) -> bool:
        """Say whether one of the first guards does not hold."""
        check = compile_check(ordered[:count], arg_names_of(code), code.co_freevars)
        return not check(func, *flat_locals)

    if not fails(len(ordered)):
        return []
    guard = ordered[bisect_left(range(1, len(ordered)), True, key=fails)]
    try:
        values = read_sources(guard.sources(), func, flat_locals)
    except Exception as error:
        text = f"cannot be read ({type(error).__name__}: {error})"
        return [Miss(guard, guard.source.expr(), "readable", text)]
    return _differences(guard, values)


def _differences(guard: Guard, values: Sequence[object]) -> list[Miss]:
    """Describe a failed guard by old and new value."""
    name = guard.source.expr()
    if isinstance(guard.payload, TensorSpec):
        found = guard.payload.differences(values[0])
        return [
            Miss(guard, f"{what} of {name}", old, new, fix_for(guard, what, old))
            for what, old, new in found
        ]
    old, new = _TEXTS.get(guard.kind, _plain)(guard.payload, values)
    return [Miss(guard, name, old, new, fix_for(guard, name, old))]


# ---- old and new text by kind: (payload, values) -> (old, new)

Texts = Callable[[Any, Sequence[Any]], tuple[str, str]]


def _plain(payload: Any, values: Sequence[Any]) -> tuple[str, str]:
    return name_of(payload), name_of(values[0])


def _sized(payload: Any, values: Sequence[Any]) -> tuple[str, str]:
    return f"length {payload}", _try(lambda: f"length {len(values[0])}", values[0])


def _keys(payload: Any, values: Sequence[Any]) -> tuple[str, str]:
    keys = _try(lambda: f"keys [{', '.join(map(name_of, values[0]))}]", values[0])
    return f"keys {payload}", keys


def _try(describe: Callable[[], str], value: object) -> str:
    """Describe a value, or only name it where it is not of the kind expected."""
    try:
        return describe()
    except Exception:
        return name_of(value)


def _shares(shared: bool) -> str:
    return "memory is shared with another input" if shared else "no memory is shared"


def _change(payload: Any, owner: type | ModuleType | None) -> str:
    if owner is None:
        return "gone"
    return f"changed: {', '.join(payload.changed(owner)) or 'something'}"


_TEXTS: dict[str, Texts] = {
    "TYPE": lambda p, v: (name_of(p), name_of(type(v[0]))),
    "LEN": _sized,
    "DICT_KEYS": _keys,
    "ATTR_ABSENT": lambda p, v: (f"no attribute {p!r}", "an attribute of that name"),
    "KEY_ABSENT": lambda p, v: (f"no key {p!r}", "a key of that name"),
    "SHAPE": lambda p, v: (str(p), f"values {', '.join(map(name_of, v))}"),
    "ALIAS": lambda p, v: ("the same object", "different objects"),
    "DISTINCT": lambda p, v: ("different objects", "the same object"),
    "MEMORY": lambda p, v: (_shares(p.shared), _shares(not p.shared)),
    "CLASS": lambda p, v: ("unchanged", _change(p, v[0])),
    "NAMESPACE": lambda p, v: ("unchanged", _change(p, v[0])),
    "CELL_EMPTY": lambda p, v: ("empty", "filled"),
    "GRAD_MODE": lambda p, v: (f"grad mode {p}", f"grad mode {not p}"),
    "GLOBAL_STATE": lambda p, v: p.difference(),
}


# ---- a fix ready to paste: one line of the user's program

_MEMBER = r"\.__dict__(?:\['_(?:parameters|buffers|modules)'\])?"
_SPELLINGS = (
    # in the printed name of a source, and in the program
    (r"^[LGC]\['(\w+)'\]", r"\1"),
    (_MEMBER + r"\['(\d+)'\]", r"[\1]"),
    (_MEMBER + r"\['(\w+)'\]", r".\1"),
)


def program_expr(source: Source) -> str:
    """Return a source as the program writes it: `self.blocks[0].weight`, not its dicts."""
    text = source.expr()
    for printed, written in _SPELLINGS:
        text = re.sub(printed, written, text)
    return text


Fix = Callable[[str, str, str], str]  # (the value in the program, property, what it was) -> a line
_TENSOR_FIXES: tuple[tuple[str, Fix], ...] = (
    # the property begins with
    ("size of dim", lambda x, what, old: f"weft.mark_dynamic({x}, {what.split()[3]})"),
    ("stride", lambda x, what, old: f"{x} = {x}.contiguous()"),
    ("dtype", lambda x, what, old: f"{x} = {x}.to({old})"),
    ("device", lambda x, what, old: f"{x} = {x}.to({old!r})"),
    ("requires_grad", lambda x, what, old: f"{x}.requires_grad_({old})"),
)
_FIXES: dict[str, Fix] = {
    "CONST": lambda x, what, old: f"{x} = torch.tensor({x})  # a number may then vary",
    "LEN": lambda x, what, old: f"{x} = torch.stack({x})  # where its items are tensors",
    "ATTR_ABSENT": lambda x, what, old: f"{x}.{old.split()[-1][1:-1]} = None  # before compiling",
    "MEMORY": lambda x, what, old: f"{x} = {x}.clone()",
    "GRAD_MODE": lambda x, what, old: f"with torch.set_grad_enabled({old.split()[-1]}): ...",
    "CLASS": lambda x, what, old: "weft.reset()  # after changing the class",
}


def fix_for(guard: Guard, what: str, old: str) -> str:
    """Return a line that avoids a recompile, or an empty text where no line would.

    Args:
        guard: the guard that failed.
        what: the property that differs, as `Miss.what` names it.
        old: its text when the guard was made.
    """
    fix = _FIXES.get(guard.kind)
    if guard.kind == "TENSOR":
        fix = next((row[1] for row in _TENSOR_FIXES if what.startswith(row[0])), None)
    if guard.kind == "CONST" and type(guard.payload) not in (int, float):
        fix = None
    return "" if fix is None else fix(program_expr(guard.source), what, old)
