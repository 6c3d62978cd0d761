"""Immutable data that differs between calls: results of deferred calls, and varying inputs.

Capture knows the type of a `RuntimeValue` from an example (`hint`). It passes the value on, reads
its attributes and compares it. Where control flow depends on the value, an input is fixed with a
guard, and the result of a deferred call breaks the graph. Such numbers are `SymFloatValue`s. A
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
from weft_capture.model.constant import Constant, Varying, constant, fold
from weft_capture.model.protocol import Operator, Output, Tracer, Value, current_tracer
from weft_capture.tensors.tensor import TensorValue

_READABLE = (datetime.date, datetime.time, uuid.UUID)  # their attributes never change


@dataclass(frozen=True, eq=False)
class RuntimeSource(RootSource):
    """The result of a deferred call, a local of the new code; `late`: known after the graph."""

    name: str
    late: bool

    def render(self, base: str, names: Names) -> str:
        return self.name

    def emit(self, builder: Builder) -> None:
        builder.load_local(self.name)


def origins(source: Source | None) -> Iterable[RuntimeSource]:
    """Return the deferred results, at most a late and an early one, that a source depends on.

    No guard can read them. The source caches them.
    """
    if source is None:
        return ()
    by_time: dict[bool, RuntimeSource] | None = source.__dict__.get("_origins")
    if by_time is None:
        by_time = {source.late: source} if isinstance(source, RuntimeSource) else {}
        for argument in getattr(source, "arguments", (source.base,)):
            by_time |= {origin.late: origin for origin in origins(argument)}
        object.__setattr__(source, "_origins", by_time)
    return by_time.values()


def is_runtime(value: Value) -> bool:
    """Say whether a value is the result of a deferred call."""
    return any(origins(value.source))


class VaryingObject(Varying):
    """Data other than a number; texts among it are joined when the program runs."""

    def nb_binary(
        self, tx: Tracer, op: Operator, left: Value, right: Value, inplace: bool
    ) -> Value | None:
        if left.python_type() is right.python_type() is str and op.symbol == "+":
            return join_texts(tx, [left, right])
        operands = (left, right)
        if all(isinstance(value, RuntimeValue | Constant) for value in operands):
            return fold(tx, op.inplace if inplace and op.inplace else op.function, [*operands], {})
        return None


@dataclass(eq=False)
class RuntimeValue(VaryingObject):
    """An object, no number, that a deferred call returns or that differs between calls."""

    hint: Any
    source: Source | None = None

    def python_type(self) -> type:
        return type(self.hint)

    def as_constant(self) -> Any:
        """Fix the object to the present one with a guard, and return it."""
        if is_runtime(self):
            type_name = self.python_type().__name__
            raise Break("data-dependent-value", f"a {type_name} that differs in each call")
        assert self.source is not None
        current_tracer().guard_constant(self.source, self.hint)
        return self.hint

    def tp_iter(self, tx: Tracer) -> Value:
        return tx.literal(self.as_constant()).tp_iter(tx)

    def getattr_fallback(self, tx: Tracer, name: str) -> Value:
        attribute = getattr(self.hint, name, None)
        if is_runtime(self):
            if isinstance(self.hint, _READABLE) and isinstance(attribute, int | str):
                assert self.source is not None
                return tx.runtime_value(AttrSource(self.source, name), attribute)
        elif isinstance(attribute, int | float | str):
            return fold(tx, getattr, [self, constant(name)], {})
        elif not callable(attribute):
            return tx.literal(self.as_constant()).tp_getattro(tx, name)
        return super().getattr_fallback(tx, name)


class HandleNumber(RuntimeValue):
    """The id of a new hook handle, which is a new key in torch's dicts of hooks."""

    def tp_hash(self) -> object:
        frame = current_tracer().frame
        module = "" if frame is None else str(frame.function.globals.get("__name__"))
        return self if module.startswith("torch.") else super().tp_hash()


@dataclass(eq=False)
class RandomValue(Value):
    """A `random.Random`, whose draws are deferred calls (`functions.torch.randomness`)."""

    source: Source
    cls = random.Random


class TensorSnapshot:
    """The tensors among arguments of a deferred call: they must not change until it runs.

    Args:
        number: the call reads only their value, not their `grad_fn`.

    Raises:
        Break: for a tensor whose text shows a `grad_fn` that compiled code does not have, or that
            a function mode would see.
    """

    def __init__(self, tx: Tracer, values: Iterable[Value], number: bool = False) -> None:
        self.tx = tx
        self.step = tx.steps.now
        self.tensors = [value for value in values if isinstance(value, TensorValue)]
        for tensor in self.tensors:
            intermediate = tensor.real is None and tensor.fake.requires_grad and not number
            plain = type(tensor) is TensorValue and tensor.overlay is None
            if intermediate or tx.transforms or tx.overrides.modes or not plain:
                raise Break("data-dependent-value", f"text of {tensor.describe()}")
        self.state = self._state()

    def _state(self) -> list[object]:
        fakes = [tensor.fake for tensor in self.tensors]
        return [self.tx.graph.writes(), *((version_of(fake), fake.requires_grad) for fake in fakes)]

    def check(self) -> None:
        """Break where a tensor has changed since; the call should run eagerly."""
        if self.tensors and self._state() != self.state:
            detail = "text of a tensor that is written to afterwards"
            raise Break("data-dependent-value", detail, self.step)


@dataclass(eq=False)
class TextValue(VaryingObject):
    """The text `function(*args)`, or another immutable object of a `cls`."""

    tx: Tracer
    function: Callable[..., Any]
    args: list[Value]
    number: bool = False
    cls: type = str

    def __post_init__(self) -> None:
        self.snapshot = TensorSnapshot(self.tx, self.args, self.number)

    def as_constant(self) -> Any:
        if self.snapshot.tensors:
            raise NotConstant("the text of a tensor")
        return self.function(*[arg.as_constant() for arg in self.args])

    def reconstruct(self, out: Output) -> None:
        self.snapshot.check()
        out.call(self.function, self.args)


def join_texts(tx: Tracer, texts: list[Value]) -> Value:
    """Join the parts of an f-string."""
    if all(text.is_constant() for text in texts):
        return constant("".join(text.as_constant() for text in texts))
    return TextValue(tx, _join, texts)


def _join(*texts: str) -> str:
    return "".join(texts)
