"""Guards to a register program for the C form of a check (`_native.c`).

Two tables say what C can do: how each source is fetched, and how each kind of guard is tested. A
guard that is in neither goes to the Python form. `abi` says whether C can be used at all.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from weft_guards import sources as src
from weft_guards.abi import dtype_number, extension, state_words
from weft_guards.config import settings
from weft_guards.guards import Guard
from weft_guards.payloads import ClassUse, DictKeys, MemoryUse, ShapeExpr, TensorSpec, WeakIdentity
from weft_guards.shapecode import NoCode, shape_code
from weft_guards.state import AUTOCAST, TorchState

MAX_AMOUNTS = 128  # as in _shape_vm.h
Row = tuple[int, int, int, Any]  # instruction, register read, number, object


def usable_extension() -> Any:
    """Return the C extension where it can be used and the settings want it, else None."""
    return extension() if settings.native_checks else None


class NotNative(Exception):
    """C has no instruction for this source or guard."""


# ---- the two tables


class Assembler:
    """Turns guards into rows; a source is fetched into one register, once."""

    def __init__(self, arg_names: Sequence[str], free_names: Sequence[str]) -> None:
        self.arguments = {name: index for index, name in enumerate(arg_names)}
        self.cells = {name: index for index, name in enumerate(free_names)}
        self.rows: list[Row] = []
        self.registers: dict[src.Source, int] = {}
        self.amounts: dict[src.Source, int] = {}
        self.dims: dict[src.Source, int] = {}  # of the tensors that were tested
        self.code: Any = extension()

    def fetch(self, source: src.Source) -> int:
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

    def amount(self, source: src.Source) -> int:
        """Return the number of the amount that a size, stride or int is read to.

        Raises:
            NotNative: when C cannot read it, or there are too many.
        """
        number = self.amounts.get(source)
        if number is None:
            if len(self.amounts) == MAX_AMOUNTS:
                raise NotNative
            if isinstance(source, src.TensorProperty):
                if source.prop == "storage_offset" or source.dim >= self.dims.get(source.base, 0):
                    raise NotNative  # not known to be a tensor that C reads
                code = getattr(self.code, source.prop.upper())
                row = (code, self.fetch(source.base), source.dim, None)
            else:
                row = (self.code.INT, self.fetch(source), 0, None)
            number = self.amounts[source] = len(self.amounts)
            self.rows.append(row)
        return number

    def add(self, guard: Guard) -> bool:
        """Write one guard; False, and nothing but harmless reads written, when C has no test."""
        maker = _TESTS.get(guard.kind)
        if maker is None:
            return False
        try:
            self.rows += maker(self, guard)
        except (NotNative, NoCode):
            return False
        return True


def _fetch_item(asm: Assembler, source: src.ItemSource) -> Row:
    base = asm.fetch(source.base)
    if type(source.key) is int and source.key >= 0:
        return (asm.code.INDEX, base, source.key, None)
    return (asm.code.ITEM, base, 0, source.key)


def _fetch_program(asm: Assembler, source: src.ProgramSource) -> Row:
    identity: WeakIdentity = source.identity
    return (asm.code.CONST if identity.immortal else asm.code.REF, 0, 0, identity.handle)


def _fetch_attr(asm: Assembler, source: src.AttrSource) -> Row:
    code = asm.code.CODE if source.name == "__code__" else asm.code.ATTR
    return (code, asm.fetch(source.base), 0, source.name)


def _fetch_call(asm: Assembler, source: src.CallSource) -> Row:
    if source.function is not operator.getitem:
        raise NotNative
    base, key = map(asm.fetch, source.arguments)
    return (asm.code.ITEM_OF, base, key, torch.Tensor.__hash__)


_FETCHES: dict[type, Callable[[Assembler, Any], Row]] = {
    src.LocalSource: lambda asm, s: (asm.code.ARG, 0, asm.arguments[s.name], None),
    src.ConstSource: lambda asm, s: (asm.code.CONST, 0, 0, s.value),
    src.GlobalsSource: lambda asm, s: (asm.code.GLOBALS, 0, 0, None),
    src.ClosureSource: lambda asm, s: (asm.code.CELL, 0, asm.cells[s.name], None),
    src.DictSource: lambda asm, s: (asm.code.DICT, asm.fetch(s.base), 0, None),
    src.AttrSource: _fetch_attr,
    src.TypeSource: lambda asm, s: (asm.code.TYPEOF, asm.fetch(s.base), 0, None),
    src.ItemSource: _fetch_item,
    src.CallSource: _fetch_call,
    src.GlobalSource: lambda asm, s: _fetch_item(asm, src.ItemSource(src.GlobalsSource(), s.name)),
    src.ModuleSource: lambda asm, s: _fetch_item(
        asm, src.ItemSource(src.ConstSource(sys.modules), s.name)
    ),
    src.ProgramSource: _fetch_program,
}


def _identity(strong: str, weak: str) -> Callable[[Assembler, Guard], list[Row]]:
    """Test for an object that lives for ever, or by a weak reference to it."""

    def rows(asm: Assembler, guard: Guard) -> list[Row]:
        identity: WeakIdentity = guard.payload
        code: int = getattr(asm.code, strong if identity.immortal else weak)
        return [(code, asm.fetch(guard.source), 0, identity.handle)]

    return rows


def _test_const(asm: Assembler, guard: Guard) -> list[Row]:
    value = guard.payload
    if value is None or isinstance(value, bool) or value is Ellipsis:
        return [(asm.code.IS, asm.fetch(guard.source), 0, value)]
    # Equality of floats confuses the zeros and never holds for NaN.
    if type(value) in (int, str, bytes) or (type(value) is float and value == value and value):
        return [(asm.code.EQUAL, asm.fetch(guard.source), 0, value)]
    raise NotNative


def _test_keys(asm: Assembler, guard: Guard) -> list[Row]:
    payload: DictKeys = guard.payload
    keys = tuple([key.handle if isinstance(key, WeakIdentity) else key for key in payload.keys])
    if not all(type(key) in (str, int, weakref.ref) for key in keys):
        raise NotNative
    return [(asm.code.KEYS, asm.fetch(guard.source), 0, keys)]


def _test_absent(asm: Assembler, guard: Guard) -> list[Row]:
    if type(guard.payload) is not str:
        raise NotNative
    (source,) = guard.sources()
    return [(asm.code.NOT_IN, asm.fetch(source), 0, guard.payload)]


def _test_state(asm: Assembler, guard: Guard) -> list[Row]:
    state: TorchState = guard.payload
    if AUTOCAST in dict(state.values) or state.words is None:
        raise NotNative
    return [(asm.code.STATE, 0, 0, state.words)]


def _test_grad_mode(asm: Assembler, guard: Guard) -> list[Row]:
    if state_words() is None:
        raise NotNative
    return [(asm.code.GRAD, 0, int(guard.payload), None)]


def _test_class(asm: Assembler, guard: Guard) -> list[Row]:
    use: ClassUse = guard.payload
    source = guard.source
    if not isinstance(source, src.ProgramSource) or (cls := source.identity.get()) is None:
        raise NotNative
    by_version = any(isinstance(wanted, int) for _, wanted in use.names)  # nothing else can tell
    if by_version and not use.version:
        raise NotNative
    again = None if by_version else use.holds
    return [(asm.code.CLASS, 0, 0, (weakref.ref(cls), use.version, again))]


def _test_namespace(asm: Assembler, guard: Guard) -> list[Row]:
    source = guard.source
    if not isinstance(source, src.ProgramSource) or (module := source.identity.get()) is None:
        raise NotNative
    test = partial(guard.payload.holds, module)
    return [(asm.code.NAMESPACE, 0, 0, (vars(module), test))]


def _test_alias(asm: Assembler, guard: Guard) -> list[Row]:
    first, second = map(asm.fetch, guard.sources())
    code = asm.code.IS_REG if guard.kind == "ALIAS" else asm.code.IS_NOT
    return [(code, first, second, None)]


def _test_memory(asm: Assembler, guard: Guard) -> list[Row]:
    use: MemoryUse = guard.payload
    if use.shared:
        raise NotNative
    written, read = [asm.fetch(s) for s in use.written], [asm.fetch(s) for s in use.read]
    rows: list[Row] = [(asm.code.MEMORY, 0, len(written) + len(read), None)]
    rows += [(asm.code.WRITES, register, 0, None) for register in written]
    return rows + [(asm.code.READS, register, 0, None) for register in read]


def _test_tensor(asm: Assembler, guard: Guard) -> list[Row]:
    spec: TensorSpec = guard.payload
    cls = spec.cls.get()
    if cls not in (torch.Tensor, torch.nn.Parameter) or len(spec.strides) != len(spec.sizes):
        raise NotNative
    index = -1 if spec.device.index is None else spec.device.index
    number = dtype_number(spec.dtype)
    asm.dims[guard.source] = len(spec.sizes)
    wanted = (cls, number, index, spec.keys, spec.requires_grad, spec.sizes, spec.strides)
    return [(asm.code.TENSOR, asm.fetch(guard.source), 0, wanted)]


def _test_shape(asm: Assembler, guard: Guard) -> list[Row]:
    condition: ShapeExpr = guard.payload
    amounts = [asm.amount(source) for source in condition.sources]
    return [(asm.code.SHAPE, 0, 0, shape_code(condition, amounts))]


_TESTS: dict[str, Callable[[Assembler, Guard], list[Row]]] = {
    "TYPE": _identity("TYPE", "TYPE_REF"),
    "ID": _identity("IS", "IS_REF"),
    "NONE": lambda asm, guard: [(asm.code.IS, asm.fetch(guard.source), 0, None)],
    "CONST": _test_const,
    "TENSOR": _test_tensor,
    "LEN": lambda asm, guard: [(asm.code.LENGTH, asm.fetch(guard.source), guard.payload, None)],
    "DICT_KEYS": _test_keys,
    "ATTR_ABSENT": _test_absent,
    "KEY_ABSENT": _test_absent,
    "ALIAS": _test_alias,
    "DISTINCT": _test_alias,
    "SHAPE": _test_shape,
    "CLASS": _test_class,
    "NAMESPACE": _test_namespace,
    "MEMORY": _test_memory,
    "GRAD_MODE": _test_grad_mode,
    "GLOBAL_STATE": _test_state,
}


# ---- calling compiled code with the inputs it reads from modules and containers

_READS = (src.AttrSource, src.DictSource, src.ItemSource, src.TypeSource)
_FEW = 8  # so few reads are made by bytecode as fast


class _Reads(Assembler):
    """Assembles reads alone; whatever is not a read is a root, which the caller passes."""

    def __init__(self) -> None:
        super().__init__((), ())
        self.roots: list[src.Source] = []

    def fetch(self, source: src.Source) -> int:
        looked_up = isinstance(source, src.CallSource) and source.function is operator.getitem
        if looked_up or isinstance(source, _READS) or source in self.registers:
            return super().fetch(source)
        register = self.registers[source] = len(self.registers)
        self.rows.append((self.code.ARG, 0, len(self.roots), None))
        self.roots.append(source)
        return register


def call_with(
    target: Callable[..., Any], sources: Sequence[src.Source]
) -> tuple[Callable[..., Any], list[src.Source]] | None:
    """Return a function that calls `target` with the values of sources, and what to pass it.

    A graph of many layers has hundreds of parameters for inputs. Reading each through its chain of
    dicts takes bytecode longer than the guards take, so C does it from the roots that the bytecode
    loads, and remembers what it read as a check does. The function takes None and then the values
    of the returned roots. None instead of the pair where that would gain nothing, or C cannot be
    used.
    """
    native = usable_extension()
    if native is None:
        return None
    reads = _Reads()
    registers = tuple([reads.fetch(source) for source in sources])
    if len(reads.rows) - len(reads.roots) <= _FEW:
        return None
    return native.Check(tuple(reads.rows), len(reads.roots), registers, target), reads.roots
