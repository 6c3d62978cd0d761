"""What a GPU's kernel is launched with: a driver that writes its arguments down stands in."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_programs import GRAPHS, program
from weft_codegen.kernels.build import Sources, build
from weft_codegen.kernels.load import CompiledGraph, describe, new_kernel
from weft_codegen.kernels.toolchain import find
from weft_codegen.kernels.triton.c_host import GpuHostWriter
from weft_codegen.kernels.triton.emit import TritonKernel, emit
from weft_codegen.loops import interpret
from weft_codegen.loops.program import Launch, Program

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
        for buffer, value in zip(buffers, values, strict=False):
            memory = (ctypes.c_char * buffer.bytes.value).from_address(value.contents.value)
            tensors.append(torch.frombuffer(memory, dtype=buffer.dtype))
        interpret._run_kernel(program.kernels[name], tensors, {})

    return run


def in_c(program: Program, folder: Path) -> tuple[CompiledGraph, list[tuple[str, bool]]]:
    """A program whose host is in C, and the kernels that it asks for."""
    kernels = {name: emit(kernel) for name, kernel in program.kernels.items()}
    writer, asked = GpuHostWriter(program, kernels, torch.device("cpu")), []
    built = str(driver(RUNNING, folder))

    def phase(name: str, kernel: TritonKernel, number: int) -> Any:
        # The interpreter runs all phases of a kernel at once.
        function = Function(lambda values: None) if number else kernel_of(program, name)
        counts = len(kernel.kernel.params), len(kernel.kernel.sizes)
        address = ctypes.cast(function, ctypes.c_void_p).value
        launch = new_kernel(built, address, 32, 0, *counts, 0, function)
        return lambda aligned: asked.append((name, aligned)) or launch

    phases = [
        phase(name, kernel, number)
        for name, kernel in kernels.items()
        for number in range(len(kernel.phases))
    ]
    known = describe(program, build(Sources(writer.text(), {})).stem)
    return CompiledGraph(known, tuple(program.constants.values()), phases), asked


@pytest.mark.sampled
@pytest.mark.parametrize("name", GRAPHS)
def test_a_program_in_c_launches_its_kernels(name: str, tmp_path: Path) -> None:
    made, inputs, eager = program(name)
    compiled, asked = in_c(made, tmp_path)
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs)[0], eager(*inputs), rtol=1e-5, atol=1e-4)
    assert len(asked) == len(set(asked))  # each once


def test_buffers_that_are_not_aligned_have_kernels_of_their_own(tmp_path: Path) -> None:
    made, (x, y), eager = program("concatenate")
    compiled, asked = in_c(made, tmp_path)
    odd = torch.randn(x.numel() + 1)[1:].view(x.shape)
    torch.testing.assert_close(compiled(odd, y)[0], eager(odd, y))
    assert {aligned for _, aligned in asked} == {False}
    torch.testing.assert_close(compiled(x, y)[0], eager(x, y))
    assert {aligned for _, aligned in asked} == {False, True}


def test_a_launch_hands_addresses_and_sizes_to_the_driver(tmp_path: Path) -> None:
    built = driver(DRIVER, tmp_path)
    library = ctypes.CDLL(str(built))
    launch = new_kernel(str(built), 77, 128, 4096, 2, 1, 2, object())
    x, parameter = torch.ones(8)[3:], torch.nn.Parameter(torch.ones(2))
    launch(5, 64, x, parameter, -(2**40))
    addresses = [x.data_ptr(), parameter.data_ptr()]
    expected = [77, 64, 1, 128, 4096, 5, *addresses, -(2**40), 0, 0]
    assert list((ctypes.c_long * 11).in_dll(library, "seen")) == expected
    assert ctypes.c_int.in_dll(library, "context").value == 3  # device 2's

    ctypes.c_int.in_dll(library, "failures").value = 700
    launch(0, 0, x, x, 0)  # no program, no launch
    with pytest.raises(RuntimeError, match="CUDA error 700 "):
        launch(0, 1, x, x, 0)
    with pytest.raises(RuntimeError, match="CUDA error 1 "):
        launch(0, 2**31, x, x, 0)
    with pytest.raises(TypeError, match="takes 5 arguments, got 4"):
        launch(0, 1, x, x)
    with pytest.raises(TypeError):
        launch(0, 1, x, x, "size")
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        new_kernel(str(tmp_path / "missing.so"), 1, 32, 0, 1, 0, 0, None)
