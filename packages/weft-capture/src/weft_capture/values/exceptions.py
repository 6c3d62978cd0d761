"""Exceptions that the user's program makes, raises and catches during capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weft_capture.breaks import Break
from weft_capture.values.base import MutableValue, Value, method
from weft_capture.values.constant import NONE, constant

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output
    from weft_capture.tracer import Tracer
    from weft_guards.sources import Source


class ExceptionValue(MutableValue):
    """An exception instance made during capture."""

    __slots__ = ("args", "attributes", "cls")

    def __init__(self, cls: type, args: list[Value], source: Source | None = None) -> None:
        super().__init__(source)
        self.cls = cls
        self.args = args
        self.attributes: dict[str, Value] = {}

    def python_type(self) -> type:
        return self.cls

    def describe(self) -> str:
        return f"{self.cls.__name__}({', '.join(arg.describe() for arg in self.args)})"

    def snapshot(self) -> Callable[[], None]:
        saved_args, saved = list(self.args), dict(self.attributes)

        def restore() -> None:
            self.args, self.attributes = saved_args, saved

        return restore

    def truth(self, tx: Tracer) -> bool:
        return True

    def hash_key(self) -> object:
        return self

    def getattr(self, tx: Tracer, name: str) -> Value:
        if name in self.attributes:
            return self.attributes[name]
        if name == "args":
            return tx.tuple_of(self.args)
        if name in ("__context__", "__cause__", "__traceback__"):
            return NONE
        if name == "value" and issubclass(self.cls, StopIteration):
            return self.args[0] if self.args else NONE
        if name == "__class__":
            return tx.const_object(self.cls)
        return tx.class_attribute(self, self.cls, name)

    def setattr(self, tx: Tracer, name: str, value: Value) -> None:
        tx.mutate(self)
        if name == "args":
            self.args = value.unpack(tx)
        else:
            self.attributes[name] = value

    def reconstruct(self, out: Output) -> None:
        writer = out.writer
        writer.begin_call()
        writer.load_const(self.cls.__new__)
        writer.load_const(self.cls)
        out.load_all(self.args)
        writer.call(1 + len(self.args))
        for name, value in {"args": None, **self.attributes}.items():
            writer.dup()
            if value is None:
                out.load_all(self.args)
                writer.build_tuple(len(self.args))
            else:
                out.load(value)
            writer.swap(2)
            writer.store_attr(name)


@method(ExceptionValue, "__init__")
def _init(tx: Tracer, self: ExceptionValue, *args: Value) -> Value:
    tx.mutate(self)
    self.args = list(args)
    return NONE


@method(ExceptionValue, "with_traceback")
def _with_traceback(tx: Tracer, self: ExceptionValue, traceback: Value) -> Value:
    return self


@method(ExceptionValue, "__str__")
def _str(tx: Tracer, self: ExceptionValue) -> Value:
    try:
        real_args = [arg.as_constant() for arg in self.args]
    except Exception:
        raise Break("unsupported-value", "text of an exception over tensors") from None
    return constant(str(self.cls(*real_args)))
