"""Differences between the supported versions of torch, and the check of newer ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from weft_core.events import notices

_APPLY: Any = vars(torch.autograd.Function)["apply"]
#: What `apply` of every autograd.Function is bound from: a class method of Python up to torch
#: 2.13, one of C from 2.14 on.
FUNCTION_APPLY: Any = getattr(_APPLY, "__func__", _APPLY)
#: The key in force in a backward pass with `is_grads_batched`, whose gradients have no memory.
BATCHED_GRADIENTS: Any = torch._C.DispatchKey.FuncTorchVmapMode
with suppress(RuntimeError):  # a key that a later torch may lack
    BATCHED_GRADIENTS = torch._C._dispatch_key_parse("VmapMode")
#: Which torch this is, for keys.
BUILD = torch.__version__, torch.version.git_version

NEWEST_TORCH = (2, 15)
"""The newest torch that the tests were run with; docs/coverage/versions.md has all of them."""


def grad_dtype(leaf: torch.Tensor) -> torch.dtype:
    """Return the dtype of a leaf's gradient, which from torch 2.10 on can be set."""
    dtype: torch.dtype = getattr(leaf, "grad_dtype", leaf.dtype)
    return dtype


def whole_spec(parameter: Any, whole: torch.Tensor | None = None) -> Any:
    """Return how fully_shard's unsharded parameter, or its gradient `whole`, lies on its own mesh.

    None where it is no DTensor. torch up to 2.12 calls it the spec of tensor parallelism.
    """
    if not hasattr(parameter, "_unsharded_dtensor_spec"):
        return getattr(parameter, "_tp_spec", None)
    given = parameter._unsharded_dtensor_spec
    return given if given is None or whole is None else parameter._get_unsharded_dtensor_spec(whole)


@functools.cache
def check_torch(version: str = torch.__version__) -> None:
    """Say once when torch is newer than what weft was tested with."""
    major, minor = (int(number) for number in version.split(".")[:2])
    if (major, minor) > NEWEST_TORCH:
        newest = ".".join(map(str, NEWEST_TORCH))
        text = "torch %s is newer than what this weft was tested with (up to %s): %s"
        notices.warning(text, version, newest, "what does not fit is switched off")


@contextmanager
def fits(subject: str) -> Iterator[None]:
    """Skip a feature that this version of torch does not support, with a notice."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        text = "%s switched off: not made for torch %s (%s)"
        notices.warning(text, subject, torch.__version__, reason)
