"""The `options=` and `mode=` arguments of `weft.compile`.

An option is a row of `OPTIONS`; a mode is a set of options. Names are those of torch.compile, so
that a program keeps its dictionary when it switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft_core.errors import InvalidOption


class InvalidMode(InvalidOption):
    """No mode has this name."""

    kind = "mode"


@dataclass(frozen=True)
class Option:
    """One option: its default, whose type is the option's type, and what it does."""

    default: Any
    doc: str


OPTIONS: dict[str, Option] = {
    "epilogue_fusion": Option(True, "fuse pointwise work into the kernels before it"),
    "max_autotune": Option(False, "matrix products as loops where that measures faster"),
    "fallback_random": Option(True, "draw random numbers exactly as eager does (always so)"),
    "freezing": Option(False, "fold parameters once; inference only, until one is written"),
    "shape_padding": Option(False, "pad matrices to sizes the hardware likes (no effect on CPU)"),
    "triton.cudagraphs": Option(False, "replay recorded CUDA graphs (no effect on CPU)"),
    "measure": Option(True, "run eager instead of a graph whose first calls show it to be slower"),
    "trace.enabled": Option(False, "write each stage's result into ./weft_trace (or WEFT_DUMP)"),
    "trace.graph_diagram": Option(False, "add a diagram of the fused graph to that (SVG)"),
}

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
}


def list_options() -> dict[str, tuple[Any, str]]:
    """Return every option's name with its default and what it does."""
    return {name: (option.default, option.doc) for name, option in OPTIONS.items()}


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


def resolve(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that differ from their defaults for these two arguments.

    Raises:
        InvalidMode: for an unknown mode.
        InvalidOption: for an unknown option, a value of the wrong type, or mode and options both.
    """
    if mode is not None and options is not None:
        detail = "give mode or options, not both; list_mode_options() shows what a mode sets."
        raise InvalidOption("mode", detail=detail)
    if mode is not None:
        return list_mode_options(mode)
    chosen = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    for name, value in chosen.items():
        if name not in OPTIONS:
            raise InvalidOption(name, OPTIONS)
        kind = type(OPTIONS[name].default)
        if not isinstance(value, kind):
            raise InvalidOption(name, detail=f"{name} takes {kind.__name__}, not {value!r}.")
    return chosen
