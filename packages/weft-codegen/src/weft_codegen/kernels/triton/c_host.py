"""Writes the host of a program on one GPU in C, as kernels/host.py does for a CPU.

A kernel's launch is a call of the driver. Of each there are two variants: for buffers that begin at
multiples of `values.ALIGNED` bytes, and, compiled when some do not, for any.
"""

from __future__ import annotations

import torch

from weft_codegen.kernels.c_expr import index_c
from weft_codegen.kernels.externs import DEVICE_TYPES
from weft_codegen.kernels.host import HostWriter
from weft_codegen.kernels.load import plan_of
from weft_codegen.kernels.triton.emit import Phase, TritonKernel
from weft_codegen.kernels.triton.values import ALIGNED
from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.program import Extern, Launch, Program


def fits(program: Program, device: torch.device) -> bool:
    """Whether all is tensors on `device`, and no step waits for a result to decide on."""
    here = all(buffer.device == device for buffer in program.buffers.values())
    operators = [step for step in program.steps if isinstance(step, Extern)]
    plain = all(step.when is None and _gives_tensors(step) for step in operators)
    return here and plain and device.type in DEVICE_TYPES


def _gives_tensors(step: Extern) -> bool:
    """Whether no number that an operator returns (flash attention's lengths) is used."""
    returns = (str(item.type) for item in step.op._schema.returns)
    named = zip(step.results, returns, strict=False)
    return all(name is None or kind == "Tensor" for name, kind in named)


class GpuHostWriter(HostWriter):
    """Writes the host unit; `kernels` are the program's in Triton, in order of their phases."""

    stack = 0
    operators_choose = True

    def __init__(
        self, program: Program, kernels: dict[str, TritonKernel], device: torch.device
    ) -> None:
        super().__init__(program, plan_of(program), {}, device)
        self._kernels = kernels
        every = (phase for kernel in kernels.values() for phase in kernel.phases)
        self._numbers = {phase.name: number for number, phase in enumerate(every)}

    def text(self) -> str:
        """The whole unit, without the first include."""
        self._line("int aligned = 1;")
        index = self._device.index or 0
        self._line(f"void *const stream = weft_stream({index}), *none = NULL;")
        return super().text()

    def _pointer(self, name: str, text: str, *, always: bool = False) -> None:
        super()._pointer(name, text, always=always)
        if name in self._pointers:
            self._line(f"aligned &= (size_t)p_{name} % {ALIGNED} == 0;")

    def _call(self, step: Launch) -> None:
        places = [f"(void *)&p_{name}" for name in step.buffers]
        places += [f"&(int64_t){{{index_c(size)}}}" for size in step.sizes]
        values = ", ".join([*places, "&none", "&none"])  # scratch memory that these kernels lack
        formal = self._program.kernels[step.kernel].sizes
        sizes = dict(zip(formal, step.sizes, strict=True))
        for phase in self._kernels[step.kernel].phases:
            points = index_c(substitute(phase.grid, lambda atom: sizes.get(atom.key)))
            programs = _programs(phase, points)
            call = f"call, {self._numbers[phase.name]}, aligned, stream, {programs}"
            self._check(f"call->launch({call}, (void *[]){{{values}}})")

    def _opening(self) -> list[str]:
        return ['#include "weft_gpu.h"', "", *super()._opening()]

    def _prototypes(self) -> list[str]:
        return []


def _programs(phase: Phase, points: str) -> str:
    return f"(({points}) + {phase.block - 1}) / {phase.block}" if phase.block else points
