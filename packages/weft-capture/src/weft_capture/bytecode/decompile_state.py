"""What the rows of `decompile_rules` work on: the paths of a text, its names and its operands."""

from __future__ import annotations

import ast
import keyword
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

from .instr import Decoded
from .tidy import store


class NotExpressible(Exception):
    """No Python statement does what an instruction does; the text says which."""


def load(name: str) -> ast.Name:
    """The value of a variable."""
    return ast.Name(name, ast.Load())


def call(function: ast.expr, *args: Any) -> ast.Call:
    """The expression of a call."""
    return ast.Call(function, list(args), [])


class Names(Protocol):
    """What a text calls objects; it refers to them as globals.

    `special_method(manager, name)` looks a method up as `with` does.
    """

    special_method: object

    def of(self, value: object, /) -> str | None:
        """The name of an object; None for one that stands in the text as a literal."""

    def function(self, code: CodeType, /) -> str:
        """The name of a function that the code makes of another code object."""

    def without_first(self, name: str, /) -> bool:
        """Whether a call of a name leaves out its first argument, which is always None."""


@dataclass
class Walk:
    """The state on one path: operands (None is a NULL), and which variables are bound.

    `bound` are bound for certain, `possible` may be; `error` is the exception being handled;
    `temps` are the variables of the text that hold the Writer's temporaries.
    """

    stack: list[ast.expr | None]
    bound: set[str]
    possible: set[str] = field(default_factory=set)
    temps: dict[str, str] = field(default_factory=dict)
    error: str = ""
    out: list[ast.stmt] = field(default_factory=list)

    def branch(self) -> Walk:
        """A copy with nothing written yet."""
        state = (self.stack.copy(), self.bound.copy(), self.possible.copy(), self.temps.copy())
        return Walk(*state, self.error)


class State:
    """The text of one code object, as far as it is written."""

    def __init__(self, decoded: Decoded, names: Names, tail_call: object) -> None:
        self.decoded = decoded
        self.names = names
        self.tail_call = names.of(tail_call) if tail_call is not None else None
        self.globals: set[str] = set()
        self.stored: set[str] = set()
        self._temps: set[str] = set()
        self._renamed: dict[str, str] = {}
        self._taken = {*decoded.slots, *decoded.code.co_names}
        pairs = zip(decoded.instrs, decoded.instrs[1:])
        self.functions = {id(a.argval) for a, b in pairs if b.opname == "MAKE_FUNCTION"}
        self._left = 60 * len(decoded.instrs) + 1000  # instructions, on all paths

    # ---- names

    def name(self, value: object) -> str:
        """The name of an object that is no literal."""
        name = self.names.of(value)
        assert name is not None
        return name

    def named(self, function: object, *args: ast.expr | None) -> ast.Call:
        """A call of an object."""
        return call(load(self.name(function)), *args)

    def variable(self, walk: Walk, name: str) -> str:
        """The text's name of a variable of the code, as it is read on a path."""
        if name.startswith("_weft_"):
            return walk.temps.get(name) or self.stored_name(walk, name)
        if name in self._renamed or (name.isidentifier() and not keyword.iskeyword(name)):
            return self._renamed.get(name, name)
        self._renamed[name] = text = self.fresh(f"_{name.strip('.')}")
        self._temps.discard(text)
        return text

    def stored_name(self, walk: Walk, name: str) -> str:
        """The text's name of a variable that is stored to: each temporary is stored to once."""
        if not name.startswith("_weft_"):
            return self.variable(walk, name)
        walk.temps[name] = text = self.fresh(name.removeprefix("_weft_").rstrip("0123456789"))
        return text

    def fresh(self, base: str) -> str:
        """A new temporary, which the text may do without."""
        number, name = 0, base
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        self._temps.add(name)
        return name

    # ---- the operand stack

    def pop(self, walk: Walk) -> ast.expr:
        """Pop a value."""
        value = walk.stack.pop()
        if value is None:
            raise NotExpressible("a NULL as an operand")
        return value

    def pops(self, walk: Walk, count: int) -> list[ast.expr]:
        """Pop values, the lowest first."""
        return [self.pop(walk) for _ in range(count)][::-1]

    def is_pure(self, value: ast.expr | None) -> bool:
        """Whether an expression means the same after any statement but a store to it."""
        if isinstance(value, ast.Name):
            return value.id not in self.globals and value.id not in self.decoded.cells
        return value is None or isinstance(value, ast.Constant)

    def spill(self, walk: Walk, name: str = "", but_top: bool = False) -> None:
        """Evaluate the operands that a statement may change into temporaries, in their order.

        Args:
            walk: the path.
            name: a variable that the statement stores to.
            but_top: leave the top of the stack, which the statement takes.
        """
        for place, value in enumerate(walk.stack[: len(walk.stack) - but_top]):
            if value is None or (self.is_pure(value) and getattr(value, "id", None) != name):
                continue
            temp = self.fresh("value")
            walk.out.append(ast.Assign([store(temp)], value))
            walk.bound.add(temp)
            walk.stack[place] = load(temp)

    def assign(self, walk: Walk, name: str, value: ast.expr) -> None:
        """Write `name = value`, after what was evaluated before."""
        self.spill(walk, name=name)
        self.stored.add(name)
        walk.out.append(ast.Assign([store(name)], value))
        walk.bound.add(name)

    def write(self, walk: Walk, statement: ast.stmt) -> None:
        """Write a statement, after what was evaluated before."""
        self.spill(walk)
        walk.out.append(statement)
