"""What a GPU's kernel is launched with: a driver that writes its arguments down stands in."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_programs import F32, buffer, pointwise
from triton_programs import GRAPHS
from triton_programs import program as program_of
from weft_codegen.kernels._entry import Kernel
from weft_codegen.kernels.build import Sources, build
from weft_codegen.kernels.load import CompiledGraph, describe
from weft_codegen.kernels.toolchain import find
from weft_codegen.kernels.triton.emit import emit
from weft_codegen.kernels.triton.gpu_host import GpuHostWriter
from weft_codegen.loops import interpret
from weft_codegen.loops.expr import apply, load
from weft_codegen.loops.index import axis, size
from weft_codegen.loops.program import BufferRef, Input, Launch, Program

DRIVER = """
long seen[11];
int failures, context;
int cuLaunchKernel(void *function, int x, int y, int z, int threads, int ty, int tz, int shared,
                   void *stream, void **values)
{
    const long now[] = {(long)function, x, y * z * ty * tz, threads, shared, (long)stream};
    for (int k = 0; k < 11; k++)
        seen[k] = k < 6 ? now[k] : *(long *)values[k - 6];
    return context ? failures : 201;
}
int cuDevicePrimaryCtxRetain(void **made, int device) { return *made = (void *)(device + 1L), 0; }
int cuCtxSetCurrent(void *given) { return context = (long)given, 0; }
"""


# Its kernels are functions of the process.
RUNNING = """
int cuLaunchKernel(void (*function)(void **), int x, int y, int z, int threads, int ty, int tz,
                   int shared, void *stream, void **values) { return function(values), 0; }
"""
Function = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))


def driver(text: str, folder: Path) -> Path:
    source, built = folder / "driver.c", folder / "driver.so"
    source.write_text(text)
    subprocess.run([*find().command, "-shared", "-fPIC", source, "-o", built], check=True)
    return built


def kernel_of(program: Program, name: str) -> Any:
    """A kernel of a program as a C function, which the reference interpreter runs."""
    step = next(s for s in program.steps if isinstance(s, Launch) and s.kernel == name)
    buffers = [program.buffers[buffer] for buffer in step.buffers]

    @Function
    def run(values: Any) -> None:
        tensors = []
        for item, value in zip(buffers, values, strict=False):
            memory = (ctypes.c_char * item.bytes.value).from_address(value.contents.value)
            tensors.append(torch.frombuffer(memory, dtype=item.dtype))
        interpret.run_kernel(program.kernels[name], tensors, {})

    return run


def launching(program: Program, load: Any) -> CompiledGraph:
    """A program whose kernels `load(name, number of a phase, aligned)` gives."""
    kernels = {name: emit(kernel) for name, kernel in program.kernels.items()}
    phases = [
        functools.partial(load, name, number)
        for name, kernel in kernels.items()
        for number in range(len(kernel.phases))
    ]
    host = GpuHostWriter(program, kernels, {}).text()
    known = describe(program, build(Sources(host, {})).stem)
    return CompiledGraph(known, tuple(program.constants.values()), phases)


def interpreted(program: Program, folder: Path) -> tuple[CompiledGraph, list[tuple[Any, ...]]]:
    """A program whose kernels the reference interpreter runs, and the kernels that it asks for."""
    built, asked = str(driver(RUNNING, folder)), []

    def load(name: str, number: int, aligned: bool) -> Kernel:
        asked.append((name, number, aligned))
        # The interpreter runs all phases of a kernel at once.
        function = Function(lambda values: None) if number else kernel_of(program, name)
        return Kernel(built, ctypes.cast(function, ctypes.c_void_p).value, 32, 0, 0, function)

    return launching(program, load), asked


@pytest.mark.sampled
@pytest.mark.parametrize("name", GRAPHS)
def test_a_program_in_c_launches_its_kernels(name: str, tmp_path: Path) -> None:
    made, inputs, eager = program_of(name)
    compiled, asked = interpreted(made, tmp_path)
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs), eager(*inputs), rtol=1e-5, atol=1e-4)
    assert len(asked) == len(set(asked))  # each once


def test_buffers_that_are_not_aligned_have_kernels_of_their_own(tmp_path: Path) -> None:
    made, (x, y), eager = program_of("concatenate")
    compiled, asked = interpreted(made, tmp_path)
    odd = torch.randn(x.numel() + 1)[1:].view(x.shape)
    torch.testing.assert_close(compiled(odd, y), eager(odd, y))
    assert {aligned for *_, aligned in asked} == {False}
    torch.testing.assert_close(compiled(x, y), eager(x, y))
    assert {aligned for *_, aligned in asked} == {False, True}


def test_a_launch_hands_addresses_and_sizes_to_the_driver(tmp_path: Path) -> None:
    built = driver(DRIVER, tmp_path)
    library = ctypes.CDLL(str(built))
    where = axis("i0", size("s0"))
    kernel = pointwise(apply("neg", load("a0", where, F32)), size("s0"), {"a0": F32}, ("s0",))
    buffers = {item.name: item for item in (buffer("x", size("s0")), buffer("y", size("s0")))}
    inputs, step = (Input("s0", "size"), Input("x")), Launch("pointwise", ("x", "y"), (size("s0"),))
    outputs = (BufferRef("y"),)
    made = Program(("s0",), inputs, {}, buffers, {"pointwise": kernel}, (step,), outputs)
    compiled = launching(made, lambda *_: Kernel(str(built), 77, 128, 4096, 2, object()))
    x = torch.ones(5000)
    (y,) = compiled(5000, x)
    expected = [77, 5, 1, 128, 4096, 0, x.data_ptr(), y.data_ptr(), 5000, 0, 0]
    assert list((ctypes.c_long * 11).in_dll(library, "seen")) == expected
    assert ctypes.c_int.in_dll(library, "context").value == 3  # device 2's

    ctypes.c_int.in_dll(library, "failures").value = 700
    compiled(0, x[:0])  # no program, no launch
    with pytest.raises(RuntimeError, match="CUDA error 700 "):
        compiled(5000, x)


def test_a_kernel_needs_a_driver_and_an_address(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        Kernel(str(tmp_path / "missing.so"), 1, 32, 0, 0, None)
    with pytest.raises(TypeError):
        Kernel(str(driver(DRIVER, tmp_path)), "address", 32, 0, 0, None)
    made, inputs, _ = program_of("softmax")
    with pytest.raises(TypeError, match="not a kernel"):
        launching(made, lambda *_: object())(*inputs)
