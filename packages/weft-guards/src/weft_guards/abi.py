"""How C reads torch: the file that knows offsets inside torch's objects and names it exports.

Offsets are found by searching for words that torch's Python interface reports, and all that C then
reads is validated against Python at first use. Where something is absent or differs, on any torch,
the Python form of checks does the work. docs/architecture/guards-checks.md explains it.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


@cache
def _library(name: str) -> ctypes.CDLL:
    """Return one of torch's own libraries, which is loaded already."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    prefix = "" if sys.platform == "win32" else "lib"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{prefix}{name}{suffix}"))


def _address(library: ctypes.CDLL, name: str) -> int | None:
    """Return the address of an exported function.

    Raises:
        AttributeError: when there is none of that name.
    """
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


# ---- tensors

_IMPL_BYTES = 192  # what is searched of a TensorImpl; the object itself is larger
_EXPORTS = ("get_dtype", "get_device_index", "get_dim", "get_sizes", "get_strides")


def _samples() -> list[torch.Tensor]:
    """Return tensors that differ in all that is read."""
    plain = torch.empty(2, 3)
    with torch.inference_mode():
        inference = torch.empty(5)
    return [
        plain,
        plain.t(),
        torch.empty(4, dtype=torch.int64),
        torch.empty(2, 3, 4, device="meta"),
        torch.empty(2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.empty(3)),
        torch.empty((), dtype=torch.bool),
        inference,
    ]


def dispatch_keys(tensor: torch.Tensor) -> int:
    """Return a tensor's dispatch key set: all that says which kernels it goes to."""
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys


def _words(address: int, size: int) -> memoryview:
    return memoryview(ctypes.string_at(address, size)).cast("Q")


def _offset(samples: Iterable[tuple[memoryview, Sequence[int]]]) -> int:
    """Return the one offset in bytes at which every piece of memory holds its expected words.

    Raises:
        LookupError: when there is none, or more than one.
    """
    found: set[int] | None = None
    for memory, wanted in samples:
        words, n = list(memory), len(wanted)
        here = {i * 8 for i in range(len(words)) if words[i : i + n] == list(wanted)}
        found = here if found is None else found & here
    if found is None or len(found) != 1:
        raise LookupError("no single offset")
    return found.pop()


def _configure_tensors(native: Any) -> bool:
    """Tell the extension how to read tensors; False when what it then reads is wrong."""
    samples = _samples()
    mask = (1 << 64) - 1
    handle = _offset(
        (_words(id(t), torch.Tensor.__basicsize__), [t._cdata & mask]) for t in samples
    )
    keys = _offset((_words(t._cdata, _IMPL_BYTES), [dispatch_keys(t)]) for t in samples)
    storage = _offset((_words(t._cdata, 64), [t.untyped_storage()._cdata & mask]) for t in samples)
    addresses = [_address(_library("torch_cpu"), f"aoti_torch_{name}") for name in _EXPORTS]
    requires_grad = torch._C.TensorBase.__dict__["requires_grad"]
    native.configure(handle, keys, storage, *_metadata(keys), requires_grad, *addresses)
    return all(native.describe(t)[1:] == (-1, dispatch_keys(t), tuple(t.shape)) for t in samples)


_REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"
_PAIRS: tuple[tuple[Any, Any], ...] = (
    # two ways to make a tensor, which differ in one property
    (lambda: torch.empty(2, 3), lambda: torch.empty(2, 4)),
    (lambda: torch.empty(2, 2), lambda: torch.empty(2, 2).t()),
    (lambda: torch.empty(2), lambda: torch.empty(2, dtype=torch.int32)),
    (lambda: torch.empty(2), lambda: torch.empty(2, device="meta")),
    (lambda: torch.empty(2, dtype=torch.cfloat), lambda: torch.empty(2, dtype=torch.cfloat).conj()),
)


def _metadata(keys: int) -> tuple[int, int]:
    """Return where a TensorImpl keeps sizes, strides and the rest, and what reads requires_grad.

    The sizes are found as the number of dimensions followed by them. What lies from there to the
    key set (at `keys`) must tell tensors apart that differ, by bytes which are the same in all that
    are alike: places for more dimensions hold anything. Zeros where that is not certain.
    """
    samples = [torch.empty(7, 11), torch.empty(5, 3, 2), torch.empty(13, 17, 19, 23)]
    try:
        offset = _offset((_words(t._cdata, _IMPL_BYTES), [t.dim(), *t.shape]) for t in samples)
        address = _address(_library("c10"), _REQUIRES_GRAD) or 0
    except (LookupError, AttributeError):
        return 0, 0

    def bytes_of(make: Any) -> list[set[int]]:
        alike = [make() for _ in range(4)]
        texts = [ctypes.string_at(one._cdata + offset, keys + 8 - offset) for one in alike]
        return list(map(set, zip(*texts)))

    certain = keys > offset and all(
        any(len(a) == len(b) == 1 and a != b for a, b in zip(*map(bytes_of, pair)))
        for pair in _PAIRS
    )
    return (offset, address) if certain else (0, 0)


@cache
def extension() -> ModuleType | None:
    """Return the C extension, ready for use; None where it is absent or cannot read tensors."""
    try:
        native = importlib.import_module("weft_guards._native")  # built where there is a compiler
        return native if _configure_tensors(native) else None
    except (ImportError, LookupError, OSError, AttributeError, KeyError, TypeError):
        return None


@cache
def dtype_number(dtype: torch.dtype) -> int:
    """Return libtorch's number of a dtype."""
    native: Any = extension()
    number: int = native.describe(torch.empty(0, dtype=dtype))[0]
    return number


# ---- state

_THREAD_KEYS = "_ZN3c104impl26raw_local_dispatch_key_setE"
_STATE_EXPORTS = (
    ("c10", "_ZN3c1031get_default_dtype_as_scalartypeEv"),
    ("torch_cpu", "_ZNK2at7Context23deterministicAlgorithmsEv"),
    ("torch_cpu", "_ZN2at13globalContextEv"),
    ("torch_cpu", "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv"),
    ("torch_cpu", "_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv"),
    ("c10", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"),
    ("torch_cpu", "aoti_torch_grad_mode_is_enabled"),
)


def _unpack(words: bytes) -> tuple[int, ...]:
    return struct.unpack("7Q", words)


def _state_in_python() -> tuple[int, ...]:
    """Return what the words of the state must be, as Python reports it."""
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        dtype_number(torch.get_default_dtype()),
        int(torch._C._get_deterministic_algorithms()),
        torch._C._len_torch_function_stack(),
        _handlers_off(),
        torch._C._len_torch_dispatch_stack(),
    )


def _handlers_off() -> int:
    return (
        int(not torch._C._is_torch_function_enabled()) + torch._C._is_torch_function_all_disabled()
    )


def _state_is_right(native: Any) -> bool:
    """Compare words with Python in several states; key sets are stored relative to a default."""
    first, expected = _unpack(native.state_words()), _state_in_python()
    for context in (torch.inference_mode(), torch.autocast("cpu"), torch.no_grad()):
        with context:
            words, wanted = _unpack(native.state_words()), _state_in_python()
        if any(a ^ b != c ^ d for a, b, c, d in zip(words, first, wanted, expected)):
            return False
    for handlers in (torch._C._EnableTorchFunction(), torch._C.DisableTorchFunctionSubclass()):
        with handlers:
            if _unpack(native.state_words())[5] != _handlers_off():
                return False
    return first[2:] == expected[2:]


@cache
def _state_extension() -> Any:
    """Return the extension when it reads torch's state right, or None."""
    native: Any = extension()
    if native is None or not hasattr(_library("c10"), "_handle"):
        return None
    try:
        addresses = [_address(_library(library), name) for library, name in _STATE_EXPORTS]
        native.configure_state(_library("c10")._handle, _THREAD_KEYS, *addresses)
        return native if native.state_words() and _state_is_right(native) else None
    except (AttributeError, OSError):
        return None


def state_words() -> bytes | None:
    """Return torch's present state (all that `payloads.TorchState` has) as opaque bytes.

    None when C cannot read it here.
    """
    native = _state_extension()
    words: bytes | None = native.state_words() if native is not None else None
    return words
