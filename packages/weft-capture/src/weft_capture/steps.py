"""Execution in steps that can be taken back: one instruction of one frame each.

The captured frame is stepped, and so is every frame that a stepped frame's CALL inlines. A break
takes back one step, or the user's call of a library function, and ends execution with `Stop`.
docs/architecture/capture.md tells why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from weft_capture import config
from weft_capture.breaks import Break, Raised
from weft_capture.bytecode import Instr
from weft_capture.frames import Frame
from weft_capture.selection import is_skipped_code
from weft_capture.values.base import Tracer, Value
from weft_capture.values.functions import FunctionValue

_PROLOGUE = frozenset(("COPY_FREE_VARS", "MAKE_CELL"))  # no frame can be entered here


class BreakAtStep(Exception):
    """Capture has to begin again and break at step number `step`.

    The exception raised there has to be raised by the real instruction: it leaves the captured
    frame, and the user's traceback must be right, or a break lies in its handler, where the
    interpreter must know it as the exception being handled. Or what that step makes cannot be
    rebuilt at a later break.
    """

    def __init__(self, step: int, reason: Break) -> None:
        super().__init__(step)
        self.step = step
        self.reason = reason


class Stop(Exception):
    """Execution ended at a break, with the state before the breaking step.

    Args:
        error: the break.
        frames: the frames that were executing, the captured one first, the breaking one last.
    """

    def __init__(self, error: Break, frames: tuple[SteppedFrame, ...]) -> None:
        super().__init__(error)
        self.error = error
        self.frames = frames

    @property
    def step(self) -> int:
        """Number of the step that was taken back."""
        return self.frames[-1].step


@dataclass(eq=False)
class Steps:
    """Numbers the steps of one capture.

    Args:
        aimless: nothing has led to a tensor so far: fewer steps are worth it.
        break_at: the step to break at in any case.
        reason: why to break there.
    """

    aimless: bool
    break_at: int = -1
    reason: Break | None = None
    now: int = -1
    raised_at: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = config.settings.instruction_limit, config.settings.plain_limit
        self.limit = limits[self.aimless]

    def aim(self) -> None:
        """Take note of a tensor."""
        self.aimless = False
        self.limit = config.settings.instruction_limit

    def check(self, step: int) -> None:
        """Break at the step asked for, and at the limit."""
        if step == self.break_at:
            raise self.reason or Break("uncaught-exception")
        if step >= self.limit:
            raise Break("too-long", f"{self.limit} instructions")


class SteppedFrame(Frame):
    """A frame whose instructions are steps; `step`, `at`, `saved` and `mark` describe the last."""

    stepped = True

    def __init__(self, tx: Tracer, function: FunctionValue, *state: Any) -> None:
        super().__init__(tx, function, *state)
        self.step = -1
        self.at = 0
        self.saved: list[Value] = []
        self.mark = tx.journal.mark()
        module = function.globals.get("__name__")
        self.library = tx.frame is not None and is_skipped_code(function.code, module)

    def run(self) -> Value:
        """Execute until the function returns.

        Raises:
            Raised: when an exception leaves the frame.
            Stop, BreakAtStep: at a break.
        """
        tx = self.tx
        self.parent = tx.frame
        tx.enter_frame(self)
        try:
            return self.execute()
        finally:
            tx.leave_frame(self)

    def execute(self) -> Value:
        """Execute the instructions one by one."""
        steps, journal, program = self.tx.steps, self.tx.journal, self.program
        while self.result is None:
            self.at = at = self.ip
            handler, instr = program[at]
            steps.now = self.step = step = steps.now + 1
            journal.begin(self.library)
            self.mark = journal.mark()
            self.saved = self.stack.copy()
            self.ip = at + 1
            try:
                try:
                    if instr.opname not in _PROLOGUE:
                        steps.check(step)
                    handler(self, instr)
                except Raised as raised:
                    first = steps.raised_at.setdefault(raised.value, step)
                    if first == steps.now and not self._may_catch(instr):
                        raise Break("uncaught-exception", raised.value.describe()) from None
                    self.unwind(raised, instr)
            except Break as error:
                self._stop(error)
            except RuntimeError as error:
                if type(error).__name__ != "GuardOnDataDependentSymNode":
                    raise
                self._stop(Break("data-dependent-branch", str(error).partition("\n")[0]))
        return self.result

    def _may_catch(self, instr: Instr) -> bool:
        return instr.handler is not None or any(
            frame.instr.handler is not None for frame in self.chain()[:-1]
        )

    def _stop(self, error: Break) -> NoReturn:
        """Take the step back."""
        tx, steps = self.tx, self.tx.steps
        error.user_stack = error.user_stack or tx.user_stack()
        if steps.now != self.step:
            raise BreakAtStep(self.step, error) from None
        if error.whole is self and isinstance(self.parent, SteppedFrame):
            raise BreakAtStep(self.parent.step, error) from None
        frame: SteppedFrame = self
        while frame.library and isinstance(frame.parent, SteppedFrame):
            if not tx.journal.can_undo(frame.parent.mark):
                break
            frame = frame.parent
        active = list(frame.saved)
        for one in frame.chain():
            active += one.stack if one is not frame else []
            active += [one.exception] if one.exception is not None else []
        handled = [steps.raised_at[value] for value in active if value in steps.raised_at]
        if handled and min(handled) < frame.step:
            raise BreakAtStep(min(handled), error) from None
        tx.journal.rollback(frame.mark)
        frame.stack = frame.saved
        frame.ip = frame.at
        raise Stop(error.bare(), frame.chain()) from None

    def chain(self) -> tuple[SteppedFrame, ...]:
        """Return the frames from the captured one to this one."""
        frames = [self]
        while isinstance(frames[-1].parent, SteppedFrame):
            frames.append(frames[-1].parent)
        return tuple(reversed(frames))


class OuterFrame(SteppedFrame):
    """The frame that is captured."""

    def step_until_break(self) -> Stop | None:
        """Execute until the function returns (None) or breaks.

        Raises:
            BreakAtStep: when capture has to begin again.
        """
        self.tx.enter_frame(self)
        try:
            self.execute()
        except Stop as stopped:
            self.tx.frame = stopped.frames[-1]
            return stopped.with_traceback(None)
        except RecursionError:
            reason = Break("recursion", "calls nest too deeply")
            raise BreakAtStep(self.step, reason) from None
        except Raised as raised:
            uncaught = Break("uncaught-exception", raised.value.describe())
            raise BreakAtStep(self.tx.steps.raised_at[raised.value], uncaught) from None
        return None
