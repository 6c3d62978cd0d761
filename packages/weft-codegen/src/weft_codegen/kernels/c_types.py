"""How a torch dtype is written in C: its type in memory, its type as a value, and its suffix.

Booleans are bytes in memory and _Bool as values; bfloat16 and float16 are their bits in both and
become float before any arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from weft_codegen.loops.expr import Number
from weft_codegen.loops.ops import DTYPES


@dataclass(frozen=True)
class CType:
    """One dtype in C; `suffix` is the {t} of the op table's templates."""

    memory: str
    value: str
    suffix: str
    bytes: int


HALVES = (torch.float16, torch.bfloat16)
_FLOATS = {torch.float32: "float", torch.float64: "double"} | dict.fromkeys(HALVES, "uint16_t")
# Kernels have no unsigned integers but bytes; the host passes them on.
_SUFFIXES = DTYPES | {torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64"}
C_TYPES: dict[torch.dtype, CType] = {
    dtype: CType(name, name, suffix, dtype.itemsize)
    for dtype, suffix in _SUFFIXES.items()
    for name in [_FLOATS.get(dtype, f"{str(dtype).removeprefix('torch.')}_t")]
}
C_TYPES[torch.bool] = CType("uint8_t", "_Bool", "b8", 1)
_NARROW = (torch.int8, torch.int16, torch.uint8, torch.uint16)


def literal(value: Number, dtype: torch.dtype) -> str:
    """`value` as a C constant of `dtype`."""
    if dtype in HALVES:
        bits = torch.tensor(value, dtype=dtype).view(torch.int16).item()
        return f"0x{int(bits) & 0xFFFF:04x}"
    if dtype.is_floating_point:
        return _float_literal(float(value), "f" if dtype is torch.float32 else "")
    value = int(value)
    if value == -(2**63):
        return "(-9223372036854775807LL - 1)"
    text = f"{value}{'' if abs(value) < 2**31 else 'LL' if value < 2**63 else 'ULL'}"
    return f"({text})" if value < 0 else text


def _float_literal(value: float, suffix: str) -> str:
    if suffix:
        value = torch.tensor(value, dtype=torch.float32).item()
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value):
        return f"(-__builtin_inf{suffix}())" if value < 0 else f"__builtin_inf{suffix}()"
    if suffix:
        texts = (f"{value:.{digits}g}" for digits in (6, 7, 8, 9))
        # The shortest one that reads back as the same float.
        text = next(t for t in texts if torch.tensor(float(t), dtype=torch.float32).item() == value)
    else:
        text = repr(value)
    if not any(mark in text for mark in ".e"):
        text += ".0"
    text += suffix
    return f"({text})" if text.startswith("-") else text


def convert(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """C for the value `text` of dtype `source` as `target`; floats truncate towards integers."""
    if source in HALVES:
        text, source = f"{C_TYPES[source].suffix}_to_f32({text})", torch.float32
    if target is source:
        return text
    if target in HALVES:
        return f"f32_to_{C_TYPES[target].suffix}((float){text})"
    if target is torch.bool:
        return f"({text} != 0)"
    if source.is_floating_point and target in _NARROW:
        # Straight to a narrow type is undefined out of range; eager wraps around.
        return f"(({C_TYPES[target].value})(int32_t){text})"
    return f"(({C_TYPES[target].value}){text})"


def wrap(text: str, dtype: torch.dtype) -> str:
    """`text`, an arithmetic result of `dtype`, without C's promotion to int."""
    return f"(({C_TYPES[dtype].value}){text})" if dtype in _NARROW else text
