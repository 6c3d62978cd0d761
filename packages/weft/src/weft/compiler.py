"""torch.compiler's names: `from weft import compiler` in the place of `from torch import compiler`.

docs/coverage/interface.md says what each does. The filters of guards and the marks that torch
defines without its compiler are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import (
    is_exporting,
    keep_portable_guards_unsafe,
    keep_tensor_guards_unsafe,
    nested_compile_region,
    skip_all_guards_unsafe,
    skip_guard_on_all_nn_modules_unsafe,
    skip_guard_on_globals_unsafe,
    skip_guard_on_inbuilt_nn_modules_unsafe,
)
from torch.utils import _pytree as pytree
from weft_capture import (
    agree_on_guards,
    allow_in_graph,
    assume_constant_result,
    disable,
    is_compiling,
    nonstrict_trace,
    skip_frame,
    substitute_in_graph,
)
from weft_core.arguments import checked

from weft.api import compile
from weft.backends import get_default_backend, list_backends, set_default_backend
from weft.mega_cache import load_cache_artifacts, save_cache_artifacts
from weft.pipeline import cudagraph_mark_step_begin
from weft.settings import config
from weft.state import reset, set_stance

F = TypeVar("F", bound=Callable[..., Any])
is_dynamo_compiling = is_compiling
set_enable_guard_collectives = agree_on_guards

__all__ = [
    "allow_in_graph",
    "assume_constant_result",
    "compile",
    "config",
    "cudagraph_mark_step_begin",
    "cudagraph_mark_warmup_incomplete",
    "disable",
    "get_default_backend",
    "is_compiling",
    "is_dynamo_compiling",
    "is_exporting",
    "keep_portable_guards_unsafe",
    "keep_tensor_guards_unsafe",
    "list_backends",
    "load_cache_artifacts",
    "mark_static_address",
    "nested_compile_region",
    "nonstrict_trace",
    "reset",
    "run",
    "save_cache_artifacts",
    "set_default_backend",
    "set_enable_guard_collectives",
    "set_stance",
    "skip_all_guards_unsafe",
    "skip_frame",
    "skip_guard_on_all_nn_modules_unsafe",
    "skip_guard_on_globals_unsafe",
    "skip_guard_on_inbuilt_nn_modules_unsafe",
    "substitute_in_graph",
    "wrap_numpy",
]


def run(function: F) -> F:
    """Return a function that uses what is compiled already, and compiles nothing more."""

    @functools.wraps(function)
    def without_compiling(*args: Any, **kwargs: Any) -> Any:
        with set_stance("eager_on_recompile"):
            return function(*args, **kwargs)

    return without_compiling  # type: ignore[return-value]


def cudagraph_mark_warmup_incomplete() -> None:
    """Ask for another run before a CUDA graph is recorded: nothing to do, for weft tunes kernels
    while it compiles them."""


@checked
def mark_static_address(tensor: torch.Tensor, guard: bool = False) -> None:
    """Say that a tensor stays where it is: accepted, since weft finds that out by itself.

    A recorded CUDA graph reads an input in its place until a call passes another address, and then
    copies that input alone.
    """


def wrap_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function on NumPy arrays as one on tensors; they share memory."""

    @functools.wraps(function)
    def on_tensors(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_map(_as_array, (args, kwargs))
        return pytree.tree_map(_as_tensor, function(*given[0], **given[1]))

    return on_tensors


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if hasattr(value, "__array__") else value
