"""Classes that the captured program makes, and the descriptors in them.

A made class has a real class behind it, so that the interpreter's own rules (method resolution
order, metaclass, slots) hold. What the namespace holds is put into it as stand-ins: real objects
that `Tracer.known` leads back to the values they stand for (see `class_statements`).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft_capture.breaks import Break, NotConstant
from weft_capture.values.base import Value
from weft_capture.values.functions import CellValue, ClassValue

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer


class MadeClass(ClassValue):
    """A class made during capture.

    Args:
        obj: the real class that stands for it.
        make: what makes the class again in generated code.
        args: its arguments; a dict for the namespace comes last, where there is one.
    """

    __slots__ = ("args", "cell", "init_subclass", "make", "namespace", "once")

    def __init__(
        self,
        obj: type,
        make: Callable[..., type],
        args: list[Value],
        namespace: dict[str, Value] | None = None,
    ) -> None:
        super().__init__(obj)
        self.make = make
        self.args = args
        self.namespace = namespace
        self.cell: CellValue | None = None
        self.init_subclass: Value | None = None
        # Making it ran code of the program, which must not run twice.
        self.once = False
        MADE[obj] = self

    def data(self, tx: Tracer) -> Any:
        raise NotConstant(self.describe())  # what runs now would run its stand-ins

    def reconstruct(self, out: Output) -> None:
        if self.once:
            raise Break("unsupported-value", f"making {self.describe()} again runs its hooks twice")
        writer = out.writer
        if self.cell is not None:
            self.cell.reconstruct_empty(out)
        writer.begin_call()
        writer.load_const(self.make)
        out.load_all(self.args)
        if self.namespace is not None:
            for name, value in self.namespace.items():
                writer.load_const(name)
                out.load(value)
            writer.build_map(len(self.namespace))
        writer.call(len(self.args) + (self.namespace is not None))


MADE: weakref.WeakKeyDictionary[type, MadeClass] = weakref.WeakKeyDictionary()
"""Real class -> the value of the class statement it came from."""


def load_class(out: Output, cls: type) -> None:
    """Push a class: the one itself, or a new one where the program made it in the frame."""
    made = MADE.get(cls)
    if made is None:
        out.writer.load_const(cls)
    else:
        out.load(made)


def build_class(
    name: str, bases: tuple[Any, ...], keywords: dict[str, Any], namespace: dict[str, Any]
) -> type:
    """Do what a class statement does after its body ran."""

    def fill(target: dict[str, Any]) -> None:
        for key, value in namespace.items():
            target[key] = value

    return types.new_class(name, bases, keywords, fill)


class DescriptorValue(Value):
    """A property, staticmethod or classmethod over functions of the program."""

    __slots__ = ("args", "kind")

    def __init__(self, kind: type, args: list[Value]) -> None:
        super().__init__(None)
        self.kind = kind
        self.args = args

    def python_type(self) -> type:
        return self.kind

    def hash_key(self) -> object:
        return self

    def getattr(self, tx: Tracer, name: str) -> Value:
        names = ("fget", "fset", "fdel", "__doc__") if self.kind is property else ("__func__",)
        if name in names[: len(self.args)]:
            return self.args[names.index(name)]
        if name == "__wrapped__" and self.kind is not property:
            return self.args[0]
        if self.kind is not property and name in ("__isabstractmethod__", "__name__", "__doc__"):
            return self.args[0].getattr(tx, name)
        return super().getattr(tx, name)

    def call(self, tx: Tracer, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if self.kind is not staticmethod:
            tx.raise_(TypeError, f"'{self.kind.__name__}' object is not callable")
        return self.args[0].call(tx, args, kwargs)

    def reconstruct(self, out: Output) -> None:
        out.call(self.kind, self.args)
