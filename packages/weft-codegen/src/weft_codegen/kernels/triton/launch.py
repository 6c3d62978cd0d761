"""From a loop program to a Python callable that launches Triton kernels where its tensors are.

Each function of a kernel is compiled ahead of its first call, for arguments that begin at
multiples of 16 bytes (what allocators give; wide loads need it), and once more if others come.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import triton
from weft_core import events, recording

from weft_codegen.kernels._entry import Kernel
from weft_codegen.kernels.build import Sources, build
from weft_codegen.kernels.emit_c import KernelCode, emit_kernel
from weft_codegen.kernels.externs import DEVICE_TYPES
from weft_codegen.kernels.load import CompiledGraph, describe
from weft_codegen.kernels.triton.emit import Phase, TritonKernel, emit
from weft_codegen.kernels.triton.gpu_host import GpuHostWriter, runs_on_cpu
from weft_codegen.kernels.triton.jit import compile_phase, functions, options
from weft_codegen.kernels.triton.triton_expr import ALIGNED, NoTritonForm
from weft_codegen.loops import program as ir

Launch = Callable[..., None]
Loader = Callable[[bool], Kernel | Launch]
"""Gives a function of a kernel, for aligned buffers or for any."""

_output_code = events.logger("codegen", "output_code")
_kernel_code = events.logger("codegen", "kernel_code")


def compile_program(program: ir.Program) -> CompiledGraph:
    """Compile `program` for the one device that its kernels' buffers are on.

    Raises:
        NoTritonForm: a kernel has no Triton form, or touches several devices.
        CompilerNotFound, BackendCompilerError: the host's source did not compile.
    """
    device = program.device
    if device.type not in DEVICE_TYPES:
        raise NoTritonForm(f"kernels on a device of type {device.type}")
    direct = not triton.knobs.runtime.interpret
    with events.span("codegen.emit"):
        kernels, codes = _emit(program)
        texts = {code.symbol: code.text for code in codes.values()}
        sources = Sources(GpuHostWriter(program, kernels, codes, direct=direct).text(), texts)
    recording.keep("source", lambda: _source_record(kernels, codes, sources.host))
    if events.enabled("output_code"):
        written = [kernel.source for kernel in kernels.values()]
        _output_code.info("%s", "\n\n".join([*written, *texts.values(), sources.host]))
    if events.enabled("kernel_code"):
        for kernel in kernels.values():
            _kernel_code.info("%s", kernel.source)
    phases = [(kernel, phase) for kernel in kernels.values() for phase in kernel.phases]
    with events.span("codegen.build"), ThreadPoolExecutor(os.cpu_count()) as pool:
        host = pool.submit(build, sources)
        # LLVM and ptxas leave Python's lock.
        loaders = list(pool.map(lambda pair: launcher(pair[0], pair[1], device), phases))
        if direct and not all(isinstance(load(True), Kernel) for load in loaders):
            direct = False
            text = GpuHostWriter(program, kernels, codes, direct=False).text()
            host = pool.submit(build, Sources(text, texts))
    known, constants = describe(program, host.result().stem), tuple(program.constants.values())
    if direct:
        return CompiledGraph(known, constants, loaders)
    of_phase = {phase.name: load for (_, phase), load in zip(phases, loaders, strict=True)}
    launches = {
        position: _launch_step(kernels[step.kernel], of_phase, device)
        for position, step in enumerate(program.steps)
        if isinstance(step, ir.Launch) and not runs_on_cpu(program, step)
    }
    return CompiledGraph(replace(known, steps=known.steps | launches), constants)


def _emit(program: ir.Program) -> tuple[dict[str, TritonKernel], dict[str, KernelCode]]:
    """The kernels in Triton, and those that run on the CPU in C."""
    kernels: dict[str, TritonKernel] = {}
    codes: dict[str, KernelCode] = {}
    for step in program.steps:
        if isinstance(step, ir.Launch):
            kernel = program.kernels[step.kernel]
            if runs_on_cpu(program, step):
                codes[step.kernel] = emit_kernel(kernel)
            elif step.kernel not in kernels:
                kernels[step.kernel] = emit(kernel, program.kernel_hints(step))
    return kernels, codes


def _source_record(
    kernels: dict[str, TritonKernel], codes: dict[str, KernelCode], host: str
) -> dict[str, Any]:
    """What a recording keeps of generated Triton, in the form of the CPU's record of C."""
    texts = {name: (name, kernel.source) for name, kernel in kernels.items()}
    texts |= {name: (code.symbol, code.text) for name, code in codes.items()}
    return {"language": "Triton", "kernels": texts, "host": host}


def _launch_step(
    kernel: TritonKernel, loaders: dict[str, Loader], device: torch.device
) -> Callable[[list[Any], list[int]], tuple[Any, ...]]:
    """What launches a kernel as a step in Python."""
    # A build for CPUs, where kernels are interpreted, has no streams.
    stream = "_cuda_getCurrentRawStream" if device.type == "cuda" else ""
    stream_of = functools.partial(getattr(torch._C, stream, int), device.index or 0)

    def launch(tensors: list[Any], sizes: list[int]) -> tuple[Any, ...]:
        known = dict(zip(kernel.kernel.sizes, sizes, strict=True))
        aligned = all(tensor.data_ptr() % ALIGNED == 0 for tensor in tensors)
        for phase in kernel.phases:
            run: Any = loaders[phase.name](aligned)
            run(stream_of(), phase.programs(known), *tensors, *sizes)
        return ()

    return launch


def launcher(kernel: TritonKernel, phase: Phase, device: torch.device) -> Loader:
    """What gives a Kernel that runs `phase`; where the driver is not CUDA's, or kernels are
    interpreted, a function of (stream, number of programs, *buffers, *sizes).

    Called with True, for buffers that all begin at multiples of `ALIGNED` bytes, which is
    compiled at once; with False for any, compiled when it is first asked for.
    """
    if triton.knobs.runtime.interpret:
        interpreted = functions(kernel.source)[phase.name]

        def interpret(_stream: int, programs: int, *args: Any) -> None:
            if programs > 0:
                interpreted[(programs,)](*args, **options(phase))

        return lambda aligned: interpret

    @functools.cache
    def load(aligned: bool) -> Kernel | Launch:
        with torch.cuda.device(device):
            return _loaded(compile_phase(kernel, phase, aligned=aligned), device.index or 0)

    load(True)
    return load


def _loaded(compiled: Any, device: int) -> Kernel | Launch:
    """A kernel that Triton compiled, on the current device."""
    compiled._init_handles()
    facts = compiled.metadata
    scratch = ("global_scratch_size", "profile_scratch_size")
    if facts.target.backend == "cuda" and not any(getattr(facts, name, 0) for name in scratch):
        shape = facts.num_warps * 32, facts.shared
        return Kernel("libcuda.so.1", compiled.function, *shape, device, compiled)

    def launch(stream: int, programs: int, *args: Any) -> None:
        if programs > 0:
            compiled[programs, 1, 1](*args, stream=stream)

    return launch
