"""Immutable data that differs from call to call: made by a real call, or varying from outside.

Capture knows the type of a `RuntimeValue` from an example (`hint`). It hands the value on, reads
attributes and compares. Where the value would decide what comes next, one from outside is fixed
with a guard, and the result of a real call breaks. Numbers of this kind are `SymFloatValue`s. A
`TextValue` is formatted where it is needed.
"""

from __future__ import annotations

import datetime
import random
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weft_core.tensor_versions import version_of
from weft_guards.sources import AttrSource, Builder, Names, RootSource, Source

from weft_capture.breaks import Break, NotConstant
from weft_capture.model.constant import Varying, constant, fold
from weft_capture.model.protocol import Output, Tracer, Value, current_tracer
from weft_capture.tensors.tensor import TensorValue

_READABLE = (datetime.date, datetime.time, uuid.UUID)  # their attributes never change


@dataclass(frozen=True, eq=False)
class RuntimeSource(RootSource):
    """The result of a real call, in a variable of the replacement code; `late`: after the graph."""

    name: str
    late: bool

    def render(self, base: str, names: Names) -> str:
        return self.name

    def emit(self, builder: Builder) -> None:
        builder.load_local(self.name)


def origins(source: Source | None) -> Iterable[RuntimeSource]:
    """Return results of real calls that a source is computed from, a late and an early one.

    No guard can read those. The source remembers them.
    """
    if source is None:
        return ()
    found: dict[bool, RuntimeSource] | None = source.__dict__.get("_origins")
    if found is None:
        found = {source.late: source} if isinstance(source, RuntimeSource) else {}
        for part in getattr(source, "arguments", (source.base,)):
            found |= {one.late: one for one in origins(part)}
        object.__setattr__(source, "_origins", found)
    return found.values()


def is_made(value: Value) -> bool:
    """Say whether a value is made anew in each call."""
    return any(origins(value.source))


@dataclass(eq=False)
class RuntimeValue(Varying):
    """An object other than a number that is made anew in each call, or differs between calls."""

    hint: Any
    source: Source | None = None

    def python_type(self) -> type:
        return type(self.hint)

    def as_constant(self) -> Any:
        """Fix the object to the present one with a guard, and return it."""
        if is_made(self):
            kind = self.python_type().__name__
            raise Break("data-dependent-value", f"a {kind} made in each call")
        assert self.source is not None
        current_tracer().guard_constant(self.source, self.hint)
        return self.hint

    def tp_iter(self, tx: Tracer) -> Value:
        return tx.literal(self.as_constant()).tp_iter(tx)

    def getattr_fallback(self, tx: Tracer, name: str) -> Value:
        found = getattr(self.hint, name, None)
        if is_made(self):
            if isinstance(self.hint, _READABLE) and isinstance(found, int | str):
                assert self.source is not None
                return tx.made(AttrSource(self.source, name), found)
        elif isinstance(found, int | float | str):
            return fold(tx, getattr, [self, constant(name)], {})
        elif not callable(found):
            return tx.literal(self.as_constant()).tp_getattro(tx, name)
        return super().getattr_fallback(tx, name)


class HandleNumber(RuntimeValue):
    """The number of a new handle of a hook: torch's dicts of hooks have it no other time."""

    def tp_hash(self) -> object:
        frame = current_tracer().frame
        module = "" if frame is None else str(frame.function.globals.get("__name__"))
        return self if module.startswith("torch.") else super().tp_hash()


@dataclass(eq=False)
class RandomValue(Value):
    """A `random.Random`: the replacement code does what it does (`functions.torch.randomness`)."""

    source: Source
    cls = random.Random


class Seen:
    """The tensors among values that are looked at later: they must be then as they are now.

    Args:
        number: only the number in them is looked at, not their history.

    Raises:
        Break: for a tensor whose text would show a history that compiled code does not have, or
            that a mode of the program would see.
    """

    def __init__(self, tx: Tracer, values: Iterable[Value], number: bool = False) -> None:
        self.tx = tx
        self.step = tx.steps.now
        self.tensors = [value for value in values if isinstance(value, TensorValue)]
        for tensor in self.tensors:
            made = tensor.real is None and tensor.fake.requires_grad and not number
            plain = type(tensor) is TensorValue and tensor.overlay is None
            if made or tx.transforms or tx.overrides.modes or not plain:
                raise Break("data-dependent-value", f"text of {tensor.describe()}")
        self.state = self._state()

    def _state(self) -> list[object]:
        fakes = [tensor.fake for tensor in self.tensors]
        return [self.tx.graph.writes(), *((version_of(fake), fake.requires_grad) for fake in fakes)]

    def check(self) -> None:
        """Break where a tensor has changed since; what looked at it should run for real."""
        if self.tensors and self._state() != self.state:
            what = "text of a tensor that is written to afterwards"
            raise Break("data-dependent-value", what, self.step)


@dataclass(eq=False)
class TextValue(Varying):
    """The text `function(*args)`, or another immutable object of a `cls`."""

    tx: Tracer
    function: Callable[..., Any]
    args: list[Value]
    number: bool = False
    cls: type = str

    def __post_init__(self) -> None:
        self.seen = Seen(self.tx, self.args, self.number)

    def as_constant(self) -> Any:
        if self.seen.tensors:
            raise NotConstant("the text of a tensor")
        return self.function(*[arg.as_constant() for arg in self.args])

    def reconstruct(self, out: Output) -> None:
        self.seen.check()
        out.call(self.function, self.args)


def joined(tx: Tracer, parts: list[Value]) -> Value:
    """Put the pieces of an f-string together."""
    if all(part.is_constant() for part in parts):
        return constant("".join(part.as_constant() for part in parts))
    return TextValue(tx, _join, parts)


def _join(*parts: str) -> str:
    return "".join(parts)
