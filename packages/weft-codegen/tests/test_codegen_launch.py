"""What a GPU's kernel is launched with: a driver that writes its arguments down stands in."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from weft_codegen.kernels.toolchain import find
from weft_codegen.kernels.triton.load import new_launch

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


def test_a_launch_hands_addresses_and_sizes_to_the_driver(tmp_path: Path) -> None:
    source, built = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(DRIVER)
    subprocess.run([*find().command, "-shared", "-fPIC", source, "-o", built], check=True)
    library = ctypes.CDLL(str(built))
    launch = new_launch(77, 128, 4096, 2, 1, 2, object(), driver=str(built))
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
        new_launch(1, 32, 0, 1, 0, 0, None, driver=str(tmp_path / "missing.so"))
