"""The process-wide stance: whether optimised functions may compile, or run eagerly.

Every call of an optimised function reads `active`, which is None in the default stance, so that
stances cost such a call nothing. `may_compile` decides for a frame without a matching entry.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any, TypeVar

from weft_core.errors import InvalidOption, WeftError
from weft_guards import skip_guards

F = TypeVar("F", bound=Callable[..., Any])
STANCES = (
    "default",
    "force_eager",
    "eager_on_recompile",
    "fail_on_recompile",
    "eager_then_compile",
    "aot_eager_then_compile",
)


@dataclass(frozen=True)
class Stance:
    """One stance, and the backend that it forces on every function (default stance only)."""

    name: str
    backend: Callable[..., Any] | None = None


active: Stance | None = None


def may_compile(name: str, reasons: Callable[[], Iterable[tuple[Any, Iterable[Any]]]]) -> bool:
    """Say whether a frame without a matching entry may be compiled.

    Args:
        name: the function's name, for the message.
        reasons: returns each entry and why its guards fail.

    Raises:
        WeftError: under the stance `fail_on_recompile`.
    """
    if active is None:
        return True
    if active.name == "fail_on_recompile":
        why = "".join(f"\n  {miss}" for _, misses in reasons() for miss in misses)
        raise WeftError(
            f"{name} would be compiled, which the stance fail_on_recompile forbids{why}"
        )
    return active.name != "eager_on_recompile"


_State = tuple[Stance | None, bool]
"""The stance, and whether guards are skipped."""


def _set(state: _State) -> _State:
    global active
    before, active = active, state[0]
    return before, skip_guards(state[1])


class set_stance(ContextDecorator):  # noqa: N801
    """Set the stance: for good when called, for a `with` block, or for a decorated function.

    Args:
        stance: `default`; `force_eager` (run everything eagerly); `eager_on_recompile` (run a call
            eagerly where no compiled entry matches); `fail_on_recompile` (raise there);
            `eager_then_compile` (the first call of each optimised function runs eagerly, so that
            the second call compiles with the changed sizes symbolic); `aot_eager_then_compile`
            (the same, but the first call runs its traced forward and backward op by op).
        skip_guard_eval_unsafe: test only the guards by which the compiled versions of a function
            differ; UNSAFE, for programs that have made every kind of call once.
        force_backend: use this backend for all functions, with the default stance.

    Raises:
        InvalidOption: for an unknown stance.
        WeftError: for a backend together with another stance than the default.
    """

    def __init__(
        self,
        stance: str = "default",
        *,
        skip_guard_eval_unsafe: bool = False,
        force_backend: Callable[..., Any] | None = None,
    ) -> None:
        if stance not in STANCES:
            raise InvalidOption(stance, STANCES)
        if force_backend is not None and stance != "default":
            raise WeftError(f"force_backend goes with the default stance, not with {stance}")
        plain = stance == "default" and force_backend is None
        self.stance = None if plain else Stance(stance, force_backend)
        self.state = self.stance, skip_guard_eval_unsafe
        self._before = _set(self.state)

    def __call__(self, function: F) -> F:
        """Decorate a function: the stance applies during its calls only."""
        _set(self._before)
        return super().__call__(function)

    def _recreate_cm(self) -> set_stance:
        """Return a copy for a single call of a decorated function."""
        fresh = copy.copy(self)
        fresh._before = active, skip_guards(self.state[1])
        return fresh

    def __enter__(self) -> set_stance:
        _set(self.state)
        return self

    def __exit__(self, *_: object) -> None:
        _set(self._before)
