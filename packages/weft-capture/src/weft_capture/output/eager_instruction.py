"""The breaking instruction, which runs eagerly, and the call of the resume function."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from weft_capture.breaks import Break
from weft_capture.bytecode import (
    NO_FALL_THROUGH,
    NULL_BELOW,
    Decoded,
    Instr,
    Writer,
    make_resume,
    reachable,
    shows_frame,
    stack_after,
)
from weft_capture.python_compat import WITH_CALLS_SPECIAL_METHODS

_NO_WORK = frozenset(
    ("PUSH_EXC_INFO", "POP_EXCEPT", "CHECK_EXC_MATCH", "RERAISE", "COPY", "SWAP", "POP_TOP", "NOP")
    + ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_FAST", "STORE_FAST", "DELETE_FAST", "PUSH_NULL")
    + ("JUMP", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "RETURN_VALUE")
)
"""Instructions of handlers that only store the exception or a constant."""


def special_method(owner: Any, name: str) -> Any:
    """Look up a method of the `with` protocol as `with` does, with its error."""
    for cls in type(owner).__mro__:
        if name in vars(cls):
            attribute = vars(cls)[name]
            bind = getattr(type(attribute), "__get__", None)
            return attribute if bind is None else bind(attribute, owner, type(owner))
    with owner:
        raise AssertionError(f"{owner!r} can be used without {name}")


@dataclass(frozen=True)
class RealStep:
    """Writes one instruction of `decoded` with the frame's state rebuilt around it.

    Args:
        writer: the code; variables are set, and the real stack is `below`.
        decoded: the original code.
        below: the operand stack, True for a value and False for a NULL.
        names: the variables that are bound.
        keep: those of them to carry on in any case.
    """

    writer: Writer
    decoded: Decoded
    below: Sequence[bool]
    names: tuple[str, ...]
    keep: Collection[str]

    def run(self, index: int) -> None:
        """Write instruction `index` and the code after it.

        Raises:
            Break: for a RETURN_VALUE: its value cannot be rebuilt.
        """
        writer, below = self.writer, self.below
        instr = self.decoded.instrs[index]
        if shows_frame(self.decoded, index):
            self.resume(index, below)
            return
        of_super = instr.opname == "LOAD_SUPER_ATTR" and instr.argval[1]
        if of_super or instr.opname == "LOAD_METHOD":
            if of_super:
                writer.original(index)
            else:
                writer.load_attr(instr.argval)
                writer.replacing(index)
            pair = [False, True] if NULL_BELOW else [True, False]
            writer.push_null()
            if NULL_BELOW:
                writer.swap(2)
            self.resume(index + 1, [*below[: -3 if of_super else -1], *pair])
            self._handle(index)
            return
        if WITH_CALLS_SPECIAL_METHODS and instr.opname == "BEFORE_WITH":
            self._enter(index)
            return
        if instr.target is not None:
            self._branch(index, instr)
            return
        writer.original(index)
        if instr.opname == "RETURN_VALUE":
            raise Break("cannot-rebuild", "the value to return cannot be rebuilt")
        if instr.opname not in NO_FALL_THROUGH:
            after = stack_after(instr, below, bound=instr.argval in self.names)
            self.resume(index + 1, after, instr)
        self._handle(index)

    def _enter(self, index: int) -> None:
        """Write 3.14's entry of a `with` block, with a bound `__exit__` and a NULL on the stack."""
        writer = self.writer
        manager = writer.temp()
        writer.store_local(manager)
        for name in ("__exit__", "__enter__"):
            if name == "__enter__":
                writer.begin_call()  # the call of the method
            writer.begin_call()
            writer.load_const(special_method)
            writer.load_local(manager)
            writer.load_const(name)
            writer.call(2)
            writer.replacing(index)
            if name == "__exit__":
                writer.push_null()
        writer.call(0)
        writer.replacing(index)
        self.resume(index + 1, stack_after(self.decoded.instrs[index], self.below))
        self._handle(index)

    def returned(self, index: int) -> None:
        """Continue after a call that replaced instruction `index`, whose result was pushed."""
        self.writer.replacing(index)
        self.resume(index + 1, [*self.below, True])
        self._handle(index)

    def _handle(self, index: int) -> None:
        """Continue in the handler of instruction `index`, which raised.

        A handler inside another handler stays in the handling frame, and a handler without
        operations has nothing to capture: both run the original code.
        """
        handler, writer = self.decoded.instrs[index].handler, self.writer
        if handler is None or self.decoded.instrs[handler.target].opname != "PUSH_EXC_INFO":
            return
        code = zip(reachable(self.decoded, handler.target), self.decoded.instrs, strict=True)
        if all(instr.opname in _NO_WORK for reachable, instr in code if reachable):
            return
        writer.begin_handler(handler.target)
        if handler.lasti:  # an offset of this code
            writer.swap(2)
            writer.pop()
            writer.load_const(0)
            writer.swap(2)
        stack = [*self.below[: handler.depth], *[True] * (1 + handler.lasti)]
        self.resume(handler.target, stack, kept=True)

    def resume(
        self, index: int, stack: Sequence[bool], done: Instr | None = None, kept: bool = False
    ) -> None:
        """Continue at instruction `index`, after `done` ran eagerly."""
        names = self.names
        if done is not None and done.opname in ("STORE_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR"):
            names = tuple(name for name in names if name != done.argval)
            # An inlined comprehension restores a NULL in a variable that was unbound before.
            names += (done.argval,) * (done.opname == "STORE_FAST" and self.below[-1])
        self.writer.call_resume(make_resume(self.decoded, index, stack, names, self.keep), kept)

    def _branch(self, index: int, instr: Instr) -> None:
        assert instr.target is not None
        if instr.opname == "JUMP":
            self.resume(instr.target, self.below)
            return
        writer = self.writer
        jump_label = writer.label()
        writer.original(index, jump_label)
        self.resume(index + 1, stack_after(instr, self.below))
        writer.mark(jump_label)
        self.resume(instr.target, stack_after(instr, self.below, jump=True))
        self._handle(index)
