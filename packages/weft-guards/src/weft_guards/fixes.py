"""A fix ready to paste for a guard that failed: one line of the user's program.

`in_program` writes a source the way the program itself names it; the table says what to do about a
difference, by the kind of guard and, for tensors, by the property that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft_guards.guards import Guard
from weft_guards.sources import (
    AttrSource,
    ClosureSource,
    DictSource,
    GlobalSource,
    ItemSource,
    LocalSource,
    Source,
    TensorProperty,
)

_MEMBERS = ("_parameters", "_buffers", "_modules")


def in_program(source: Source) -> str:
    """Return a source as the program writes it: `self.blocks[0].weight`, not its dicts."""
    if isinstance(source, LocalSource | GlobalSource | ClosureSource):
        return source.name
    if isinstance(source, AttrSource):
        return f"{in_program(source.base)}.{source.name}"
    if isinstance(source, TensorProperty):
        return f"{in_program(source.base)}.{source.prop}({source.dim})"
    if isinstance(source, ItemSource):
        return _item(source.base, source.key)
    return source.expr()


def _item(base: Source, key: Any) -> str:
    if isinstance(base, DictSource):
        return f"{in_program(base.base)}.{key}"
    members = isinstance(base, ItemSource) and base.key in _MEMBERS
    if members and isinstance(base.base, DictSource):
        owner = in_program(base.base.base)
        return f"{owner}[{key}]" if str(key).isdigit() else f"{owner}.{key}"
    return f"{in_program(base)}[{key!r}]"


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
    return "" if fix is None else fix(in_program(guard.source), what, old)
