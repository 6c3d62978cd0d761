"""From a loop program to a Python callable that launches Triton kernels where its tensors are.

Each function of a kernel is compiled ahead of its first call, for arguments that begin at
multiples of 16 bytes (what allocators give; wide loads need it), and once more if others come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime import driver
from weft_core import events

from weft_codegen.kernels.triton.build import compile_phase, functions, options
from weft_codegen.kernels.triton.emit import Phase, TritonKernel
from weft_codegen.kernels.triton.host import HostWriter, home
from weft_codegen.loops.program import Program

_output_code = events.logger("codegen", "output_code")


class TritonGraph:
    """A compiled program: call it with the program's inputs, get the list of its outputs."""

    def __init__(self, run: Callable[[list[Any]], list[Any]], device: torch.device) -> None:
        self._run, self._device = run, device

    def __call__(self, *args: Any) -> list[Any]:
        """The outputs for the inputs `args`."""
        return self.call_owning(list(args))

    def call_owning(self, args: list[Any]) -> list[Any]:
        """`self(*args)` that empties `args`, so that an input can die before the end."""
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            with torch.no_grad(), torch._C._DisableAutocast():
                return self._on_device(args)
        return self._on_device(args)

    def _on_device(self, args: list[Any]) -> list[Any]:
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self._run(args)
        return self._run(args)


def compile_program(program: Program) -> TritonGraph:
    """Compile `program` for the one device that its kernels' buffers are on.

    Raises:
        NoTritonForm: a kernel has no Triton form, or touches several devices.
    """
    with events.span("codegen.emit"):
        writer = HostWriter(program)
        text = writer.text()
        kernels = writer.kernels.values()
    if events.enabled("output_code"):
        sources = (kernel.source for kernel in kernels)
        _output_code.info("%s", "\n\n".join([*sources, text]))
    device = home(program)
    with events.span("codegen.build"):
        phases = [(kernel, phase) for kernel in kernels for phase in kernel.phases]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # LLVM and ptxas leave Python's lock
            built = pool.map(lambda pair: launcher(pair[0], pair[1], device), phases)
            launchers = {phase.name: run for (_, phase), run in zip(phases, built, strict=True)}
    scope = {
        "torch": torch,
        "empty_strided": torch.empty_strided,
        "increment_version": torch.autograd.graph.increment_version,
        "laid_out": _laid_out,
        **launchers,
        **writer.scope,
    }
    exec(compile(text, "<weft host>", "exec"), scope)
    return TritonGraph(scope["run"], device)


def launcher(kernel: TritonKernel, phase: Phase, device: torch.device) -> Callable[..., None]:
    """A function of (number of programs, aligned, *buffers, *sizes) that runs `phase`.

    `aligned` says whether every buffer begins at a multiple of `values.ALIGNED` bytes.
    """
    if triton.knobs.runtime.interpret:
        interpreted = functions(kernel.source)[phase.name]

        def interpret(programs: int, _aligned: bool, *args: Any) -> None:
            if programs > 0:
                interpreted[(programs,)](*args, **options(phase))

        return interpret
    compiled = {True: compile_phase(kernel, phase)}
    stream_of = driver.active.get_current_stream

    def launch(programs: int, aligned: bool, *args: Any) -> None:
        if programs <= 0:
            return
        if aligned not in compiled:
            compiled[aligned] = compile_phase(kernel, phase, aligned=False)
        compiled[aligned][programs, 1, 1](*args, stream=stream_of(device.index))

    return launch


def _laid_out(
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    what: str,
    copy: bool,
) -> torch.Tensor:
    """`tensor` with the strides that the program was compiled for.

    Raises:
        RuntimeError: another shape or dtype, or other strides of a tensor that the program writes.
    """
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype:
        found = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise RuntimeError(f"compiled graph: {what} is {found}, compiled for {shape} {dtype}")
    dims = zip(shape, tensor.stride(), strides, strict=True)
    if tensor.numel() == 0 or all(n == 1 or have == want for n, have, want in dims):
        return tensor
    if not copy:
        raise RuntimeError(f"compiled graph: {what} has other strides than it was compiled for")
    return torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device).copy_(tensor)
