"""How an operator call is written in C.

Three ways, the first that fits:
    out      mm, addmm, bmm, baddbmm write straight into planned memory
    shim     libtorch's C function for the operator; its parameters follow from the schema
    python   the host calls back into Python, which runs the operator like eager does

A shim that fails at run time is followed by the Python call of the same step, so that the user
sees eager's exception, and a shim that refuses what the operator accepts costs only time.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft_codegen.loops.index import IndexExpr
from weft_codegen.loops.program import Extern, Ref

_HEADERS = "include/torch/csrc/inductor/aoti_torch"
_aten = torch.ops.aten

OUT_FUNCTIONS: dict[Any, str] = {
    _aten.mm.default: "aoti_torch_cpu_mm_out",
    _aten.bmm.default: "aoti_torch_cpu_bmm_out",
    _aten.addmm.default: "aoti_torch_cpu_addmm_out",
    _aten.baddbmm.default: "aoti_torch_cpu_baddbmm_out",
}

# What a dtype is called in libtorch's C functions (c10::ScalarType).
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex32: 8,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e5m2fnuz: 25,
    torch.float8_e4m3fnuz: 26,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
}
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


class _NotRepresentable(Exception):
    """An argument that the C function cannot take; the step runs in Python."""


@dataclass(frozen=True)
class ShimCall:
    """A call of `function`: its arguments in C but for the results.

    out: whether the result is written into memory that the caller passes first.
    """

    function: str
    arguments: tuple[str, ...]
    out: bool


@dataclass(frozen=True)
class Writer:
    """How the host writes the pieces of a call: a tensor's handle and an int.

    floating: whether every tensor of the call is floating-point.
    """

    tensor: Callable[[str], str]
    integer: Callable[[IndexExpr], str]
    floating: bool


def results_of(op: Any) -> int:
    """How many tensors `op` returns; -1 when it returns anything else."""
    kinds = [str(item.type) for item in op._schema.returns]
    return len(kinds) if all(kind == "Tensor" for kind in kinds) else -1


def returns_views(step: Extern) -> bool:
    """Whether a result may share the memory of an argument."""
    return any(item.alias_info is not None for item in step.op._schema.returns)


def writes_into(step: Extern) -> bool:
    """Whether the step can write its result into memory that the plan chose."""
    return step.op in OUT_FUNCTIONS and step.results[0] is not None


def shim_call(step: Extern, write: Writer) -> ShimCall | None:
    """The C call for `step`, or None when it has to run in Python."""
    op = step.op
    out = writes_into(step)
    name = OUT_FUNCTIONS[op] if out else _shim_name(op)
    expected = shim_parameters().get(name)
    if expected is None or (not out and results_of(op) < 0):
        return None
    try:
        arguments = tuple(_arguments(step, write))
    except _NotRepresentable:
        return None
    if len(arguments) + (1 if out else results_of(op)) != expected:
        return None
    return ShimCall(name, arguments, out)


def _shim_name(op: Any) -> str:
    name = op._schema.name.removeprefix("aten::").replace("mkldnn::", "mkldnn_")
    if "::" in name:
        return ""
    overload = op._schema.overload_name
    return f"aoti_torch_cpu_{name}{'_' + overload if overload else ''}"


@functools.cache
def shim_parameters() -> dict[str, int]:
    """The number of parameters of each C function, from the headers that come with torch."""
    folder = Path(torch.__file__).parent / _HEADERS
    files = (folder / "generated" / "c_shim_cpu.h", folder / "c" / "shim_cpu.h")
    text = "".join(path.read_text() for path in files if path.exists())
    found = re.findall(r"(aoti_torch_cpu_\w+)\(([^)]*)\)", text)
    return {name: parameters.count(",") + 1 for name, parameters in found}


def bound_arguments(step: Extern) -> list[tuple[Any, Any]]:
    """(schema argument, value) for every argument of the operator, defaults included."""
    keywords = dict(step.kwargs)
    bound = []
    for position, argument in enumerate(step.op._schema.arguments):
        if position < len(step.args) and not argument.kwarg_only:
            value = step.args[position]
        elif argument.name in keywords:
            value = keywords[argument.name]
        else:
            value = argument.default_value
        bound.append((argument, value))
    return bound


def _arguments(step: Extern, write: Writer) -> list[str]:
    pieces: list[str] = []
    for argument, value in bound_arguments(step):
        kind = str(argument.real_type).replace("SymInt", "int")
        optional = kind.startswith("Optional[")
        if optional:
            kind = kind.removeprefix("Optional[").removesuffix("]")
        convert = _CONVERT.get(kind)
        if convert is None:
            if value is None and kind == "Generator":
                pieces.append("NULL")
                continue
            raise _NotRepresentable(kind)
        pieces += convert(value, optional, write)
    return pieces


def _tensor(value: Any, optional: bool, write: Writer) -> list[str]:
    if value is None:
        return ["NULL"]
    if not isinstance(value, Ref):
        raise _NotRepresentable(value)
    text = write.tensor(value.name)
    return [f"(weft_tensor[]){{{text}}}" if optional else text]


def _one(ctype: str, text: Callable[[Any, Writer], str]) -> Callable[..., list[str]]:
    """A scalar argument, passed by address when it is optional."""

    def convert(value: Any, optional: bool, write: Writer) -> list[str]:
        if value is None:
            return ["NULL"]
        piece = text(value, write)
        return [f"({ctype}[]){{{piece}}}" if optional else piece]

    return convert


def _integer(value: Any, write: Writer) -> str:
    if isinstance(value, IndexExpr):
        return write.integer(value)
    if isinstance(value, int):
        return f"{int(value)}LL"
    raise _NotRepresentable(value)


def _real(value: Any, write: Writer) -> str:
    del write
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53):
        number = float(value)
        if number - number == 0:
            return number.hex() if number % 1 else repr(number)
        return '__builtin_nan("")' if number != number else f"{'-' * (number < 0)}__builtin_inf()"
    raise _NotRepresentable(value)


def _scalar(value: Any, optional: bool, write: Writer) -> list[str]:
    # The C functions take every Scalar as a double, which would promote an integer tensor.
    if not isinstance(value, float) and not write.floating:
        raise _NotRepresentable(value)
    return _one("double", _real)(value, optional, write)


def _flag(value: Any, write: Writer) -> str:
    del write
    return str(int(bool(value)))


def _code(table: dict[Any, int]) -> Callable[[Any, Writer], str]:
    def text(value: Any, write: Writer) -> str:
        del write
        if value not in table:
            raise _NotRepresentable(value)
        return str(table[value])

    return text


def _string(value: Any, write: Writer) -> str:
    del write
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _many(ctype: str, text: Callable[[Any, Writer], str]) -> Callable[..., list[str]]:
    """A list argument: address and length."""

    def convert(value: Any, optional: bool, write: Writer) -> list[str]:
        if value is None:
            return ["NULL", "0LL"]
        items = value if isinstance(value, list | tuple) else [value]
        array = f"({ctype}[]){{{', '.join(text(item, write) for item in items) or '0'}}}"
        address = f"(const {ctype}*[]){{{array}}}" if optional else array
        return [address, f"{len(items)}LL"]

    return convert


def _handle(value: Any, write: Writer) -> str:
    if not isinstance(value, Ref):
        raise _NotRepresentable(value)
    return write.tensor(value.name)


def _handle_address(value: Any, write: Writer) -> str:
    return "NULL" if value is None else f"(weft_tensor[]){{{_handle(value, write)}}}"


def _device(value: Any, optional: bool, write: Writer) -> list[str]:
    del write
    if value is None:
        return ["NULL", "0"]
    if torch.device(value).type != "cpu":
        raise _NotRepresentable(value)
    return ["(int32_t[]){0}" if optional else "0", "0"]


_CONVERT: dict[str, Callable[..., list[str]]] = {
    "Tensor": _tensor,
    "int": _one("int64_t", _integer),
    "float": _one("double", _real),
    "number": _scalar,
    "Scalar": _scalar,
    "bool": _one("int32_t", _flag),
    "str": _one("const char*", _string),
    "ScalarType": _one("int32_t", _code(DTYPE_CODES)),
    "Layout": _one("int32_t", _code({torch.strided: 0})),
    "MemoryFormat": _one("int32_t", _code(_MEMORY_FORMATS)),
    "Device": _device,
    "List[int]": _many("int64_t", _integer),
    "List[bool]": _many("int32_t", _flag),
    "List[float]": _many("double", _real),
    "List[Tensor]": _many("weft_tensor", _handle),
    "List[Optional[Tensor]]": _many("weft_tensor*", _handle_address),
    "List[Optional[number]]": _many("double*", _handle_address),
}


# ---- the same step in Python ----


@dataclass(frozen=True)
class PythonStep:
    """Runs `op` with tensors and ints in the slots of its arguments, like eager does."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def __call__(self, tensors: list[Any], ints: list[int]) -> tuple[Any, ...]:
        """The results of the operator as a tuple."""
        pools: tuple[Sequence[Any], ...] = (tensors, ints)
        filled = {name: _fill(value, pools) for name, value in self.kwargs.items()}
        result = self.op(*_fill(self.args, pools), **filled)
        if isinstance(result, list | tuple):
            return tuple(result)
        return () if result is None else (result,)

    def __reduce__(self) -> tuple[Any, ...]:
        """Operators are pickled by name."""
        return _named_step, (str(self.op), self.args, self.kwargs)


def _named_step(name: str, args: list[Any], kwargs: dict[str, Any]) -> PythonStep:
    return PythonStep(operator.attrgetter(name)(torch.ops), args, kwargs)


def python_step(step: Extern) -> tuple[list[str], list[IndexExpr], PythonStep]:
    """The tensors and ints that the step needs, and a function of them that runs it."""
    tensors: list[str] = []
    ints: list[IndexExpr] = []

    def collect(value: Any) -> Any:
        if isinstance(value, Ref):
            tensors.append(value.name)
            return _Slot(0, len(tensors) - 1)
        if isinstance(value, IndexExpr):
            ints.append(value)
            return _Slot(1, len(ints) - 1)
        if isinstance(value, list | tuple):
            return type(value)(collect(item) for item in value)
        return value

    args = collect(list(step.args))
    kwargs = {name: collect(value) for name, value in step.kwargs}
    return tensors, ints, PythonStep(step.op, args, kwargs)


@dataclass(frozen=True)
class _Slot:
    """A place in an argument list: tensor (pool 0) or int (pool 1) number `position`."""

    pool: int
    position: int


def _fill(value: Any, pools: tuple[Sequence[Any], ...]) -> Any:
    if isinstance(value, _Slot):
        return pools[value.pool][value.position]
    if isinstance(value, list | tuple):
        return type(value)(_fill(item, pools) for item in value)
    return value
