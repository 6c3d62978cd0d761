"""What differs between the supported versions of torch: symbols, tensor objects, decompositions."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from weft_core.errors import BackendCompilerError

VERSION = torch.__version__
"""Which torch this is, for keys."""


def torch_library(name: str) -> str:
    """Return the path of one of torch's own shared libraries."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return str(Path(torch.__file__).parent / "lib" / f"lib{name}.{suffix}")


def missing(what: object) -> BackendCompilerError:
    """Return the error for something that this version of torch lacks."""
    return BackendCompilerError("codegen.load", f"torch {VERSION} has no {what}")


def entry_addresses() -> tuple[int, int, int, int, int]:
    """Return the addresses of functions that the extension `_entry` calls.

    They are THPVariable_Wrap, those that make and drop a handle, is_autocast_enabled, and the one
    that says whether a profiler is on (0 where there is none of these two).

    Raises:
        BackendCompilerError: when this version of torch lacks one of the others.
    """
    # THPVariable_Wrap took a `const at::TensorBase &`, and before torch 2.12 the same by value.
    wrap = _address("torch_python", "_Z16THPVariable_WrapRKN2at10TensorBaseE")
    wrap = wrap or _address("torch_python", "_Z16THPVariable_WrapN2at10TensorBaseE")
    new = _address("torch_cpu", "aoti_torch_new_tensor_handle")
    delete = _address("torch_cpu", "aoti_torch_delete_tensor_object")
    if not (wrap and new and delete):
        raise missing("THPVariable_Wrap" if not wrap else "aoti_torch_new_tensor_handle")
    autocast = "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE"
    callbacks = _address("torch_cpu", "_ZN2at12hasCallbacksEv")
    return wrap, new, delete, _address("torch_cpu", autocast), callbacks


def _address(library: str, name: str) -> int:
    """Return the address of a function in a library of torch; 0 where there is none."""
    function = getattr(ctypes.CDLL(torch_library(library)), name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def handle_offset() -> int:
    """Return where a Python tensor keeps its at::Tensor, in bytes from the start of the object.

    An at::Tensor is a pointer to the TensorImpl that `_cdata` gives, so it is found by value.

    Raises:
        BackendCompilerError: when it is not where any known torch keeps it.
    """
    probe = torch.empty(0)
    for offset in range(16, 64, 8):
        if ctypes.c_uint64.from_address(id(probe) + offset).value == probe._cdata:
            return offset
    raise missing("tensor layout that is known")


def clamps_to(bound: Any, device: torch.device) -> bool:
    """Say whether numbers are clamped to a lone bound: to NaN they are not in torch 2.11."""
    return not isinstance(bound, float) or not math.isnan(bound) or _clamps_to_nan(device)


@functools.cache
def _clamps_to_nan(device: torch.device) -> bool:
    return bool(torch.zeros(1, device=device).clamp(min=float("nan")).isnan())


def vector_norm(
    rule: Callable[..., Any], x: Any, order: Any = 2, dim: Any = None, *rest: Any, **options: Any
) -> Any:
    """Apply `rule`, the decomposition, which in torch 2.11 takes negative dims of a tensor of one
    element for others."""
    dims = None if dim is None else [d % max(x.dim(), 1) for d in dim]
    return rule(x, order, dims, *rest, **options)
