"""Load Triton source, launch it, run whole programs with it, and compile it without a GPU.

Kernels run wherever the tensors are: on a GPU, or on CPU tensors in Triton's interpreter
(`TRITON_INTERPRET=1`, set before Triton is first imported).
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice as _gpu_libdevice
from triton.runtime.jit import type_canonicalisation_dict

from weft_codegen.kernels.triton.emit import Phase, TritonKernel, emit
from weft_codegen.kernels.triton.interpreter import InterpretedLibdevice
from weft_codegen.loops import interpret
from weft_codegen.loops.program import Kernel, Program

SM90 = GPUTarget("cuda", 90, 32)

libdevice = InterpretedLibdevice() if triton.knobs.runtime.interpret else _gpu_libdevice


@functools.cache
def functions(source: str) -> dict[str, Any]:
    """What generated source defines; `linecache` holds the text because Triton reads it back."""
    path = f"<weft triton {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    scope: dict[str, Any] = {"__name__": path}
    exec(compile(source, path, "exec"), scope)
    return scope


def options(phase: Phase) -> dict[str, Any]:
    """Triton's options for one function."""
    # Contraction to fma is what eager's own CUDA kernels are compiled with.
    return {"num_warps": phase.warps, "enable_fp_fusion": True}


def launch(
    kernel: TritonKernel, buffers: Sequence[torch.Tensor], sizes: Sequence[int] = ()
) -> None:
    """Run every phase of `kernel` on its buffers (in order of its parameters) and sizes."""
    named = dict(zip(kernel.kernel.sizes, sizes, strict=True))
    found = functions(kernel.source)
    for phase in kernel.phases:
        programs = phase.programs(named)
        if programs > 0:
            found[phase.name][(programs,)](*buffers, *sizes, **options(phase))


def compile_phase(
    kernel: TritonKernel, phase: Phase, alignment: int, target: GPUTarget | None = None
) -> Any:
    """One function, compiled for `target` (unless given, this machine's GPU).

    Args:
        alignment: bytes that the address of every buffer is a multiple of.

    Returns:
        Triton's compiled kernel; `asm` holds its stages, ``{"ttir": text, "cubin": bytes, ...}``.
    """
    formal = kernel.kernel
    signature = {
        param.name: f"*{type_canonicalisation_dict[str(param.dtype).removeprefix('torch.')]}"
        for param in formal.params
    }
    signature |= dict.fromkeys(formal.sizes, "i64")
    attrs = {(k,): [["tt.divisibility", alignment]] for k in range(len(formal.params))}
    function = functions(kernel.source)[phase.name]
    source = ASTSource(function, signature, {}, attrs if alignment > 1 else {})
    return triton.compile(source, target=target, options=options(phase))


def to_cubin(kernel: TritonKernel, target: GPUTarget = SM90) -> dict[str, Any]:
    """Compile every phase for `target` without a GPU: function name -> Triton's stages."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("unset TRITON_INTERPRET to compile for a GPU")
    return {phase.name: compile_phase(kernel, phase, 16, target).asm for phase in kernel.phases}


_emit_cached: Callable[[Kernel], TritonKernel] = functools.lru_cache(maxsize=4096)(emit)


def run_program(program: Program, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of `program`, its kernels run through Triton (see `loops.interpret`)."""
    return interpret.run_program(program, inputs, _launch_in_place)


def _launch_in_place(
    kernel: Kernel, buffers: Sequence[torch.Tensor], sizes: dict[str, int]
) -> None:
    launch(_emit_cached(kernel), buffers, list(sizes.values()))
