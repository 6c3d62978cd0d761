"""Guards to a register program for the C form of a check (`_native.c`).

Two tables say what C can do: how each source is fetched, and how each kind of guard is tested. A
guard that is in neither goes to the Python form. Reading a tensor's metadata from C needs two
offsets inside torch's objects and the addresses of exported functions; they are searched for and
validated on live tensors at first use, and without them every check takes the Python form.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft_guards.guards import Guard
from weft_guards.payloads import STATE_READERS, DictKeys, Held, TensorSpec, TorchState
from weft_guards.sources import (
    AttrSource,
    ClosureSource,
    ConstSource,
    DictSource,
    GlobalSource,
    GlobalsSource,
    ItemSource,
    LocalSource,
    ModuleSource,
    Source,
    TypeSource,
)

Row = tuple[int, int, int, Any]  # instruction, register read, number, object


class NotNative(Exception):
    """C has no instruction for this source or guard."""


# ---- finding out how to read tensors

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


def _words(address: int, size: int) -> memoryview:
    return memoryview(ctypes.string_at(address, size)).cast("Q")


def _offset(words: Iterable[tuple[memoryview, int]]) -> int:
    """Return the one offset in bytes at which every piece of memory holds its expected word.

    Raises:
        LookupError: when there is none, or more than one.
    """
    found = None
    for memory, wanted in words:
        here = {index * 8 for index, word in enumerate(memory) if word == wanted}
        found = here if found is None else found & here
    if found is None or len(found) != 1:
        raise LookupError("no single offset")
    return found.pop()


def _configure(native: Any) -> bool:
    """Tell the extension how to read tensors; False when what it then reads is wrong."""
    samples = _samples()
    mask = (1 << 64) - 1
    handle = _offset((_words(id(t), torch.Tensor.__basicsize__), t._cdata & mask) for t in samples)
    keys = _offset(
        (_words(t._cdata, _IMPL_BYTES), torch._C._dispatch_keys(t).raw_repr()) for t in samples
    )
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    prefix = "" if sys.platform == "win32" else "lib"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{prefix}torch_cpu{suffix}"))
    addresses = [
        ctypes.cast(getattr(library, f"aoti_torch_{name}"), ctypes.c_void_p).value
        for name in _EXPORTS
    ]
    native.configure(handle, keys, *addresses, torch._C.TensorBase.__dict__["requires_grad"])
    return all(
        native.describe(t)[1:] == (-1, torch._C._dispatch_keys(t).raw_repr(), tuple(t.shape))
        for t in samples
    )


@cache
def extension() -> ModuleType | None:
    """Return the C extension, ready for use; None where it is absent or cannot read tensors."""
    try:
        native = importlib.import_module("weft_guards._native")  # built where there is a compiler
        return native if _configure(native) else None
    except (ImportError, LookupError, OSError, AttributeError, KeyError, TypeError):
        return None


@cache
def _dtype_number(dtype: torch.dtype) -> int:
    """Return libtorch's number of a dtype."""
    native: Any = extension()
    number: int = native.describe(torch.empty(0, dtype=dtype))[0]
    return number


# ---- the two tables


class Assembler:
    """Turns guards into rows; a source is fetched into one register, once."""

    def __init__(self, arg_names: Sequence[str], free_names: Sequence[str]) -> None:
        self.arguments = {name: index for index, name in enumerate(arg_names)}
        self.cells = {name: index for index, name in enumerate(free_names)}
        self.rows: list[Row] = []
        self.registers: dict[Source, int] = {}
        self.code: Any = extension()

    def fetch(self, source: Source) -> int:
        """Return the register of a source, having written the reads it needs.

        Raises:
            NotNative: when C cannot read it.
        """
        register = self.registers.get(source)
        if register is None:
            maker = _FETCHES.get(type(source))
            if maker is None:
                raise NotNative
            row = maker(self, source)
            register = self.registers[source] = len(self.registers)
            self.rows.append(row)
        return register

    def add(self, guard: Guard) -> bool:
        """Write one guard; False, and nothing but harmless reads written, when C has no test."""
        maker = _TESTS.get(guard.kind)
        if maker is None:
            return False
        try:
            self.rows += maker(self, guard)
        except NotNative:
            return False
        return True


def _fetch_item(asm: Assembler, source: ItemSource) -> Row:
    base = asm.fetch(source.base)
    if type(source.key) is int and source.key >= 0:
        return (asm.code.INDEX, base, source.key, None)
    return (asm.code.ITEM, base, 0, source.key)


def _fetch_global(asm: Assembler, source: GlobalSource) -> Row:
    return (asm.code.ITEM, asm.fetch(GlobalsSource()), 0, source.name)


def _fetch_module(asm: Assembler, source: ModuleSource) -> Row:
    return (asm.code.ITEM, asm.fetch(ConstSource(sys.modules)), 0, source.name)


_FETCHES: dict[type, Callable[[Assembler, Any], Row]] = {
    LocalSource: lambda asm, s: (asm.code.ARG, 0, asm.arguments[s.name], None),
    ConstSource: lambda asm, s: (asm.code.CONST, 0, 0, s.value),
    GlobalsSource: lambda asm, s: (asm.code.GLOBALS, 0, 0, None),
    ClosureSource: lambda asm, s: (asm.code.CELL, 0, asm.cells[s.name], None),
    DictSource: lambda asm, s: (asm.code.DICT, asm.fetch(s.base), 0, None),
    AttrSource: lambda asm, s: (asm.code.ATTR, asm.fetch(s.base), 0, s.name),
    TypeSource: lambda asm, s: (asm.code.TYPEOF, asm.fetch(s.base), 0, None),
    ItemSource: _fetch_item,
    GlobalSource: _fetch_global,
    ModuleSource: _fetch_module,
}


def _identity(asm: Assembler, register: int, held: Held, strong: int, weak: int) -> Row:
    if held.immortal:
        return (strong, register, 0, held.get())
    return (weak, register, 0, held.get)


def _test_type(asm: Assembler, guard: Guard) -> list[Row]:
    register = asm.fetch(guard.source)
    return [_identity(asm, register, guard.payload, asm.code.TYPE, asm.code.TYPE_REF)]


def _test_id(asm: Assembler, guard: Guard) -> list[Row]:
    register = asm.fetch(guard.source)
    return [_identity(asm, register, guard.payload, asm.code.IS, asm.code.IS_REF)]


def _test_const(asm: Assembler, guard: Guard) -> list[Row]:
    value = guard.payload
    if value is None or isinstance(value, bool) or value is Ellipsis:
        return [(asm.code.IS, asm.fetch(guard.source), 0, value)]
    # Equality of floats confuses the zeros and never holds for NaN.
    if type(value) in (int, str, bytes) or (type(value) is float and value == value and value):
        return [(asm.code.EQUAL, asm.fetch(guard.source), 0, value)]
    raise NotNative


def _test_keys(asm: Assembler, guard: Guard) -> list[Row]:
    keys: DictKeys = guard.payload
    if not all(type(key) is str for key in keys.keys):
        raise NotNative
    return [(asm.code.STR_KEYS, asm.fetch(guard.source), 0, keys.keys)]


def _test_absent(asm: Assembler, guard: Guard) -> list[Row]:
    if type(guard.payload) is not str:
        raise NotNative
    (source,) = guard.sources()
    base = DictSource(guard.source) if guard.kind == "ATTR_ABSENT" else source
    return [(asm.code.NOT_IN, asm.fetch(base), 0, guard.payload)]


def _test_state(asm: Assembler, guard: Guard) -> list[Row]:
    state: TorchState = guard.payload
    if state.autocast is not None:
        raise NotNative
    pairs = zip(STATE_READERS, state.values)
    return [(asm.code.STATE, 0, 0, (read, value)) for (_, read), value in pairs]


def _test_alias(asm: Assembler, guard: Guard) -> list[Row]:
    first, second = map(asm.fetch, guard.sources())
    return [(asm.code.IS_REG, first, second, None)]


def _test_tensor(asm: Assembler, guard: Guard) -> list[Row]:
    spec: TensorSpec = guard.payload
    cls = spec.cls.get()
    if cls not in (torch.Tensor, torch.nn.Parameter) or len(spec.strides) != len(spec.sizes):
        raise NotNative
    index = -1 if spec.device.index is None else spec.device.index
    keys = spec.dispatch_keys.raw_repr()
    number = _dtype_number(spec.dtype)
    wanted = (cls, number, index, keys, spec.requires_grad, spec.sizes, spec.strides)
    return [(asm.code.TENSOR, asm.fetch(guard.source), 0, wanted)]


_TESTS: dict[str, Callable[[Assembler, Guard], list[Row]]] = {
    "TYPE": _test_type,
    "ID": _test_id,
    "NONE": lambda asm, guard: [(asm.code.IS, asm.fetch(guard.source), 0, None)],
    "NOT_NONE": lambda asm, guard: [(asm.code.NOT_NONE, asm.fetch(guard.source), 0, None)],
    "CONST": _test_const,
    "TENSOR": _test_tensor,
    "LEN": lambda asm, guard: [(asm.code.LENGTH, asm.fetch(guard.source), guard.payload, None)],
    "DICT_KEYS": _test_keys,
    "ATTR_ABSENT": _test_absent,
    "KEY_ABSENT": _test_absent,
    "ALIAS": _test_alias,
    "GRAD_MODE": lambda asm, guard: [
        (asm.code.STATE, 0, 0, (torch.is_grad_enabled, guard.payload))
    ],
    "GLOBAL_STATE": _test_state,
}
