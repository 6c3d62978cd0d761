"""Layouts of buffers in generated C, and the description of a program (`weft_program`).

Dimensions that the compiler knows are in static tables, of which each stands once in a unit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weft_codegen.kernels.c_expr import index_c
from weft_codegen.kernels.externs import number_of
from weft_codegen.loops.index import ZERO, IndexExpr
from weft_codegen.loops.program import CPU, Buffer, BufferRef, Program

_Described = tuple[str, Buffer | IndexExpr | None]


def device_c(device: torch.device) -> str:
    """A device as two arguments."""
    return "WEFT_CPU" if device == CPU else f"WEFT_CUDA({device.index or 0})"


def element_c(buffer: Buffer, device: str = "") -> str:
    """Dtype and device of a buffer as arguments."""
    return f"{number_of(buffer.dtype)}, {device or device_c(buffer.device)}"


class Tables:
    """The tables of dimensions of one unit."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def lines(self) -> list[str]:
        """Their definitions."""
        return list(self._lines.values())

    def layout(self, buffer: Buffer, device: str = "") -> str:
        """Dimensions, dtype and device of a buffer as arguments."""
        return f"{self.dims(buffer)}, {element_c(buffer, device)}"

    def dims(self, buffer: Buffer) -> str:
        """The number of dimensions of a buffer, its sizes and its strides as arguments."""
        known = [self._known(dims) for dims in (buffer.shape, buffer.strides)]
        return ", ".join([str(len(buffer.shape)), *known])

    def _known(self, dims: tuple[IndexExpr, ...]) -> str:
        if all(dim.is_const for dim in dims):
            return self._table(dims)
        return f"(const int64_t[]){{{', '.join(map(index_c, dims))}}}"

    def _table(self, dims: tuple[IndexExpr, ...]) -> str:
        """The name of a table of dimensions, in which -1 stands for one that a call knows."""
        values = [str(dim.value) if dim.is_const else "-1" for dim in dims]
        name = "_".join(["dims", *(value.replace("-", "m") for value in values)])
        self._lines[name] = f"static const int64_t {name}[] = {{{', '.join(values) or '0'}}};"
        return name

    def description(self, program: Program) -> list[str]:
        """The definition of `weft_program`."""
        buffers, integer = program.buffers, {"size": ZERO}
        tables: dict[str, list[_Described]] = {
            "inputs": [(i.name, buffers.get(i.name, integer.get(i.kind))) for i in program.inputs],
            "outputs": [
                (o.name, buffers[o.name]) if isinstance(o, BufferRef) else ("", o)
                for o in program.outputs
            ],
            "constants": [(name, buffers[name]) for name in program.constants],
        }
        counts = ", ".join(str(len(values)) for values in tables.values())
        names = ", ".join(name if values else "NULL" for name, values in tables.items())
        rows = [line for name, values in tables.items() for line in self._values(name, values)]
        about = f"WEFT_ABI, {device_c(program.device)}, {counts}, {names}"
        return [*rows, "", f"const weft_description weft_program = {{{about}}};"]

    def _values(self, title: str, values: Iterable[_Described]) -> list[str]:
        """A table that describes inputs, outputs or constants."""
        rows = []
        for name, value in values:
            if isinstance(value, Buffer):
                tables = f"{self._table(value.shape)}, {self._table(value.strides)}"
                about = f"TENSOR, {element_c(value)}, {len(value.shape)}, {tables}"
            else:
                about = "NONE" if value is None else "INTEGER"
            rows.append(f'    {{"{name}", WEFT_{about}}},')
        return [f"static const weft_value {title}[] = {{", *rows, "};"] if rows else []
