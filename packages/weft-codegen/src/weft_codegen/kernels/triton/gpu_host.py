"""Writes the host of a program on one GPU, as kernels/host.py does for a CPU.

A kernel's launch is a call of the driver, which the caller makes (`launch` of weft.h). Each kernel
has two variants: for buffers that begin at multiples of `ALIGNED` bytes, and, compiled when
some do not, for any. Where only Python can launch kernels (Triton's interpreter, other drivers),
a launch is a step in Python. What runs on the CPU alone (steps that an optimizer counts) is C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft_codegen.kernels.c_expr import index_c
from weft_codegen.kernels.emit_c import KernelCode
from weft_codegen.kernels.host import HostWriter, pointer_c, step_arguments
from weft_codegen.kernels.triton.emit import TritonKernel
from weft_codegen.kernels.triton.triton_expr import ALIGNED, NoTritonForm
from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.index import ONE
from weft_codegen.loops.program import CPU, Launch, Program


def runs_on_cpu(program: Program, step: Launch) -> bool:
    """Whether a launch in a program of a GPU touches tensors of the CPU alone."""
    return {program.buffers[name].device for name in step.buffers} == {CPU} != {program.device}


class GpuHostWriter(HostWriter):
    """Writes the host unit.

    Args:
        kernels: those in Triton, in the order of their phases' numbers.
        codes: those that run on the CPU.
        direct: the driver launches kernels, not Python.
    """

    stack = 0
    operators_choose = True

    def __init__(
        self,
        program: Program,
        kernels: Mapping[str, TritonKernel],
        codes: Mapping[str, KernelCode],
        *,
        direct: bool = True,
    ) -> None:
        super().__init__(program, codes)
        self._kernels, self._direct = kernels, direct
        every = (phase for kernel in kernels.values() for phase in kernel.phases)
        self._numbers = {phase.name: number for number, phase in enumerate(every)}

    def text(self) -> str:
        """The whole unit, without the first include."""
        if self._direct:
            index = self._device.index or 0
            self._line("int aligned = 1;")
            self._line(f"void *const stream = weft_stream({index}), *none = NULL;")
        return super().text()

    def _pointer(self, name: str, text: str, *, always: bool = False) -> None:
        super()._pointer(name, text, always=always)
        here = self._program.buffers[name].device == self._device
        if self._direct and here and name in self._pointers:
            self._line(f"aligned &= (size_t){pointer_c(name)} % {ALIGNED} == 0;")

    def _call(self, position: int, step: Launch) -> None:
        if runs_on_cpu(self._program, step):
            super()._call(position, step)
            return
        copies = self._copies(step)
        if not self._direct:
            handles = [copies.get(name) or self._handle(name) for name in step.buffers]
            arguments = step_arguments(position, handles, [index_c(size) for size in step.sizes])
            self._check(f"weft_step({arguments}, 0, NULL)")
            return
        pointers = {name: f"(void *[]){{weft_data({slot})}}" for name, slot in copies.items()}
        values = [pointers.get(name, f"(void *)&{pointer_c(name)}") for name in step.buffers]
        values += [f"&(int64_t){{{index_c(size)}}}" for size in step.sizes]
        values += ["&none", "&none"]  # scratch memory that these kernels lack
        sizes = dict(zip(self._program.kernels[step.kernel].sizes, step.sizes, strict=True))
        for phase in self._kernels[step.kernel].phases:
            points = index_c(substitute(phase.grid, lambda atom: sizes.get(atom.key)))
            if phase.block:
                points = f"(({points}) + {phase.block - 1}) / {phase.block}"
            call = f"call, {self._numbers[phase.name]}, aligned, stream, {points}"
            self._check(f"weft_launch({call}, (void *[]){{{', '.join(values)}}})")

    def _copies(self, step: Launch) -> dict[str, str]:
        """Copies on the GPU of a launch's operands that are scalars of the CPU."""
        copies = {}
        params = self._program.kernels[step.kernel].params
        for name, param in zip(step.buffers, params, strict=True):
            buffer = self._program.buffers[name]
            if buffer.device == self._device:
                continue
            if buffer.device != CPU or buffer.storage != ONE or param.written:
                raise NoTritonForm(f"kernel {step.kernel} touches the memory of several devices")
            slot = copies[name] = self._slot("")
            copy = replace(buffer, name=f"{name}_copy", device=self._device)
            self._check(f"weft_copy(&{slot}, {self._handle(name)}, {self._tables.value(copy)})")
        return copies

    def _opening(self) -> list[str]:
        index = self._device.index or 0
        guard = f"    void *const guard = weft_set_device({index});"
        return ['#include "weft_gpu.h"', "", *super()._opening(), *([guard] * self._guarded)]

    def _closing(self) -> list[str]:
        *lines, last = super()._closing()
        restore = ["    weft_restore_device(guard);"] * self._guarded
        return [*lines[:-1], *restore, lines[-1], last]

    @property
    def _guarded(self) -> bool:
        """Whether the program sets the current device, which a thread has of CUDA."""
        return self._device.type == "cuda"
