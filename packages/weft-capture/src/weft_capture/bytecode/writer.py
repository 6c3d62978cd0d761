"""`Writer`: emit the code of a transformed frame without knowing the CPython version.

The methods are the vocabulary as verbs. The new code takes the original frame's arguments as
positionals in flat order, has the original's free variables, and makes cells for those of the
original's cell variables that it hands to closures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

from weft_capture.python_compat import PY312, PY313

from .encode import assemble
from .instr import (
    NULL_BELOW,
    Cover,
    Decoded,
    FrameShape,
    Instr,
    Item,
    Label,
    Op,
    Positions,
    program_of,
    prologue_of,
)
from .liveness import reachable
from .resume import Resume, restore_unbound, stack_name

_CELL_OPS = frozenset({"LOAD_CLOSURE", "LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "MAKE_CELL"})
_FAST_OPS = frozenset({"LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR"})


# ---- makers of the Writer's verbs: what they emit, and by how much they change the stack's depth


def _plain(opname: str, effect: int, arg: int = 0) -> Callable[[Writer], None]:
    return lambda writer: writer._emit(opname, effect, arg)


def _named(opname: str, effect: int) -> Callable[[Writer, str], None]:
    return lambda writer, name: writer._emit(opname, effect, argval=name)


def _counted(opname: str, effect: int, each: int = 0) -> Callable[[Writer, int], None]:
    """The verb of an opcode with a number, which adds to the effect `each` times."""
    return lambda writer, count: writer._emit(opname, effect + each * count, arg=count)


def _jump(opname: str, effect: int) -> Callable[[Writer, Label], None]:
    return lambda writer, label: writer._emit(opname, effect, jump=label)


class Writer:
    """Assembles the code that replaces a frame; the methods are the vocabulary as verbs."""

    def __init__(
        self, decoded: Decoded, *, tail_call: Any = None, shape: FrameShape | None = None
    ) -> None:
        """Start code for a frame of `decoded`.

        `tail_call(func, *args)` makes what the frame hook takes as "return func(*args)"; with
        None, `call_resume` emits a plain nested call. `shape` is for code that is entered in
        the middle of the frame.
        """
        self._decoded = decoded
        self._shape = shape or decoded.variant(
            decoded.flat_args, decoded.cellvars, decoded.freevars, decoded.qualname
        )
        self._tail_call = tail_call
        self._items: list[Item] = []
        self._depth = 0
        self._calls: list[list[int]] = []  # [depth at begin_call, place of the NULL]
        self._handlers: dict[int, Label] = {}
        self._tail: list[Item] = []  # code after the last return
        self._temps: list[str] = []
        line = decoded.firstlineno
        self._positions: Positions = (line, line, None, None)

    # Variables.
    load_local = _named("LOAD_VAR", 1)  # a cell variable's contents
    store_local = _named("STORE_VAR", -1)
    delete_local = _named("DELETE_VAR", 0)  # raises at run time when it is unbound
    load_global = _named("LOAD_GLOBAL", 1)
    load_cell = _named("LOAD_DEREF", 1)  # the contents
    load_closure = _named("LOAD_CLOSURE", 1)  # the cell itself

    # Attributes, items.
    load_attr = _named("LOAD_ATTR", 0)
    binary_subscr = _plain("BINARY_SUBSCR", -1)

    # Containers, of values from the stack.
    build_tuple = _counted("BUILD_TUPLE", 1, -1)
    build_list = _counted("BUILD_LIST", 1, -1)
    build_map = _counted("BUILD_MAP", 1, -2)
    build_slice = _counted("BUILD_SLICE", 1, -1)

    # The stack; places count from the top, which is 1.
    pop = _plain("POP_TOP", -1)
    dup = _plain("COPY", 1, 1)
    swap = _counted("SWAP", 0)
    push_null = _plain("PUSH_NULL", 1)  # to rebuild a stack that holds one; calls do not need it

    # Control flow.
    jump = _jump("JUMP", 0)
    pop_jump_if_false = _jump("POP_JUMP_IF_FALSE", -1)
    pop_jump_if_not_none = _jump("POP_JUMP_IF_NOT_NONE", -1)
    return_ = _plain("RETURN_VALUE", -1)
    raise_ = _plain("RAISE_VARARGS", -1, 1)

    def temp(self) -> str:
        """A fresh variable name."""
        name = f"_weft_temp{len(self._temps)}"
        self._temps.append(name)
        return name

    def store_cell(self, name: str) -> None:
        """Store the cell on the stack as the cell of a variable."""
        self._emit("STORE_FAST", -1, argval=name)

    def clear_temps(self, *names: str) -> None:
        """Unbind the temporaries and some variables."""
        for name in (*self._temps, *names):
            self.load_const(None)  # it may be unbound
            self.store_local(name)
            self.delete_local(name)

    def load_stack(self, names: Sequence[str | None]) -> None:
        """Push variables, bottom first; None stands for a NULL."""
        for name in names:
            if name is None:
                self.push_null()
            else:
                self.load_local(name)

    def load_const(self, value: object) -> None:
        """Push any object; the code object keeps it alive."""
        if type(value) is str and f"_{value}".isidentifier() and sys.intern(value) is not value:
            # A code object would intern the string, and hold another object.
            self.load_const([value])
            self.load_const(0)
            self.binary_subscr()
            return
        self._emit("LOAD_CONST", 1, argval=value)

    # Calls.

    def begin_call(self) -> None:
        """Announce that the next value pushed is a callable."""
        if NULL_BELOW:
            self._items.append(Op("PUSH_NULL", positions=self._positions))
        self._calls.append([self._depth, -1])

    def call(self, count: int, kwnames: tuple[str, ...] = ()) -> None:
        """Call what followed `begin_call` with `count` arguments, the last ones by keyword."""
        self._place_null(count)
        self._emit("CALL", -count, arg=count, argval=kwnames)

    def replacing(self, index: int) -> None:
        """Handle what the last instruction raises as the original does at instruction `index`."""
        op = self._items[-1]
        assert isinstance(op, Op)
        op.cover = self._cover(self._decoded.instrs[index])

    def cover(self, start: int, clean_up: Callable[[], None]) -> None:
        """Clean up when the code written since `start` (a `position()`) raises.

        `clean_up` writes code that leaves the stack as it is.
        """

        def handler() -> None:
            clean_up()
            self.reraise()

        self.catch(start, handler)

    def catch(self, start: int, handler: Callable[[], None]) -> None:
        """Add a handler for the code written since `start`.

        `handler` writes code that begins with the exception on the stack, and does not return.
        """
        cover = Cover(Label(), 0, False)
        for item in self._items[start:]:
            if isinstance(item, Op) and item.cover is None:
                item.cover = cover
        before, depth = self._items, self._depth
        self._items, self._depth = [cover.label], 1
        handler()
        self._tail += self._items
        self._items, self._depth = before, depth

    def reraise(self) -> None:
        """Raise the exception on the stack, with its traceback."""
        self._emit("RERAISE", -1)

    def position(self) -> int:
        """The position of the next instruction."""
        return len(self._items)

    def _place_null(self, count: int) -> None:
        depth, position = self._calls.pop()
        if self._depth != depth + 1 + count:
            raise ValueError(f"call takes {count} arguments, {self._depth - depth - 1} were pushed")
        if not NULL_BELOW:
            self._items.insert(position, Op("PUSH_NULL", positions=self._positions))

    def make_function(self, code: CodeType) -> None:
        """Push a function of `code` with this frame's globals and its cells by name."""
        for name in code.co_freevars:
            self.load_closure(name)
        if code.co_freevars:
            self.build_tuple(len(code.co_freevars))
        self.load_const(code)
        closure = bool(code.co_freevars)
        self._emit("MAKE_FUNCTION", -int(closure), arg=8 if closure else 0)

    # Places.

    def label(self) -> Label:
        """A new label, to be placed by `mark`."""
        return Label()

    def mark(self, label: Label) -> None:
        """Place a label here."""
        self._items.append(label)

    def at(self, where: int | Instr) -> None:
        """Set the source position of the next code: a line number, or that of an instruction."""
        self._positions = (where, where, None, None) if isinstance(where, int) else where.positions

    # Pieces of the original.

    def original(self, index: int, jump: Label | None = None) -> None:
        """Copy one instruction of the original with its position and exception handler.

        If it raises, the original's handlers run, and then the rest of the original.
        A jump instruction goes to `jump`; a LOAD_SUPER_ATTR pushes one value. The stack below its
        operands and the variables must be the original frame's. Raises ValueError for a MAKE_CELL,
        whose cell this frame creates, and when `jump` is missing or superfluous.
        """
        instr = self._decoded.instrs[index]
        if instr.opname == "MAKE_CELL":
            raise ValueError("cells are made by the new frame's own prologue")
        if (instr.target is None) != (jump is None):
            raise ValueError(f"{instr.opname} and jump label do not fit")
        cover = self._cover(instr)
        if instr.opname == "FOR_ITER" and jump is not None:
            jump = self._loop_exit(jump)
        arg = instr.arg & 2 if instr.opname == "LOAD_SUPER_ATTR" else instr.arg
        self._items.append(Op(instr.opname, arg, instr.argval, jump, instr.positions, cover))

    def begin_handler(self, target: int) -> None:
        """Begin the code that runs when a copied instruction with this handler raises."""
        self.mark(self._handlers.pop(target))

    def _cover(self, instr: Instr) -> Cover | None:
        if instr.handler is None:
            return None
        label = self._handlers.setdefault(instr.handler.target, Label())
        return Cover(label, instr.handler.depth, instr.handler.lasti)

    def _loop_exit(self, jump: Label) -> Label:
        """The target of FOR_ITER (from 3.12 on after an END_FOR), which continues at `jump`."""
        exit_label = Label()
        if PY312:
            self._tail.append(Op("END_FOR", positions=self._positions))
        if PY313:
            self._tail.append(Op("POP_TOP", positions=self._positions))
        self._tail += [exit_label, Op("JUMP", jump=jump, positions=self._positions)]
        return exit_label

    def call_resume(self, resume: Resume, kept: bool = False) -> None:
        """Call a resume function and return its result.

        The stack holds exactly the values and NULLs of `resume.stack`; its variables are set.
        `kept`: a traceback keeps this frame, so it releases its variables.
        """
        for depth in range(len(resume.stack) - 1, -1, -1):
            # A NULL, too, is popped by storing it, which unbinds the name.
            self._emit("STORE_FAST", -1, argval=stack_name(depth))
        self.begin_call()
        if self._tail_call is not None:
            self.load_const(self._tail_call)
        self.make_function(resume.code)
        for arg in resume.args:
            if isinstance(arg, int):
                self._emit("LOAD_FAST", 1, argval=stack_name(arg))
                self.delete_local(stack_name(arg))
            else:
                self.load_local(arg)
        if kept:
            names = (*self._shape.varnames, *(a for a in resume.args if isinstance(a, str)))
            self.clear_temps(*(set(names) - self._decoded.cells))
        self.call(len(resume.args) + (self._tail_call is not None))
        self.return_()

    def finish(self) -> CodeType:
        """Assemble the code object.

        Its arguments are all positional-only: the original's in flat order, or those of `shape`.
        Raises AssemblyError for an inconsistent stack.
        """
        shape = self._shape
        items = self._items + self._tail + self._handler_code()
        items += restore_unbound(items, shape.freevars, self._decoded)
        used = {op.argval for op in items if isinstance(op, Op) and op.opname in _CELL_OPS}
        cellvars = tuple(name for name in shape.cellvars if name in used)
        cells = set(cellvars + shape.freevars)
        _resolve_variables(items, cells)
        varnames = _variable_names(items, shape.varnames, cells)
        # The interpreter's error messages suggest names of variables, used or not.
        varnames += tuple(n for n in self._decoded.varnames if n not in {*varnames, *cells})
        shape = replace(shape, varnames=varnames, cellvars=cellvars)
        line = self._decoded.firstlineno
        return assemble(prologue_of(shape, (line, line, None, None)) + items, shape)

    def _handler_code(self) -> list[Item]:
        """The original's code that the handlers of `original` instructions can reach."""
        if not self._handlers:
            return []
        keep = [False] * len(self._decoded.instrs)
        for target in self._handlers:
            keep = [a or b for a, b in zip(keep, reachable(self._decoded, target), strict=True)]
        return program_of(self._decoded, keep, self._handlers)

    def _emit(
        self, opname: str, effect: int, arg: int = 0, argval: Any = None, jump: Label | None = None
    ) -> None:
        self._items.append(Op(opname, arg, argval, jump, self._positions))
        self._depth += effect
        if self._calls and self._depth == self._calls[-1][0] + 1:
            self._calls[-1][1] = len(self._items)


def _resolve_variables(items: list[Item], cells: set[str]) -> None:
    """Turn the Writer's x_VAR into x_FAST or x_DEREF, now that the cells are known."""
    for item in items:
        if isinstance(item, Op) and item.opname.endswith("_VAR"):
            suffix = "DEREF" if item.argval in cells else "FAST"
            item.opname = item.opname.replace("VAR", suffix)
            item.arg = 1  # may be unbound


def _variable_names(items: list[Item], args: tuple[str, ...], cells: set[str]) -> tuple[str, ...]:
    names = dict.fromkeys(args)
    for item in items:
        if isinstance(item, Op) and item.opname in _FAST_OPS and item.argval not in cells:
            names.setdefault(item.argval)
    return tuple(names)
