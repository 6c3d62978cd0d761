"""Entries: code that continues the inlined frames of a break .

An entry has the name, file, lines and exception handlers of an inlined function, and gets its live
variables and operand stack. The innermost entry runs the breaking instruction eagerly, each other
one calls the next entry; all continue in a resume function. They have no guards.
docs/architecture/capture-breaks.md has a figure.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from weft_capture import frame as hook
from weft_capture.bytecode import Decoded, Resume, Writer, decode, live_at, stack_name, state_at
from weft_capture.model.constant import NULL
from weft_capture.model.functions import CellValue
from weft_capture.model.protocol import Frame, Value
from weft_capture.output.eager_instruction import RealStep
from weft_capture.output.reconstruct import GRAPH_RESULT, Output

_INNER = "_weft_inner"
_MARK = ".<entry at "


Entry = tuple[types.CodeType, tuple[int | str, ...]]
"""An entry's code and what it is called with, as in `bytecode.Resume.args`."""


def is_entry(code: types.CodeType) -> bool:
    """Say whether this is an entry's code."""
    return _MARK in code.co_qualname


def entry_replacement(code: types.CodeType) -> types.CodeType | None:
    """Return the code that the frame hook runs for an entry.

    It equals the entry's own code, but ends the frame before the call of the resume function.
    """
    replacement: types.CodeType | None = decode(code).derived.get("replacement")
    if replacement is not None:
        hook.set_lookup(code, lambda *args: replacement)
    return replacement


def make_entry(
    decoded: Decoded, index: int, stack: tuple[bool, ...], bound: frozenset[str],
    keep: frozenset[str], inner: bool,
) -> Entry:  # fmt: skip
    """Return the entry at an instruction; with `inner` it calls another entry instead of it."""
    key = ("entry", index, stack, bound, keep, inner)
    entry: Entry | None = decoded.derived.get(key)
    if entry is None:
        args, shape = state_at(decoded, index, stack, bound, "entry")
        names = shape.varnames + ((_INNER,) if inner else ())
        shape = decoded.variant(names, (), shape.freevars, shape.qualname)

        def write(tail_call: Any) -> types.CodeType:
            writer = Writer(decoded, tail_call=tail_call, shape=shape)
            writer.at(decoded.instrs[index])
            names = [stack_name(i) if full else None for i, full in enumerate(stack)]
            writer.load_stack(names)
            for name in filter(None, names):  # only the stack refers to it
                writer.delete_local(name)
            stored = tuple(name for name in decoded.varnames if name in bound)
            step = RealStep(writer, decoded, stack, stored, keep)
            if inner:
                writer.begin_call()
                writer.load_const(hook.enter)
                writer.load_local(_INNER)
                writer.delete_local(_INNER)
                writer.call(1)
                step.returned(index)
            else:
                step.run(index)
            return writer.finish()

        entry = decoded.derived[key] = (write(None), args)
        decode(entry[0]).derived["entry of"] = (weakref.ref(decoded), key[1:])
        replacement = decode(entry[0]).derived["replacement"] = write(hook.tail_call)
        hook.skip(replacement)
    return entry


class InnerFrames:
    """Loads the inlined frames of a break and calls their entries.

    Args:
        out: the output; all values are loaded first, into temporaries.
        frames: the inlined frames, outermost first; the last one broke.
        whole: keep also the variables that nothing uses any more.
    """

    def __init__(self, out: Output, frames: Sequence[Frame], *, keep_all: bool = False) -> None:
        self._writer = out.writer
        # Outermost first, because loading a context manager enters its block again.
        self._loaded = [
            self._load(out, frame, frame is not frames[-1], keep_all) for frame in frames
        ]

    def _load(
        self, out: Output, frame: Frame, inner: bool, keep_all: bool
    ) -> tuple[types.CodeType, str, list[str], list[str]]:
        decoded = frame.decoded
        index = frame.ip - 1 if inner else frame.ip
        live = frozenset(frame.locals) if keep_all else live_at(decoded, index)
        keep = out.kept(frame.locals)
        bound = (live - decoded.cells).intersection(frame.locals) | keep
        stack = tuple(value is not NULL for value in frame.stack)
        code, args = make_entry(decoded, index, stack, bound, keep, inner)

        function = out.load_temp(frame.function)
        arguments = [out.load_temp(_argument(frame, arg)) for arg in args]
        # A comprehension that has not begun has no cell yet.
        cells = [out.load_temp(frame.cells.get(name) or CellValue()) for name in code.co_freevars]
        return code, function, arguments, cells

    def call(self) -> None:
        """Push the result of the outermost entry; `RealStep.returned` goes on."""
        writer = self._writer
        inner: list[str] = []
        for code, function, args, cells in reversed(self._loaded):
            self._push_function(code, function, cells)
            writer.load_stack(args + inner)
            writer.build_list(1 + len(args + inner))
            inner = [writer.temp()]
            writer.store_local(inner[0])
        writer.begin_call()
        writer.load_const(hook.enter)
        writer.load_local(inner[0])
        # The frame stays while the callee runs; it must not keep objects that the callee releases.
        writer.clear_temps(GRAPH_RESULT)
        writer.call(1)

    def _push_function(self, code: types.CodeType, function: str, cells: list[str]) -> None:
        writer = self._writer
        writer.begin_call()
        writer.load_const(continue_function)
        writer.load_local(function)
        writer.load_const(code)
        writer.load_stack(cells)
        writer.build_tuple(len(cells))
        writer.call(3)


def _argument(frame: Frame, arg: int | str) -> Value:
    if isinstance(arg, int):
        return frame.stack[arg]
    if arg in frame.locals:
        return frame.locals[arg]
    contents = frame.cells[arg].contents
    assert contents is not None
    return contents


def continue_function(
    function: types.FunctionType, code: types.CodeType, cells: tuple[types.CellType, ...]
) -> Callable[..., Any]:
    """Return a function of `code` with the globals and the name of `function`."""
    return types.FunctionType(code, function.__globals__, function.__name__, None, cells or None)


def from_the_start(decoded: Decoded) -> Resume:
    """Return the eager version of a frame: its code with flat arguments and the hook off."""
    key = "from the start"
    resume: Resume | None = decoded.derived.get(key)
    if resume is None:
        shape = decoded.variant(decoded.flat_args, (), (), decoded.qualname)
        code = decoded.code.replace(
            co_argcount=shape.argcount, co_posonlyargcount=0, co_kwonlyargcount=0,
            co_flags=shape.flags | decoded.flags & inspect.CO_NESTED,
        )  # fmt: skip
        hook.skip(code, True)
        resume = decoded.derived[key] = Resume(code, decoded.flat_args, (), 0)
        decode(code).derived["start of"] = weakref.ref(decoded)
    return resume
