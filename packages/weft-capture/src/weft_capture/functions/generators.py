"""Generators of the program: frames that run up to the next yield.

A started generator that is live after a graph break becomes a real one, whose code begins at
the current yield (`bytecode.make_resume`).
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft_capture.breaks import Break
from weft_capture.bytecode import make_resume
from weft_capture.model.constant import NONE, NULL, constant
from weft_capture.model.containers import TupleValue
from weft_capture.model.contexts import AutocastContext
from weft_capture.model.exceptions import (
    ExceptionValue,
    chain,
    generator_error,
)
from weft_capture.model.functions import FunctionValue
from weft_capture.model.iterators import CombinedIterator, Iterated, IteratorValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Frame, Kwargs, MethodOf, Output, Raised, Tracer, Value
from weft_capture.python_compat import CLOSE_RETURNS


@dataclass(eq=False)
class GeneratorValue(IteratorValue):
    """A generator; `frame` is None when it has ended.

    For a polyfill `cls` is the class of the original and `made_by` the original callable.
    """

    several = True

    frame: Frame | None
    function: FunctionValue
    args: list[Value]
    kwargs: Kwargs
    started: bool = False
    running: bool = False
    failed: bool = False  # a polyfill whose original goes on after an error
    resumes: Sequence[Value] = ()  # what the original asks again after the end
    returned: Value | None = None
    created_by: Any = None

    def __post_init__(self) -> None:
        self.module = self.function.globals.get("__name__")
        self.cls = types.GeneratorType

    def snapshot(self) -> Callable[[], None]:
        frame, saved = self.frame, self.__dict__.copy()
        if frame is None:
            state = None
        else:
            state = (frame.stack.copy(), frame.locals.copy(), frame.ip, frame.exception)

        def restore() -> None:
            self.__dict__.update(saved, running=False)
            if frame is not None and state is not None:
                frame.stack, frame.locals, frame.ip, frame.exception = state
                frame.result = None

        return restore

    def tp_iter(self, tx: Tracer) -> Value:
        return self

    def tp_iternext(self, tx: Tracer) -> Value | None:
        return self.send(tx, NONE)

    def send(self, tx: Tracer, value: Value) -> Value | None:
        """Run to the next yield; None when the generator returned (its value in `returned`)."""
        frame = self.frame
        if frame is None:
            if self.failed or any(map(_is_user_code, self.resumes)):
                raise self._needs_original(tx)
            self.returned = None
            return None
        if not self.started and value is not NONE:
            tx.raise_(TypeError, "can't send non-None value to a just-started generator")
        self._enter(tx)
        if self.started:
            frame.stack.append(value)
        self.started = True
        return self._run(tx, frame)

    def throw(self, tx: Tracer, error: Value) -> Value | None:
        """Raise `error` at the current yield, and run to the next yield."""
        frame = self.frame
        if frame is None or not self.started:
            tx.journal.touch(self)
            self.frame = None
            raise Raised(chain(tx, error, None))
        self._enter(tx)
        inner = frame.delegate()
        ends = issubclass(error.python_type(), GeneratorExit)
        name = "close" if ends else "throw"
        try:
            if isinstance(inner, GeneratorValue) and not ends:
                item = inner.throw(tx, error)
                if item is not None:
                    self.running = False
                    return item
                frame.end_delegation(inner)
                return self._run(tx, frame)
            inner_type = type(None) if inner is None else inner.python_type()
            if hasattr(inner_type, "__getattr__") or (hasattr(inner_type, name) and not ends):
                raise Break("generator", f"{name} of an iterator that is not a generator")
            if inner is not None and hasattr(inner_type, name):
                inner.call_method(tx, name, [], {})
        except Raised as raised:
            error = raised.value
        return self._run(tx, frame, error)

    def close(self, tx: Tracer) -> Value:
        """Do what `close` does; from 3.13 it returns the generator's return value."""
        if self.frame is None or not self.started:
            tx.journal.touch(self)
            self.frame = self.returned = None
            return NONE
        try:
            item = self.throw(tx, chain(tx, ExceptionValue(GeneratorExit, [])))
        except Raised as raised:
            if issubclass(raised.value.python_type(), GeneratorExit | StopIteration):
                return NONE
            raise
        if item is not None:
            tx.raise_(RuntimeError, "generator ignored GeneratorExit")
        return (self.returned or NONE) if CLOSE_RETURNS else NONE

    def _needs_original(self, tx: Tracer) -> Break:
        """Return a break where an iterator of the library was made.

        Those in C go on after an error, and hand on the StopIteration of what they call.
        """
        detail = f"a {self.cls.__name__} around code that raises"
        return Break("generator", detail, tx.steps.restart_step_of(self))

    def _enter(self, tx: Tracer) -> None:
        if self.running:
            tx.raise_(ValueError, "generator already executing")
        tx.journal.touch(self)
        self.running = True

    def _run(self, tx: Tracer, frame: Frame, error: Value | None = None) -> Value | None:
        try:
            if error is not None:
                error = chain(tx, error, frame.exception)
                if not frame.unwind(error, frame.instr):
                    raise Raised(error)
            item = frame.run()
        except Raised as raised:
            self.frame = None
            self.failed = self.module == "weft_capture.polyfills"
            if self.failed and issubclass(raised.value.python_type(), StopIteration):
                raise self._needs_original(tx) from None
            raise Raised(generator_error(tx, raised.value)) from None
        finally:
            self.running = False
        if frame.result is None:
            return item
        self.frame = None
        self.returned = item
        return None

    # ---- behind a graph break

    def check(self, tx: Tracer, out: Output) -> None:
        """Break at its creation if the interpreter would run code when it is dropped."""
        frame = self.frame
        if frame is None or self in out.rebuilt():
            return
        unwinds = self.started and frame.decoded.unwinds(frame.instr)
        if unwinds and not self._ends_silently(tx):
            detail = "a generator that has not ended is dropped"
            raise Break("generator", detail, tx.steps.restart_step_of(self))

    def _ends_silently(self, tx: Tracer) -> bool:
        """Say whether closing it has no side effects."""
        from weft_capture.effects.rehearsals import isolated  # noqa: PLC0415 - import cycle

        born, self.born = self.born, sys.maxsize  # its own state is not visible outside
        try:
            with isolated(tx, "closing") as nodes:
                self.close(tx)
        except Break:
            return False
        finally:
            self.born = born
        return not nodes

    def reconstruct(self, out: Output) -> None:
        plain, reason = self.cls is types.GeneratorType, self._unrebuildable_reason(out)
        if self.module == "weft_capture.polyfills":
            default = "may have had another name" if plain else ""
            reason = "has started" if self.started or self.cls in _INNER else default
        if reason:
            text = f"a generator that {reason} is needed after a graph break"
            raise Break("generator", text)
        frame, name = self.frame, self.function.name
        if frame is not None and not self.started:
            out.call(self.function if plain else self.created_by, self.args, self.kwargs)
            return
        names = [constant(name.rpartition(".")[2]), constant(name), constant(frame is None)]
        if frame is None:
            out.call(
                resumed_generator,
                [constant(_generator.__code__), constant({}), TupleValue([]), *names],
            )
            return
        state = [*frame.stack, NONE]  # the value sent to the current yield
        present = [value is not NULL for value in state]
        keep = out.kept(frame.locals)
        resume = make_resume(frame.decoded, frame.ip - 1, present, tuple(frame.locals), keep)
        variables = {cell: value.contents for cell, value in frame.cells.items()} | frame.locals
        arguments: list[Any] = [
            state[a] if isinstance(a, int) else variables[a] for a in resume.args
        ]
        cells = TupleValue([frame.cells[name] for name in resume.code.co_freevars])
        made_of = [constant(resume.code), constant(self.function.globals), cells]
        out.call(resumed_generator, [*made_of, *names, *arguments])

    def _unrebuildable_reason(self, out: Output) -> str:
        """Return a reason why no real generator can be created, or an empty text."""
        frame = self.frame
        if self.function.attributes:
            return "may have had another name"
        if frame is None or not self.started:
            return ""
        if self.running or frame.exception is not None:
            return "runs or handles an exception"
        owners = [value.owner for value in frame.stack if isinstance(value, MethodOf)]
        if any(isinstance(owner, AutocastContext) and owner.real is not None for owner in owners):
            return "is inside of a block that changes the graph's mode"
        return ""


def _is_user_code(iterator: Value) -> bool:
    """Say whether a step of an iterator that has ended may run code of the program."""
    inner: Sequence[Value] = getattr(iterator, "resumes", ())
    if isinstance(iterator, CombinedIterator):
        inner = iterator.inner
    return isinstance(iterator, UserObject | Iterated) or any(map(_is_user_code, inner))


def make_generator(
    frame: Frame, function: FunctionValue, args: list[Value], kwargs: Kwargs
) -> GeneratorValue:
    """Return the generator of a call; `frame` is its frame."""
    tx = frame.tx
    if frame.decoded.flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise Break("async", function.describe())
    generator = GeneratorValue(frame, function, args, kwargs)
    tx.watch(generator)
    return generator


def resumed_generator(
    code: types.CodeType, global_dict: dict[str, Any], cells: tuple[types.CellType, ...],
    name: str, qualname: str, ended: bool, *state: object,
) -> Any:  # fmt: skip
    """Return a generator of `code` that has ended, or has run to its first yield."""
    generator: Any = types.FunctionType(code, global_dict, name, None, cells or None)(*state)
    generator.__name__, generator.__qualname__ = name, qualname
    if ended:
        generator.close()
    else:
        generator.send(None)
    return generator


def _generator() -> Any:
    yield


TEE: type = type(itertools.tee(())[0])
CALLS: type = type(iter(int, 1))
_INNER = (reversed, TEE)  # whose constructor takes fewer arguments
