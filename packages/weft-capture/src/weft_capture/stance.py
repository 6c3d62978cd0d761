"""The process-wide stance: whether optimised functions may compile, or run eagerly."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from weft_core.errors import InvalidOption, WeftError

STANCES = ("default", "force_eager", "eager_on_recompile", "fail_on_recompile")
_current = "default"


def current() -> str:
    """Return the stance in force."""
    return _current


def forces_eager() -> bool:
    """Say whether optimised functions run as they are."""
    return _current == "force_eager"


def may_recompile(name: str) -> bool:
    """Say whether a function that was compiled before may be compiled again.

    Raises:
        WeftError: under the stance `fail_on_recompile`.
    """
    if _current == "fail_on_recompile":
        raise WeftError(f"{name} would be compiled again, which the stance forbids")
    return _current != "eager_on_recompile"


class set_stance:
    """Set the stance, for good or for a `with` block.

    Args:
        stance: `default`, `force_eager` (run everything as it is), `eager_on_recompile` (run what
            no compiled entry admits as it is) or `fail_on_recompile` (raise there).

    Raises:
        InvalidOption: for an unknown stance.
    """

    def __init__(self, stance: str) -> None:
        global _current
        if stance not in STANCES:
            raise InvalidOption(stance, STANCES)
        self._before = _current
        _current = stance

    def __enter__(self) -> set_stance:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        global _current
        _current = self._before
        return False
