"""Load Triton source, launch it, run whole programs with it, and compile it without a GPU.

`run_program` is a host in Python: kernels go through Triton, everything else through the
dispatcher. It runs wherever the tensors are: on a GPU, or on CPU tensors in Triton's interpreter
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

from weft_codegen.kernels.triton.emit import Phase, TritonKernel, emit
from weft_codegen.kernels.triton.interpreter import InterpretedLibdevice
from weft_codegen.loops.index import IndexExpr, Size, evaluate
from weft_codegen.loops.program import Alias, Buffer, Extern, Kernel, Launch, Program, Ref

SM90 = GPUTarget("cuda", 90, 32)

_POINTER_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


libdevice = InterpretedLibdevice() if triton.knobs.runtime.interpret else _gpu_libdevice


@functools.cache
def _module(source: str) -> dict[str, Any]:
    """Execute generated source; `linecache` holds the text because Triton reads it back."""
    path = f"<weft triton {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    scope: dict[str, Any] = {"__name__": path}
    exec(compile(source, path, "exec"), scope)
    return scope


def _options(phase: Phase) -> dict[str, Any]:
    # Contraction to fma is what eager's own CUDA kernels are compiled with.
    return {"num_warps": phase.warps, "enable_fp_fusion": True}


def launch(
    kernel: TritonKernel, buffers: Sequence[torch.Tensor], sizes: Sequence[int] = ()
) -> None:
    """Run every phase of `kernel` on its buffers (in order of its parameters) and sizes."""
    named = dict(zip(kernel.kernel.sizes, sizes, strict=True))
    functions = _module(kernel.source)
    for phase in kernel.phases:
        programs = phase.programs(named)
        if programs > 0:
            functions[phase.name][(programs,)](*buffers, *sizes, **_options(phase))


def to_cubin(kernel: TritonKernel, target: GPUTarget = SM90) -> dict[str, Any]:
    """Compile every phase for `target` without a GPU: function name -> Triton's stages.

    The stages are a mapping such as ``{"ttir": text, "ptx": text, "cubin": bytes, ...}``.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("unset TRITON_INTERPRET to compile for a GPU")
    formal = kernel.kernel
    signature = {param.name: _POINTER_TYPES[param.dtype] for param in formal.params}
    signature |= dict.fromkeys(formal.sizes, "i64")
    functions = _module(kernel.source)
    return {
        phase.name: triton.compile(
            ASTSource(functions[phase.name], signature, {}),
            target=target,
            options=_options(phase),
        ).asm
        for phase in kernel.phases
    }


_emit_cached: Callable[[Kernel], TritonKernel] = functools.lru_cache(maxsize=4096)(emit)


def run_program(program: Program, inputs: Sequence[Any], device: Any = None) -> list[Any]:
    """Run `program` on tensors (and ints) in order of its inputs, its kernels through Triton.

    Returns the outputs in order: tensors, ints, or None. Inputs named by `program.mutations` are
    written. `device` (that of the first tensor input unless given) holds what the program makes.
    """
    tensors: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    for spec, value in zip(program.inputs, inputs, strict=True):
        if isinstance(value, torch.Tensor) and spec.kind == "tensor":
            tensors[spec.name] = value
            _bind_sizes(program.buffers[spec.name], value, sizes)
        elif spec.kind == "size":
            sizes[spec.name] = int(value)
    device = device or next((t.device for t in tensors.values()), torch.device("cpu"))
    for name, value in program.constants.items():
        tensors[name] = value.to(device)
    host = _Host(program, tensors, sizes, device)
    for step in program.steps:
        host.step(step)
    return [host.output(value) for value in program.outputs]


def _bind_sizes(buffer: Buffer, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
    for extent, actual in zip(buffer.shape, tensor.shape, strict=True):
        if len(extent.terms) == 1 and extent.terms[0][1] == 1 and len(extent.terms[0][0]) == 1:
            atom = extent.terms[0][0][0]
            if isinstance(atom, Size):
                sizes.setdefault(atom.key, actual)


class _Host:
    """The state of one run."""

    def __init__(
        self,
        program: Program,
        tensors: dict[str, torch.Tensor],
        sizes: dict[str, int],
        device: torch.device,
    ) -> None:
        self.program, self.tensors, self.sizes, self.device = program, tensors, sizes, device

    def number(self, where: IndexExpr) -> int:
        return int(evaluate(where, lambda atom: self.sizes[atom.key]))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a buffer, allocated at its first use."""
        if name not in self.tensors:
            buffer = self.program.buffers[name]
            shape = [self.number(extent) for extent in buffer.shape]
            strides = [self.number(stride) for stride in buffer.strides]
            self.tensors[name] = torch.empty_strided(
                shape, strides, dtype=buffer.dtype, device=self.device
            )
        return self.tensors[name]

    def step(self, step: Launch | Extern | Alias) -> None:
        """Execute one step."""
        if isinstance(step, Launch):
            kernel = _emit_cached(self.program.kernels[step.kernel])
            buffers = [self.tensor(name) for name in step.buffers]
            launch(kernel, buffers, [self.number(size) for size in step.sizes])
        elif isinstance(step, Alias):
            buffer, base = self.program.buffers[step.name], self.tensor(step.base)
            self.tensors[step.name] = base.as_strided(
                [self.number(extent) for extent in buffer.shape],
                [self.number(stride) for stride in buffer.strides],
                base.storage_offset() + self.number(step.offset),
            )
        else:
            kwargs = {name: self.argument(value) for name, value in step.kwargs}
            results = step.op(*(self.argument(value) for value in step.args), **kwargs)
            results = results if isinstance(results, tuple | list) else (results,)
            for name, result in zip(step.results, results, strict=False):
                if name is not None:
                    self.tensors[name] = result

    def argument(self, value: Any) -> Any:
        """An Extern's argument as the dispatcher takes it."""
        if isinstance(value, Ref):
            return self.tensor(value.name)
        if isinstance(value, IndexExpr):
            return self.number(value)
        if isinstance(value, list | tuple):
            return [self.argument(item) for item in value]
        return value

    def output(self, value: Any) -> Any:
        """An output of the program."""
        return self.argument(value)
