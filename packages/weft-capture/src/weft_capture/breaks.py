"""Why capture stops: `Break` and the table of its reasons.

`Break` means "this cannot go into a graph": the frame is split at the current instruction.
Each break carries a code from `REASONS`, so that logs, counters and `fullgraph` errors agree.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """What a break code means: why capture cannot go on, and what the user can do."""

    why: str
    remedy: str


REASONS: dict[str, Reason] = {
    "data-dependent-branch": Reason(
        "the branch depends on the value of a tensor, known only when the program runs",
        "use torch.where, state what holds with torch._check, or accept the break",
    ),
    "data-dependent-value": Reason(
        "a tensor's value is turned into a Python number",
        "keep the value in a tensor, set weft.config.capture_scalar_outputs, or accept the break",
    ),
    "dynamic-output-shape": Reason(
        "the shape of the result depends on the values of a tensor",
        "use torch.where or another operation with a static output shape, "
        "or set weft.config.capture_scalar_outputs",
    ),
    "unknown-call": Reason(
        "capture has no rule for this function and cannot look inside it",
        "move the call out of the compiled region, or register it with allow_in_graph",
    ),
    "unsupported-method": Reason(
        "capture has no rule for this method", "move the call out of the compiled region"
    ),
    "unsupported-opcode": Reason(
        "capture does not execute this bytecode instruction",
        "move the statement out of the compiled region",
    ),
    "unsupported-value": Reason(
        "a value of this type cannot be used in this way inside a graph",
        "move the use out of the compiled region",
    ),
    "generator": Reason(
        "a generator that is still running cannot be carried across this point",
        "turn the generator into a list",
    ),
    "loop": Reason(
        "a loop that a graph break lies in goes on: its iterator is stepped for real",
        "none needed: the loop's body is compiled; without the break there is one graph",
    ),
    "op-failed": Reason(
        "the operation raises on tensors of these shapes and types",
        "run the program without weft: if the operation raises there too, fix it; otherwise none "
        "needed: it runs for real between two graphs",
    ),
    "warns": Reason(
        "the operation warns, which it has to do itself", "do what the warning says, or accept it"
    ),
    "uncaught-exception": Reason(
        "the program raises an exception that nothing in it catches",
        "none needed: the exception is raised for real",
    ),
    "graph-break": Reason("the program asks for a graph break here", "remove the call"),
    "disabled": Reason(
        "the function is marked to run outside of graphs", "remove the disable marker"
    ),
    "recursion": Reason("calls nest too deeply to be inlined", "turn the recursion into a loop"),
    "too-long": Reason(
        "the frame executes very many instructions",
        "compile an inner function instead of the whole loop",
    ),
    "unrolled": Reason(
        "the steps of a recurrent network would each be operations of the graph",
        "none needed: it runs as in eager; to compile it all the same, raise unrolled_steps",
    ),
    "handler": Reason(
        "the handler of an exception that was raised for real runs in one piece with what follows",
        "let the handler only note what happened, and do the rest behind it",
    ),
    "suspends": Reason(
        "a coroutine waits, or a generator yields: the next graph begins where it goes on",
        "none needed: what lies between is compiled",
    ),
    "communication": Reason(
        "other processes wait for it, or for what the program did before it, in its own order",
        "none needed: what lies between is compiled; for one graph, do it before or behind",
    ),
    "backward": Reason(
        "compiled autograd is on, which captures the backward pass as a graph of its own",
        "none needed: what lies before and behind it is compiled; for one graph of the whole step, "
        "turn compiled autograd off",
    ),
    "recompile-limit": Reason(
        "the function was compiled as often as the recompile limit allows",
        "see the warning for the failing guards, or raise the limit",
    ),
    "modes": Reason(
        "a mode of the program's own sees every operation, which compiled code does not make",
        "enter the mode inside of what runs eagerly, or leave it before the compiled function",
    ),
    "builtins": Reason(
        "the program replaced builtin functions on which capture itself relies",
        "none needed: calls are compiled again once the builtins are back",
    ),
    "internal": Reason(
        "capture failed on its own account; this is a bug in weft",
        "please report it with the program; the frame runs eagerly",
    ),
}
"""Every break code. A code that is not here is an error in weft, found by a test."""


class Break(Exception):
    """The current instruction cannot be captured.

    Args:
        code: a key of `REASONS`.
        detail: what exactly was met, such as the name of the function.
        restart_step: where a value cannot be rebuilt, the step that should run for real instead.
    """

    def __init__(self, code: str, detail: str = "", restart_step: int = -1) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.restart_step = restart_step
        self.user_stack: tuple[traceback.FrameSummary, ...] = ()
        self.eager_frame: object = None  # the frame that must run as it is, in one piece

    def bare(self) -> Break:
        """Drop the traceback, whose frames would keep the program's objects; returns itself."""
        self.__context__ = None
        return self.with_traceback(None)


class NeedsSymbols(Exception):
    """A number must be symbolic, but the capture began without symbols: begin again."""


class NotConstant(Break):
    """A Python constant was asked of a value that is not one."""

    def __init__(self, what: str, code: str = "unsupported-value") -> None:
        super().__init__(code, f"{what} where a constant is needed")
        self.what = what

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class BreakRecord:
    """One graph break, as logged, counted and shown by `explain`.

    Args:
        code: a key of `REASONS`.
        detail: what exactly was met.
        user_stack: the user's frames, outermost first.
    """

    code: str
    detail: str
    user_stack: tuple[traceback.FrameSummary, ...]

    @property
    def why(self) -> str:
        """Why capture cannot go on here."""
        return REASONS[self.code].why

    @property
    def remedy(self) -> str:
        """What the user can do about it."""
        return REASONS[self.code].remedy

    @property
    def where(self) -> str:
        """`file:line` of the innermost user frame."""
        if not self.user_stack:
            return "<unknown>"
        frame = self.user_stack[-1]
        return f"{frame.filename}:{frame.lineno}"

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        stack = "".join(traceback.format_list(list(self.user_stack))).rstrip()
        return (
            f"[{self.code}]{detail} at {self.where}\n  Why: {self.why}\n"
            f"  What to do: {self.remedy}\n{stack}"
        )


class BreakAtStep(Exception):
    """The program has to break at step number `step`, because of what was met there or later.

    The exception raised there has to be raised by the real instruction: it leaves the captured
    frame, and the user's traceback must be right, or a break lies in its handler, where the
    interpreter must know it as the exception being handled. Or what that step makes cannot be
    rebuilt at a later break.
    """

    def __init__(self, step: int, reason: Break) -> None:
        super().__init__(step)
        self.step = step
        self.reason = reason
