"""The `options=` and `mode=` arguments of `weft.compile`.

Options are the code generator's; a mode is a set of options. Names are those of torch.compile, so
that a program keeps its dictionary when it switches.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft_core.arguments import checked
from weft_core.errors import InvalidArgument, InvalidOption
from weft_core.events import notify

from weft.inert_options import why_inert

if TYPE_CHECKING:
    from weft_codegen.config import Options
    from weft_guards.filters import GuardFilter


class InvalidMode(InvalidOption):
    """No mode has this name."""

    kind = "mode"


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
    "lite": {"fallback_by_default": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
}


def list_options() -> dict[str, tuple[Any, str]]:
    """Return every option's name with its default and what it does."""
    return _options().table()


def _options() -> type[Options]:
    """The code generator's table of options, which is loaded here at the latest."""
    options: type[Options] = importlib.import_module("weft_codegen.config").Options
    return options


@checked
def list_mode_options(mode: str | None = None) -> dict[str, Any]:
    """Return the options that each mode sets, or those of one mode.

    Raises:
        InvalidMode: for an unknown mode.
    """
    if mode is None:
        return {name: dict(options) for name, options in MODES.items()}
    if mode not in MODES:
        raise InvalidMode(mode, MODES)
    return dict(MODES[mode])


@dataclass(frozen=True)
class Parsed:
    """What `mode=` and `options=` ask for.

    Args:
        options: for weft's code generator.
        guard_filter: leaves guards out, for any backend.
        keywords: for another backend, as torch.compile passes them.
        passes: functions of graphs, by their names in `PASSES`.
    """

    options: Options
    guard_filter: GuardFilter | None
    keywords: Mapping[str, Any]
    passes: tuple[tuple[str, Any], ...] = ()


PASSES = {
    f"{stage}_custom_{when}_pass": stage
    for stage in ("joint", "post_grad") for when in ("pre", "post")
}  # fmt: skip
"""Options that take a function which changes an aten graph: of forward and backward together, or of
each by itself."""


def parse_options(
    mode: str | None, options: Mapping[str, Any] | None, *, own: bool = True
) -> Parsed:
    """Parse these two arguments.

    Args:
        mode, options: see `compile`.
        own: the backend is one of weft's; others get both as they are.

    Raises:
        InvalidMode: for an unknown mode.
        InvalidOption: for an unknown option, a value of the wrong type, or mode and options both.
    """
    if mode is not None and options is not None:
        detail = "give mode or options, not both; list_mode_options() shows what a mode sets."
        raise InvalidOption("mode", detail=detail)
    chosen = dict(options or {})
    guard_filter = chosen.pop("guard_filter_fn", None)
    if guard_filter is not None and not callable(guard_filter):
        detail = f"guard_filter_fn takes a function, not {guard_filter!r}."
        raise InvalidArgument("guard_filter_fn", detail=detail)
    if not own:
        named = {"mode": None if mode == "default" else mode, "options": chosen}
        keywords = {name: value for name, value in named.items() if value}
        return Parsed(_options()(), guard_filter, keywords)
    if mode is not None:
        chosen = list_mode_options(mode)
    given = {name: chosen.pop(name) for name in PASSES if chosen.get(name) is not None}
    for name, one in given.items():
        if not callable(one):
            raise InvalidArgument(name, detail=f"{name} takes a function, not {one!r}.")
    chosen = {name.replace("-", "_"): value for name, value in chosen.items()}
    passes = tuple((name, given[name]) for name in PASSES if name in given)
    return Parsed(_options().parse(_effective(chosen)), guard_filter, {}, passes)


def _effective(chosen: dict[str, Any]) -> dict[str, Any]:
    """The options without those of torch.compile that change nothing here, which are told."""
    known, effective = _options().table(), {}
    for name, value in chosen.items():
        why = None if name in known else why_inert(name)
        if why is None or name.replace("_", ".", 1) in known:  # triton_cudagraphs, too
            effective[name] = value
        else:
            notify(f"[option] {name} has no effect: {why}")
    return effective
