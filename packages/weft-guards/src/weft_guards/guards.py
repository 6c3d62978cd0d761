"""What must hold of values for compiled code to be right. The table `KINDS` is all of it.

A `Guard` is a source, a kind, a payload (what was seen) and the user's stack. A kind is one row:
what it means, how to make its payload from a live value, the Python condition that tests it, and
what to tell a user when it fails. Conditions only read; none runs the user's code, given that
types are guarded before what is read from them (`check` orders guards so).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from weft_core.errors import UserStack

from weft_guards.payloads import DictKeys, TensorSpec, WeakIdentity, name_of, same_constant
from weft_guards.sources import DictSource, ProgramSource, Source, is_literal
from weft_guards.state import TorchState


class Bind(Protocol):
    """Gives an object a name in the namespace of a compiled check."""

    def const(self, value: object) -> str:
        """Return the name of an object."""


Test = Callable[[Sequence[str], Any, Bind], str]


# ---- conditions: (expressions of the guard's values, payload, bind) -> Python text


def _test_type(x: Sequence[str], cls: WeakIdentity, bind: Bind) -> str:
    return f"type({x[0]}) is {_identity_text(cls, bind)}"


def _test_id(x: Sequence[str], identity: WeakIdentity, bind: Bind) -> str:
    # A dead reference gives None, and the value may be None by now.
    return (
        f"{x[0]} is {_identity_text(identity, bind)}{'' if identity.immortal else ' is not None'}"
    )


def _identity_text(identity: WeakIdentity, bind: Bind) -> str:
    """Name an object, or the call that gets it from its weak reference."""
    return f"{bind.const(identity.handle)}{'' if identity.immortal else '()'}"


def _test_const(x: Sequence[str], value: Any, bind: Bind) -> str:
    if value is None or isinstance(value, bool) or value is Ellipsis:
        return f"{x[0]} is {value!r}"
    if type(value) in (int, str, bytes):
        return f"type({x[0]}) is {type(value).__name__} and {x[0]} == {value!r}"
    if type(value) is float and value not in (0.0, math.inf, -math.inf) and value == value:
        return f"type({x[0]}) is float and {x[0]} == {value!r}"
    return f"{bind.const(same_constant)}({x[0]}, {bind.const(value)})"


def _test_payload(x: Sequence[str], payload: Any, bind: Bind) -> str:
    return f"{bind.const(payload)}.holds({', '.join(x)})"


def _test_grad_mode(x: Sequence[str], enabled: bool, bind: Bind) -> str:
    return f"{bind.const(torch.is_grad_enabled)}() is {enabled}"


def _constant(value: Any) -> Any:
    """Refuse what cannot be compared for sure; identity guards are for such values."""
    if not _is_constant(value):
        raise TypeError(f"a {type(value).__name__} is no constant: guard its identity or its parts")
    return value


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    plain = (torch.dtype, torch.device, torch.layout, torch.memory_format)
    return is_literal(value) or isinstance(value, plain) or type(value) is range


def _as(kind: type, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Prepare a payload with `make`, unless it is prepared already."""
    return lambda value: value if isinstance(value, kind) else make(value)


# ---- the table


@dataclass(frozen=True)
class KindSpec:
    """One kind of guard."""

    means: str  # with {x} for the source and {p} for the payload
    prepare: Callable[[Any], Any]  # live value -> payload
    test: Test
    remedy: str  # what a user can do when it fails


_STABLE = "keep it the same between calls, or make it a tensor"
_TWICE = "always or never pass the same object twice"
_MODE = "call under one setting, or expect one compilation per setting"
KINDS: dict[str, KindSpec] = {
    # kind                 meaning                     payload from       condition
    "TYPE": KindSpec(
        "type({x}) is {p}", _as(WeakIdentity, WeakIdentity), _test_type, "pass values of one type"
    ),
    "ID": KindSpec(
        "{x} is {p}", _as(WeakIdentity, WeakIdentity), _test_id, "pass the same object at each call"
    ),
    "NONE": KindSpec(
        "{x} is None", lambda _: None, lambda x, p, b: f"{x[0]} is None",
        "always or never pass None",
    ),
    "CONST": KindSpec("{x} == {p!r}", _constant, _test_const, _STABLE),
    "TENSOR": KindSpec(
        "{x} is a {p}", _as(TensorSpec, TensorSpec.of), _test_payload,
        "keep dtype, device and requires_grad; for sizes call mark_dynamic(tensor, dim) "
        "or compile with dynamic=True",
    ),
    "LEN": KindSpec(
        "len({x}) == {p}", int, lambda x, p, b: f"len({x[0]}) == {p}", "keep the length the same"
    ),
    "DICT_KEYS": KindSpec(
        "list({x}) == {p}", _as(DictKeys, DictKeys.of), _test_payload,
        "keep the keys and their order",
    ),
    "ATTR_ABSENT": KindSpec(
        "{p!r} not in {x}.__dict__", str, lambda x, p, b: f"{p!r} not in {x[0]}",
        "set attributes before compiling",
    ),
    "KEY_ABSENT": KindSpec(
        "{p!r} not in {x}", _constant, lambda x, p, b: f"{b.const(p)} not in {x[0]}",
        "keep the keys the same",
    ),
    "ALIAS": KindSpec(
        "{x} is {p}", lambda s: s, lambda x, p, b: f"{x[0]} is {x[1]}",
        _TWICE,
    ),
    "DISTINCT": KindSpec(
        "{x} is not {p}", lambda s: s, lambda x, p, b: f"{x[0]} is not {x[1]}", _TWICE
    ),
    "MEMORY": KindSpec(
        "what is written ({p}) shares memory with other inputs or not as before", lambda use: use,
        _test_payload, "always or never pass tensors that share memory",
    ),
    "SHAPE": KindSpec(
        "{p}", lambda s: s, lambda x, p, b: p.template.format(*x),
        "sizes outside what was assumed are compiled again; WEFT_LOGS=dynamic shows why",
    ),
    "CELL_EMPTY": KindSpec(
        "{x} is an empty cell", lambda _: None, lambda x, p, b: f"{b.const(is_empty)}({x[0]})",
        "assign the variable before or after, not in between",
    ),
    "CLASS": KindSpec(
        "{x} has the same {p}", lambda use: use, _test_payload,
        "change classes before compiling, or call weft.reset()",
    ),
    "NAMESPACE": KindSpec(
        "{x} has the same {p}", lambda use: use, _test_payload,
        "replace functions of a library before compiling, or expect one compilation for each",
    ),
    "GRAD_MODE": KindSpec("grad mode is {p}", bool, _test_grad_mode, _MODE),
    "GLOBAL_STATE": KindSpec(
        "torch state: {p}", _as(TorchState, lambda _: TorchState.now()), _test_payload, _MODE
    ),
}  # fmt: skip


def is_empty(cell: Any) -> bool:
    """Say whether a closure cell (the cell, not its contents) holds nothing."""
    try:
        cell.cell_contents  # noqa: B018 - reading it is the question
    except ValueError:
        return True
    return False


@dataclass(frozen=True)
class Guard:
    """One thing that must hold; equal guards are the same whatever code asked for them."""

    source: Source
    kind: str
    payload: Any = None
    user_stack: UserStack = field(default=(), compare=False, repr=False)

    @staticmethod
    def of(source: Source, kind: str, value: Any = None, user_stack: UserStack = ()) -> Guard:
        """Make a guard from a live value.

        Raises:
            KeyError: for an unknown kind.
            TypeError: when the kind cannot guard such a value without keeping it alive.
        """
        return Guard(source, kind, KINDS[kind].prepare(value), tuple(user_stack))

    def sources(self) -> tuple[Source, ...]:
        """Return the sources whose values the condition needs, in the order of its arguments."""
        if self.kind == "SHAPE":
            return tuple(self.payload.sources)
        if self.kind in ("ALIAS", "DISTINCT"):
            return (self.source, self.payload)
        if self.kind == "MEMORY":
            return (*self.payload.written, *self.payload.read)
        if self.kind == "ATTR_ABSENT":
            return (DictSource(self.source),)
        return (self.source,)

    def identities(self) -> list[WeakIdentity]:
        """Return the objects whose death makes this guard fail for ever."""
        payload = self.payload
        root = self.source if self.source.base is None else self.source.base
        if isinstance(root, ProgramSource):
            payload = root.identity
        if isinstance(payload, TensorSpec):
            payload = payload.cls
        found = payload.identities if isinstance(payload, DictKeys) else [payload]
        return [one for one in found if isinstance(one, WeakIdentity) and not one.immortal]

    def __str__(self) -> str:
        means, name = KINDS[self.kind].means, self.source.expr()
        try:
            return means.format(x=name, p=self.payload)
        except ValueError:  # a number of too many digits
            return means.replace("!r", "").format(x=name, p=name_of(self.payload))


class GuardSet(dict[Guard, None]):
    """Guards in the order they were added, each once."""

    def add(
        self, source: Source, kind: str, value: Any = None, user_stack: UserStack = ()
    ) -> Guard:
        """Add a guard made from a live value (see `Guard.of`); returns it."""
        guard = Guard.of(source, kind, value, user_stack)
        self.setdefault(guard)
        return guard

    def __str__(self) -> str:
        return "\n".join(f"{guard.kind:<12} {guard}" for guard in self)
