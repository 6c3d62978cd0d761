"""From a loop program to a Python callable that launches Triton kernels where its tensors are.

Each function of a kernel is compiled ahead of its first call, for arguments that begin at
multiples of 16 bytes (what allocators give; wide loads need it), and once more if others come.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from weft_core import events

from weft_codegen.kernels._entry import Kernel
from weft_codegen.kernels.build import Sources, build
from weft_codegen.kernels.load import CompiledGraph, KernelLoader, describe, new_kernel
from weft_codegen.kernels.triton.build import compile_phase, functions, options
from weft_codegen.kernels.triton.c_host import GpuHostWriter, fits
from weft_codegen.kernels.triton.emit import Phase, TritonKernel
from weft_codegen.kernels.triton.host import PythonHostWriter, home
from weft_codegen.loops.program import Program

Launch = Callable[..., None]

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
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return self.call_owning(args)
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # the context manager takes 3 us
        try:
            return self._on_device(args)
        finally:
            torch._C._set_grad_enabled(grad)

    def _on_device(self, args: list[Any]) -> list[Any]:
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self._run(args)
        return self._run(args)


def compile_program(program: Program) -> CompiledGraph | TritonGraph:
    """Compile `program` for the one device that its kernels' buffers are on.

    Raises:
        NoTritonForm: a kernel has no Triton form, or touches several devices.
        CompilerNotFound, BackendCompilerError: the host's source did not compile.
    """
    device = home(program)
    with events.span("codegen.emit"):
        writer = PythonHostWriter(program)
        text = writer.text()
        in_c = GpuHostWriter(program, writer.kernels, device) if fits(program, device) else None
        c_text = in_c.text() if in_c else ""
    if events.enabled("output_code"):
        sources = [kernel.source for kernel in writer.kernels.values()]
        _output_code.info("%s", "\n\n".join([*sources, c_text or text]))
    phases = [(kernel, phase) for kernel in writer.kernels.values() for phase in kernel.phases]
    with events.span("codegen.build"), ThreadPoolExecutor(os.cpu_count()) as pool:
        host = pool.submit(build, Sources(c_text, {})) if in_c else None
        # LLVM and ptxas leave Python's lock.
        kernels = list(pool.map(lambda pair: launcher(pair[0], pair[1], device), phases))
    if host is not None and all(isinstance(k(True), Kernel) for k in kernels):
        known = describe(program, host.result().stem)
        graph = CompiledGraph(known, tuple(program.constants.values()), kernels)
        return graph if torch.cuda.device_count() == 1 else TritonGraph(graph.call_owning, device)
    # A build for CPUs, where kernels are interpreted, has no streams.
    stream = "_cuda_getCurrentRawStream" if device.type == "cuda" else ""
    current_stream = getattr(torch._C, stream, int)
    scope = {
        "torch": torch,
        "empty_strided": torch.empty_strided,
        "stream_of": functools.partial(current_stream, device.index or 0),
        "increment_version": torch.autograd.graph.increment_version,
        "laid_out": _laid_out,
        **{phase.name: kernel for (_, phase), kernel in zip(phases, kernels, strict=True)},
        **writer.scope,
    }
    exec(compile(text, "<weft host>", "exec"), scope)
    return TritonGraph(scope["run"], device)


def launcher(kernel: TritonKernel, phase: Phase, device: torch.device) -> KernelLoader:
    """What gives functions of (stream, number of programs, *buffers, *sizes) that run `phase`.

    Called with True, for buffers that all begin at multiples of `values.ALIGNED` bytes, which is
    compiled at once; with False for any, compiled when it is first asked for.
    """
    if triton.knobs.runtime.interpret:
        interpreted = functions(kernel.source)[phase.name]

        def interpret(_stream: int, programs: int, *args: Any) -> None:
            if programs > 0:
                interpreted[(programs,)](*args, **options(phase))

        return lambda aligned: interpret

    @functools.cache
    def load(aligned: bool) -> Launch:
        with torch.cuda.device(device):
            return _loaded(kernel, compile_phase(kernel, phase, aligned=aligned), device.index or 0)

    load(True)
    return load


def _loaded(kernel: TritonKernel, compiled: Any, device: int) -> Launch:
    """What launches a kernel that Triton compiled, on the current device."""
    compiled._init_handles()
    facts, formal = compiled.metadata, kernel.kernel
    scratch = ("global_scratch_size", "profile_scratch_size")
    if facts.target.backend == "cuda" and not any(getattr(facts, name, 0) for name in scratch):
        counts = len(formal.params), len(formal.sizes)
        shape = facts.num_warps * 32, facts.shared
        return new_kernel("libcuda.so.1", compiled.function, *shape, *counts, device, compiled)

    def launch(stream: int, programs: int, *args: Any) -> None:
        if programs > 0:
            compiled[programs, 1, 1](*args, stream=stream)

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
