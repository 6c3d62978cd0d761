"""Execution in steps that can be rolled back: one instruction of one frame each.

The captured frame is stepped, and so is every frame that a stepped frame's CALL inlines. A break
rolls back one step, or the user's call of a library function, or all steps from one that has to run
eagerly (`OuterFrame.break_at`), and ends execution with `Stop`.
docs/architecture/capture-breaks.md explains why.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import dataclass, field
from typing import Any, NoReturn

from weft_capture import config
from weft_capture.breaks import Break, BreakAtStep
from weft_capture.bytecode import Instr
from weft_capture.execution.frames import Frame, check_names
from weft_capture.model.functions import FunctionValue
from weft_capture.model.protocol import BIRTHS, Raised, Tracer, Value
from weft_capture.policy.selection import is_skipped_code

PROLOGUE = frozenset(("COPY_FREE_VARS", "MAKE_CELL"))  # no frame can be entered here


@dataclass(frozen=True)
class Stop:
    """Execution ended at a break, with the state before the breaking step.

    Args:
        error: the break.
        frames: the frames that were executing, the captured one first, the breaking one last.
    """

    error: Break
    frames: tuple[SteppedFrame, ...]

    @property
    def step(self) -> int:
        """Number of the first step that was rolled back."""
        return self.frames[-1].step


@dataclass(eq=False)
class Steps:
    """Numbers the steps of one capture.

    Args:
        no_tensor_yet: no value has led to a tensor so far, so the limit is lower.
        break_at: the step at which to break.
        reason: why to break there.

    `marks` has the state of the journal before each step, `births` the count of values by then.
    `guarded` is the last step that guarded a value that can vary. `stale` says that the breaking
    step had such guards, for code that then runs eagerly.
    """

    no_tensor_yet: bool
    break_at: int = -1
    reason: Break | None = None
    now: int = -1
    raised_at: dict[Value, int] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    guarded: int = -1
    stale: bool = False

    def __post_init__(self) -> None:
        limits = config.settings.instruction_limit, config.settings.plain_limit
        self.limit = limits[self.no_tensor_yet]

    def restart_step_of(self, value: Value) -> int:
        """Return the step to run eagerly where a value cannot be rebuilt; -1 for none.

        An exception has its traceback from the instruction that raised it.
        """
        born = getattr(value, "born", -1)
        return self.raised_at.get(value, bisect.bisect(self.births, born) - 1)

    def saw_tensor(self) -> None:
        """Record that a tensor was met."""
        self.no_tensor_yet = False
        self.limit = config.settings.instruction_limit

    def check(self, step: int) -> None:
        """Break at `break_at`, and at the limit."""
        if step == self.break_at:
            raise self.reason or Break("uncaught-exception")
        if step >= self.limit:
            raise Break("too-long", f"{self.limit} instructions")


class SteppedFrame(Frame):
    """A frame whose instructions are steps; `step` is the last."""

    stepped = True

    def __init__(self, tx: Tracer, function: FunctionValue, *state: Any) -> None:
        super().__init__(tx, function, *state)
        self.step = -1
        module = function.globals.get("__name__")
        self.library = tx.frame is not None and is_skipped_code(function.code, module)

    def run(self) -> Value:
        """Execute until the function returns.

        Raises:
            Raised: when an exception leaves the frame.
            BreakAtStep: at a break.
        """
        tx = self.tx
        self.parent = parent = tx.frame
        tx.enter_frame(self)
        try:
            return self.execute()
        except Raised:
            if self.replaced is not None:
                raise Break("fully-shard", "an exception leaves a sharded module") from None
            raise
        finally:
            tx.leave_frame(self)
            if isinstance(parent, SteppedFrame):
                parent.keep(parent.ip)

    def execute(self) -> Value:
        """Execute the instructions one by one."""
        steps, journal, program = self.tx.steps, self.tx.journal, self.program
        while self.result is None:
            at = self.ip
            handler, instr = program[at]
            steps.now = self.step = step = steps.now + 1
            steps.marks.append(journal.begin())
            steps.births.append(next(BIRTHS))
            before = self.keep(at)
            self.ip = at + 1
            try:
                try:
                    if instr.opname not in PROLOGUE:
                        steps.check(step)
                    handler(self, instr)
                except Raised as raised:
                    first = steps.raised_at.setdefault(raised.value, step)
                    if first == steps.now and not self._may_catch(instr):
                        raise Break("uncaught-exception", raised.value.describe()) from None
                    if first == steps.now:
                        check_names(raised.value, before)
                    if not self.unwind(raised.value, instr):
                        raise
            except Break as error:
                self._stop(error)
            except RuntimeError as error:
                if type(error).__name__ != "GuardOnDataDependentSymNode":
                    raise
                self._stop(Break("data-dependent-branch", str(error).partition("\n")[0]))
        return self.result

    def keep(self, ip: int) -> list[Value]:
        """Record this frame's state for a rollback, to continue at `ip`; returns the stack."""
        stack = self.stack.copy()
        state = (self.step, ip, stack, self.exception)
        self.tx.journal.on_rollback(functools.partial(self._return_to, *state))
        return stack

    def _return_to(self, step: int, ip: int, stack: list[Value], exception: Value | None) -> None:
        self.tx.frame = self
        self.step, self.ip, self.stack, self.exception = step, ip, stack, exception
        self.result = None

    def _may_catch(self, instr: Instr) -> bool:
        return instr.handler is not None or any(
            frame.instr.handler is not None for frame in self.chain()[:-1]
        )

    def _stop(self, error: Break) -> NoReturn:
        error.user_stack = error.user_stack or self.tx.user_stack()
        raise BreakAtStep(self.step, error) from None

    def earlier(self, error: Break) -> int | None:
        """Return an earlier step that a break at this one has to roll back, too."""
        caller = self.parent
        closed = self.library or error.eager_frame is self
        closed |= self.decoded.instrs[self.ip].opname in PROLOGUE
        if isinstance(caller, SteppedFrame) and closed:
            return caller.step
        for calling, called in itertools.pairwise(self.chain()):
            if called.replaced is not None:
                return calling.step
        active: list[Value] = []
        for active_frame in self.chain():
            active += [
                *active_frame.stack,
                *([active_frame.exception] if active_frame.exception is not None else []),
            ]
        raised_at = self.tx.steps.raised_at
        first = min(
            (raised_at[exception] for exception in active if exception in raised_at),
            default=self.step,
        )
        return first if first < self.step else None

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
        except BreakAtStep as error:
            step, reason = error.step, error.reason
        except RecursionError:
            step, reason = self.step, Break("recursion", "calls nest too deeply")
        except Raised as raised:
            step = self.tx.steps.raised_at[raised.value]
            reason = Break("uncaught-exception", raised.value.describe())
        else:
            return None
        guarded = self.tx.steps.guarded
        stopped = self.break_at(step, reason)
        self.tx.steps.stale = guarded >= stopped.step
        return stopped

    def break_at(self, step: int, reason: Break) -> Stop:
        """Roll back to a step, which is to run eagerly.

        Raises:
            BreakAtStep: when the journal does not reach back: capture has to begin again.
        """
        steps, journal = self.tx.steps, self.tx.journal
        done = steps.now
        earlier: int | None = step
        frame: SteppedFrame = self
        while earlier is not None:
            steps.now = step = earlier
            if not journal.can_undo(steps.marks[step]):
                raise BreakAtStep(step, reason) from None
            journal.rollback(steps.marks[step])
            assert isinstance(self.tx.frame, SteppedFrame)
            frame = self.tx.frame
            earlier = frame.earlier(reason)
        self.tx.unstepped += done - step
        frame.ip += 1  # as it is while the instruction is executed
        reason.user_stack = reason.user_stack or self.tx.user_stack()
        frame.ip -= 1
        return Stop(reason.bare(), frame.chain())
