"""How an operator call is written in C.

mm, addmm, bmm and baddbmm write straight into planned memory; for others libtorch's C function is
found by the schema; what is left calls back into Python. A C function that fails is followed by the
Python call of the same step, so the user sees eager's exception.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from weft_codegen.kernels.c_expr import index_c
from weft_codegen.loops.index import ZERO, IndexExpr, const
from weft_codegen.loops.program import BufferRef, Buffers, Extern
from weft_codegen.loops.schedule.attention import ATTENTION, added_strides
from weft_codegen.loops.schedule.convolution import CONVOLUTION, convolution_sizes
from weft_codegen.loops.schedule.linear import LINEAR, added_stride
from weft_codegen.torch_compat import torch_library

_HEADERS = "include/torch/csrc/inductor/aoti_torch"
_aten = torch.ops.aten

DEVICE_TYPES = {"cpu": 0, "cuda": 1}
"""What libtorch's C functions call the devices that they are there for (c10/core/DeviceType.h)."""

# Their C functions have a twin that writes into given memory.
_OUT = (
    _aten.mm.default, _aten.mm.dtype, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default,
    *LINEAR, ATTENTION, CONVOLUTION,
)  # fmt: skip


_SUFFIXES = {torch.float32: "", torch.bfloat16: "_bf16", torch.float16: "_f16"}


class _NotRepresentable(Exception):
    """An argument that the C function cannot take; the step runs in Python."""


class Handle(str):
    """The C text of a tensor's handle, among the arguments of an operator."""


class Integer(str):
    """The C text of an int that is known when the program runs."""


def library_of_gpu() -> str:
    """The name of torch's own library that has a GPU's functions; the CPU's where there is none."""
    names = ("torch_cuda", "torch_hip", "torch_cpu")
    return next(name for name in names if Path(torch_library(name)).exists())


@functools.cache
def number_of(value: Any) -> int:
    """What libtorch's C functions call a dtype, layout or memory format."""
    name = f"aoti_torch_{type(value).__name__}_{str(value).removeprefix('torch.')}"
    function = getattr(ctypes.CDLL(torch_library("torch_cpu")), name, None)
    if function is None:
        raise _NotRepresentable(value)
    return int(function())


def results_of(op: Any) -> int:
    """How many tensors `op` returns; -1 when it returns anything else."""
    kinds = [str(item.type) for item in op._schema.returns]
    return len(kinds) if all(kind == "Tensor" for kind in kinds) else -1


def returns_views(step: Extern) -> bool:
    """Whether a result may share the memory of an argument."""
    return any(item.alias_info is not None for item in step.op._schema.returns)


def writes_into(step: Extern) -> bool:
    """Whether the step can write its result into memory that the plan chose."""
    return step.op in _OUT and step.results[0] is not None


def shim_call(
    step: Extern, args: Any, kwargs: dict[str, Any], floating: bool, device: str
) -> tuple[str, list[str]] | None:
    """libtorch's function for `step` and its arguments in C but for the results.

    None when the step has to run in Python.

    Args:
        args, kwargs: those of the step, with Handle and Integer for tensors and symbolic ints.
        floating: whether every tensor of the call is floating-point.
        device: the type of device that they are on; "" where it differs.
    """
    out = writes_into(step)
    name = _shim_name(step.op, device) + ("_out" if out else "")
    results = 1 if out else results_of(step.op)
    expected = shim_parameters().get(name)
    if expected is None or results < 0:
        return None
    try:
        arguments = list(_arguments(step.op, args, kwargs, floating))
    except _NotRepresentable:
        return None
    return (name, arguments) if len(arguments) + results == expected else None


def own_call(step: Extern, target: str, handles: Sequence[str], buffers: Buffers) -> str:
    """The call of weft's own function for the step; "" where there is none.

    Args:
        target, handles: the C text of the handles of the result, and of the operands.
    """
    _, write = OWN.get(step.op, ("", None))
    return write(step, target, handles, buffers) if write else ""


def _attention_call(step: Extern, target: str, handles: Sequence[str], buffers: Buffers) -> str:
    *operands, causal, scale = step.args
    q, k, v, *masks = (buffers[arg.name] for arg in operands if arg is not None)
    result = buffers[step.results[0] or ""]
    numbers = [*q.shape[:3], k.shape[2], q.shape[3], const(int(causal))]
    for one in (result, q, k, v):
        numbers += one.strides[:3]
    numbers += (added_strides(masks[0], q, k) if masks else None) or [ZERO] * 3
    data = [f"weft_data({handle})" for handle in (target, *handles)] + ["NULL"] * (not masks)
    factor = q.shape[3].value ** -0.5 if scale is None else scale
    sizes = f"(int64_t[]){{{', '.join(map(index_c, numbers))}}}"
    return f"weft_attention({', '.join(data)}, {sizes}, {_real(factor)})"


def _linear_call(step: Extern, target: str, handles: Sequence[str], buffers: Buffers) -> str:
    *added, left, right = (buffers[arg.name] for arg in step.args)
    strides = [added_stride(one, left.shape[0]) or ZERO for one in added] or [ZERO]
    numbers = (left.shape[0], right.shape[1], right.shape[0], *strides)
    numbers += (left.strides[0], right.strides[1])
    data = [f"weft_data({handle})" for handle in (target, *handles)]
    data[1:1] = [] if added else ["NULL"]
    name = f"weft_linear{_SUFFIXES[left.dtype]}"
    return f"{name}({', '.join([*data, *map(index_c, numbers)])})"


def _convolution_call(step: Extern, target: str, handles: Sequence[str], buffers: Buffers) -> str:
    data = [f"weft_data({handle})" for handle in (target, *handles)]
    data += ["NULL"] * (step.args[2] is None)
    sizes = ", ".join(map(str, convolution_sizes(step, buffers)))
    return f"weft_convolution({', '.join(data)}, (int64_t[]){{{sizes}}})"


# Of weft's own functions the header (without .h) that has it, and what writes its call.
OWN: dict[Any, tuple[str, Callable[..., str]]] = {
    ATTENTION: ("weft_attention", _attention_call),
    CONVOLUTION: ("weft_convolution", _convolution_call),
    **dict.fromkeys(LINEAR, ("weft_linear", _linear_call)),
}


def _shim_name(op: Any, device: str) -> str:
    name = op._schema.name.replace("mkldnn::_linear_pointwise", "aten::_linear_pointwise")
    name = name.removeprefix("aten::").replace("mkldnn::", "mkldnn_")
    if "::" in name:
        return ""
    overload = op._schema.overload_name
    return f"aoti_torch_{device}_{name}{'_' + overload if overload else ''}"


@functools.cache
def shim_parameters() -> dict[str, int]:
    """The number of parameters of each C function, from the headers that come with torch."""
    folder = Path(torch.__file__).parent / _HEADERS
    names = ("generated/c_shim_cpu.h", "generated/c_shim_cuda.h", "c/shim_cpu.h")
    text = "".join(path.read_text() for name in names if (path := folder / name).exists())
    found = re.findall(r"(aoti_torch_(?:cpu|cuda)_\w+)\(([^)]*)\)", text)
    return {name: parameters.count(",") + 1 for name, parameters in found}


def _arguments(op: Any, args: Any, kwargs: dict[str, Any], floating: bool) -> Iterator[str]:
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            value = args[position]
        else:
            value = kwargs.get(argument.name, argument.default_value)
        kind = str(argument.real_type).replace("SymInt", "int")
        optional = kind.startswith("Optional[")
        if optional:
            kind = kind.removeprefix("Optional[").removesuffix("]")
        if kind in ("number", "Scalar") and not floating and not isinstance(value, float):
            # The C functions take every Scalar as a double, which would promote an integer tensor.
            raise _NotRepresentable(value)
        if kind == "Generator" and value is None:
            yield "NULL"
        elif kind in _CONVERT:
            yield from _CONVERT[kind](value, optional)
        else:
            raise _NotRepresentable(kind)


def _one(ctype: str, text: Callable[[Any], str | int]) -> Callable[..., list[str]]:
    """An argument that is passed by address when it is optional."""

    def convert(value: Any, optional: bool) -> list[str]:
        if value is None and not optional:
            raise _NotRepresentable(value)  # a tensor that is undefined
        if value is None:
            return ["NULL"]
        return [f"({ctype}[]){{{text(value)}}}" if optional else str(text(value))]

    return convert


def _integer(value: Any) -> str:
    if isinstance(value, Integer):
        return value
    if isinstance(value, int):
        return f"{int(value)}LL"
    raise _NotRepresentable(value)


def _real(value: Any) -> str:
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53):
        number = float(value)
        if number - number == 0:
            return number.hex() if number % 1 else repr(number)
        return '__builtin_nan("")' if number != number else f"{'-' * (number < 0)}__builtin_inf()"
    raise _NotRepresentable(value)


def _flag(value: Any) -> str:
    return str(int(bool(value)))


def _string(value: Any) -> str:
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _many(ctype: str, text: Callable[[Any], str]) -> Callable[..., list[str]]:
    """A list argument: address and length."""

    def convert(value: Any, optional: bool) -> list[str]:
        if value is None:
            return ["NULL", "0LL"]
        items = value if isinstance(value, list | tuple) else [value]
        array = f"({ctype}[]){{{', '.join(map(text, items)) or '0'}}}"
        address = f"(const {ctype}*[]){{{array}}}" if optional else array
        return [address, f"{len(items)}LL"]

    return convert


def _handle(value: Any) -> str:
    if not isinstance(value, Handle):
        raise _NotRepresentable(value)
    return value


def _handle_address(value: Any) -> str:
    return "NULL" if value is None else f"(weft_tensor[]){{{_handle(value)}}}"


def _device(value: Any, optional: bool) -> list[str]:
    if value is None:
        return ["NULL", "0"]
    kind, index = torch.device(value).type, torch.device(value).index
    if kind not in DEVICE_TYPES or (kind != "cpu" and index is None):
        raise _NotRepresentable(value)
    number = DEVICE_TYPES[kind]
    return [f"(int32_t[]){{{number}}}" if optional else str(number), str(index or 0)]


_CONVERT: dict[str, Callable[..., list[str]]] = {
    "Tensor": _one("weft_tensor", _handle),
    "int": _one("int64_t", _integer),
    "float": _one("double", _real),
    "number": _one("double", _real),
    "Scalar": _one("double", _real),
    "bool": _one("int32_t", _flag),
    "str": _one("const char*", _string),
    "ScalarType": _one("int32_t", number_of),
    "Layout": _one("int32_t", number_of),
    "MemoryFormat": _one("int32_t", number_of),
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
    args: Any
    kwargs: dict[str, Any]

    def filled(self, tensors: Sequence[Any], ints: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments with `tensors` and `ints` in their slots."""
        pools = (tensors, ints)

        def fill(value: Any) -> Any:
            return pools[value.pool][value.position] if isinstance(value, _Slot) else value

        return fx.node.map_aggregate((self.args, self.kwargs), fill)

    @functools.cached_property
    def _places(self) -> list[tuple[int, _Slot]] | None:
        """Which arguments are slots, unless there are some inside of others."""
        whole = [(at, one) for at, one in enumerate(self.args) if isinstance(one, _Slot)]
        found: list[Any] = []
        fx.node.map_aggregate((self.args, self.kwargs), found.append)
        return whole if len(whole) == sum(isinstance(one, _Slot) for one in found) else None

    def __call__(self, tensors: list[Any], ints: list[int]) -> tuple[Any, ...]:
        """The results of the operator as a tuple."""
        if self._places is None:
            args, kwargs = self.filled(tensors, ints)
        else:
            args, kwargs = [*self.args], self.kwargs
            for at, slot in self._places:
                args[at] = (ints if slot.pool else tensors)[slot.position]
        result = self.op(*args, **kwargs)
        if isinstance(result, list | tuple):
            return tuple(result)
        return () if result is None else (result,)

    def __reduce__(self) -> tuple[Any, ...]:
        """Operators are pickled by name."""
        return _named_step, (str(self.op), self.args, self.kwargs)


def _named_step(name: str, args: Any, kwargs: dict[str, Any]) -> PythonStep:
    return PythonStep(operator.attrgetter(name)(torch.ops), args, kwargs)


def python_step(step: Extern) -> tuple[list[str], list[IndexExpr], PythonStep]:
    """The tensors and ints that the step needs, and a function of them that runs it."""
    tensors: list[str] = []
    ints: list[IndexExpr] = []

    def collect(value: Any) -> Any:
        if isinstance(value, BufferRef):
            tensors.append(value.name)
            return _Slot(0, len(tensors) - 1)
        if isinstance(value, IndexExpr):
            ints.append(value)
            return _Slot(1, len(ints) - 1)
        return value

    args, kwargs = fx.node.map_aggregate((step.args, dict(step.kwargs)), collect)
    return tensors, ints, PythonStep(step.op, args, kwargs)


@dataclass(frozen=True)
class _Slot:
    """A place in an argument list: tensor (pool 0) or int (pool 1) number `position`."""

    pool: int
    position: int
