"""Triton source to machine code, for this machine's GPU or, without one, for any.

With `TRITON_INTERPRET=1` (set before Triton is first imported) nothing is compiled, and a kernel
runs on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice as _gpu_libdevice
from triton.runtime.jit import type_canonicalisation_dict

from weft_codegen.kernels.triton.emit import Phase, TritonKernel
from weft_codegen.kernels.triton.interpreter import InterpretedLibdevice
from weft_codegen.kernels.triton.triton_expr import ALIGNED

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
    # Products and sums of operators that eager runs one by one are rounded one by one.
    return {"num_warps": phase.warps, "enable_fp_fusion": False}


def compile_phase(
    kernel: TritonKernel, phase: Phase, *, aligned: bool = True, target: GPUTarget | None = None
) -> Any:
    """One function, compiled for `target` (unless given, this machine's GPU).

    Args:
        aligned: the address of every buffer is a multiple of ALIGNED, which wide loads need.

    Returns:
        Triton's compiled kernel; `asm` holds its stages, ``{"ttir": text, "cubin": bytes, ...}``.

    Raises:
        RuntimeError: under TRITON_INTERPRET.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("unset TRITON_INTERPRET to compile for a GPU")
    formal = kernel.kernel
    signature = {
        param.name: f"*{type_canonicalisation_dict[str(param.dtype).removeprefix('torch.')]}"
        for param in formal.params
    }
    signature |= dict.fromkeys(formal.sizes, "i64")
    known = [["tt.divisibility", ALIGNED]]
    attrs = {(k,): known for k in range(len(formal.params))} if aligned else {}
    source = ASTSource(functions(kernel.source)[phase.name], signature, {}, attrs)
    return triton.compile(source, target=target, options=options(phase))
