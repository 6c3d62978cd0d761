"""The exceptions that weft raises. Read this to know what to catch.

    WeftError (RuntimeError)            everything weft raises on its own account
    ├── Unsupported                     capture met something it cannot put in a graph
    ├── BackendCompilerError            a stage after capture failed
    │   └── CompilerUnavailable         this machine cannot compile: no room, a compiler that hangs
    │       └── CompilerNotFound        no C compiler on this machine
    ├── RecompileLimit                  one function was compiled too often (fullgraph only)
    ├── InvalidBackend (ValueError)     no backend of that name
    └── InvalidOption (ValueError)      no option, mode or setting of that name, or a wrong value
        ├── InvalidArgument (TypeError) an argument or a setting of the wrong type
        └── UnknownSetting (AttributeError)  no setting of that name

Exceptions that the user's own program raises pass through unchanged.
Each message has the same four parts: code, what happened, why, what to do.
Each class also accepts a single string as its message: libraries recreate errors that way.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

UserStack = Sequence[traceback.FrameSummary]
_FRAME = re.compile(r'File "([^"]+)", line (\d+).*(?:\n +(.*))?')
_TORCH = str(Path(torch.__file__).parent)


def nearest(name: object, choices: Iterable[str]) -> str | None:
    """Return the choice most like `name`, or None when nothing is close."""
    if not isinstance(name, str):
        return None
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return matches[0] if matches else None


def user_frame(printed: str | None) -> tuple[str, ...]:
    """File, line and code of the user's frame in a printed stack; nothing where there is none.

    That is the innermost one outside of torch; nn.Linear's own line tells a user nothing.
    """
    frames: list[tuple[str, ...]] = _FRAME.findall(printed or "")
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return (own or frames or [()])[-1]


class WeftError(RuntimeError):
    """Base of all errors that weft raises on its own account."""


class Unsupported(WeftError):
    """Capture met something it cannot put in a graph.

    Args:
        code: short stable name of the reason, such as `data-dependent-branch`.
        cause: why this cannot be captured.
        remedy: what the user can do.
        user_stack: the user's frames, outermost first.
    """

    def __init__(
        self, code: str, cause: str = "", remedy: str = "", user_stack: UserStack = ()
    ) -> None:
        self.code = code
        self.cause = cause
        self.remedy = remedy
        self.user_stack = tuple(user_stack)
        super().__init__(code, cause, remedy, self.user_stack)

    def __str__(self) -> str:
        parts = [f"[{self.code}] {self.cause}" if self.cause else self.code]
        if self.remedy:
            parts.append(f"  What to do: {self.remedy}")
        if self.user_stack:
            stack = "".join(traceback.format_list(list(self.user_stack)))
            parts.append("  From user code:\n" + stack.rstrip())
        return "\n".join(parts)


class BackendCompilerError(WeftError):
    """A stage after capture failed.

    Args:
        stage: the stage's name, such as `codegen.lower`.
        cause: what went wrong; often the text of the exception that is chained as `__cause__`.
        op: the operation being compiled, where one is known.
        user_line: `file:line` of the user's code, where it is known.
        remedy: what the user can do.
    """

    def __init__(
        self,
        stage: str,
        cause: str = "",
        op: str | None = None,
        user_line: str | None = None,
        remedy: str = "",
    ) -> None:
        self.stage = stage
        self.cause = cause
        self.op = op
        self.user_line = user_line
        self.remedy = remedy
        super().__init__(stage, cause, op, user_line, remedy)

    def __str__(self) -> str:
        rows = {
            "While compiling": self.op,
            "From user code": self.user_line,
            "What to do": self.remedy,
        }
        known = [f"  {title}: {text}" for title, text in rows.items() if text]
        return "\n".join([f"[{self.stage}] {self.cause}" if self.cause else self.stage, *known])


class CompilerUnavailable(BackendCompilerError):
    """This machine cannot compile now; graphs run eagerly, whatever `on_compile_error` says."""


class CompilerNotFound(CompilerUnavailable):
    """No working C compiler was found; the message says how to get one.

    Args:
        tried: the commands that were tried.
    """

    def __init__(self, tried: Sequence[str]) -> None:
        if isinstance(tried, str):
            self.tried: tuple[str, ...] = ()
            super().__init__(tried)
            self.args = (tried,)
            return
        self.tried = tuple(tried)
        super().__init__(
            "codegen.build",
            f"no working C compiler (tried: {', '.join(self.tried) or 'none'})",
            remedy=(
                "install one (Debian: apt install gcc; Fedora: dnf install gcc; "
                "macOS: xcode-select --install) or set CC to its path"
            ),
        )
        # Exceptions pickle as class(*args); this class takes one argument, its base five.
        self.args = (self.tried,)


class RecompileLimit(WeftError):
    """One function was compiled more often than the recompile limit allows."""


class _UnknownName(WeftError, ValueError):
    """Base of the two errors that name something which does not exist."""

    kind = "name"

    def __init__(self, name: str, choices: Iterable[str] = (), detail: str = "") -> None:
        self.choices = tuple(sorted(choices))
        self.detail = detail
        super().__init__(name, self.choices, detail)
        self.name = name  # which AttributeError clears from 3.14 on

    def __str__(self) -> str:
        if self.args == (self.name, (), ""):
            return self.name
        text = self.detail or f"there is no {self.kind} {self.name!r}"
        guess = nearest(self.name, self.choices) if not self.detail else None
        if guess:
            text += f"; did you mean {guess!r}?"
        elif not self.detail:
            text += "."
        if self.choices:
            text += f" Known: {', '.join(self.choices)}."
        return text


class InvalidBackend(_UnknownName):
    """No backend has this name."""

    kind = "backend"


class InvalidOption(_UnknownName):
    """No option, mode or setting has this name, or its value is of the wrong type.

    Args:
        name: what the user wrote.
        choices: the valid names.
        detail: replaces the first sentence, for a wrong value of a name that exists.
    """

    kind = "option"


class InvalidArgument(InvalidOption, TypeError):
    """An argument or a setting has a value of the wrong type, or one beyond its limits."""


class UnknownSetting(InvalidOption, AttributeError):  # type: ignore[misc]  # its `name`
    """No setting has this name."""

    kind = "setting"
