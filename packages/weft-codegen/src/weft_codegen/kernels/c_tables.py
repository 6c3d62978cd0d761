"""What generated C says of buffers (`weft_value`), and of the program (`weft_program`).

Of a buffer whose layout the compiler knows that is static data, else a literal where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weft_codegen.kernels.c_expr import index_c
from weft_codegen.kernels.externs import number_of
from weft_codegen.loops.index import ZERO, IndexExpr
from weft_codegen.loops.program import CPU, Buffer, BufferRef, Program

_Described = tuple[str, Buffer | IndexExpr | None]


class Tables:
    """The static data of one unit."""

    def __init__(self, program: Program) -> None:
        self._device = program.device
        self._lines: dict[str, str] = {}
        buffers, integer = program.buffers, {"size": ZERO}
        self._interface: dict[str, list[_Described]] = {
            "inputs": [(i.name, buffers.get(i.name, integer.get(i.kind))) for i in program.inputs],
            "outputs": [
                (o.name, buffers[o.name]) if isinstance(o, BufferRef) else ("", o)
                for o in program.outputs
            ],
            "constants": [(name, buffers[name]) for name in program.constants],
        }
        self._known = {
            described: f"{title}[{k}]"
            for title, values in self._interface.items()
            for k, described in enumerate(values)
        }

    def value(self, buffer: Buffer) -> str:
        """The address of what describes a buffer."""
        dims = (*buffer.shape, *buffer.strides)
        if not all(dim.is_const for dim in dims):
            return f"&(weft_value){_row(buffer, _literal(buffer.shape), _literal(buffer.strides))}"
        known = self._known.get((buffer.name, buffer))
        if known is None:
            known = f"v_{buffer.name}"
            self._lines[known] = f"static const weft_value {known} = {self._static(buffer)};"
        return f"&{known}"

    def lines(self) -> list[str]:
        """Its definition."""
        tables = [line for name, v in self._interface.items() for line in self._values(name, v)]
        counts = ", ".join(str(len(values)) for values in self._interface.values())
        names = ", ".join(name if values else "NULL" for name, values in self._interface.items())
        values = f"WEFT_ABI, {device_c(self._device)}, {counts}, {names}"
        program = f"const weft_description weft_program = {{{values}}};"
        return [*self._lines.values(), *tables, program]

    def _values(self, title: str, values: Iterable[_Described]) -> list[str]:
        """A table of inputs, outputs or constants."""
        rows = []
        for name, value in values:
            none = f'{{"{name}", WEFT_{"NONE" if value is None else "INTEGER"}}}'
            rows.append(f"    {self._static(value) if isinstance(value, Buffer) else none},")
        return [f"static const weft_value {title}[] = {{", *rows, "};"] if rows else []

    def _static(self, buffer: Buffer) -> str:
        return _row(buffer, self._table(buffer.shape), self._table(buffer.strides))

    def _table(self, dims: tuple[IndexExpr, ...]) -> str:
        """The name of a table of dimensions, in which -1 stands for one that a call knows."""
        values = [str(dim.value) if dim.is_const else "-1" for dim in dims]
        name = "_".join(["dims", *(value.replace("-", "m") for value in values)])
        self._lines[name] = f"static const int64_t {name}[] = {{{', '.join(values) or '0'}}};"
        return name


def device_c(device: torch.device) -> str:
    """Type and index of a device."""
    return "WEFT_CPU" if device == CPU else f"WEFT_CUDA({device.index or 0})"


def _row(buffer: Buffer, sizes: str, strides: str) -> str:
    element = f"{number_of(buffer.dtype)}, {device_c(buffer.device)}"
    layout = f"{len(buffer.shape)}, {sizes}, {strides}"
    return f'{{"{buffer.name}", WEFT_TENSOR, {element}, {layout}}}'


def _literal(dims: tuple[IndexExpr, ...]) -> str:
    return f"(const int64_t[]){{{', '.join(map(index_c, dims)) or '0'}}}"
