"""Each row of the table of scalar operations has a C form, a Triton form and an error bound."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_programs import buffer, program
from scalar_operands import (
    CANCELS,
    COUNT,
    EXACT,
    INTEGER_ONLY,
    ROUNDED,
    dtypes_of,
    kernel_of,
)
from weft_codegen.kernels import compile_program
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.program import Launch

CUBIN = """
import sys; sys.path.insert(0, {here!r})
from scalar_operands import kernel_of
from weft_codegen.kernels.triton.jit import SM90, compile_phase
from weft_codegen.kernels.triton.emit import emit
names = sys.argv[1:]
for some in (names[n : n + 16] for n in range(0, len(names), 16)):
    kernel = emit(kernel_of(some))
    for phase in kernel.phases:
        assert compile_phase(kernel, phase, target=SM90).asm["cubin"], some
    print(*some)
"""


def test_each_has_an_error_bound() -> None:
    sets = [INTEGER_ONLY, EXACT, set(ROUNDED), CANCELS]
    assert sorted(name for names in sets for name in names) == sorted(OPS)


@pytest.mark.cc
def test_each_has_a_c_form() -> None:
    kernel = kernel_of(list(OPS))
    names = [param.name for param in kernel.params]
    buffers = [buffer(param.name, COUNT, dtype=param.dtype) for param in kernel.params]
    inputs = [param.name for param in kernel.params if not param.written]
    outputs = [f"out_{name}" for name in OPS]
    steps = [Launch("pointwise", tuple(names))]
    values = [torch.ones(COUNT, dtype=item.dtype) for item in buffers if item.name in inputs]
    results = compile_program(program(buffers, inputs, steps, outputs, kernel))(*values)
    for name, result in zip(OPS, results, strict=True):
        operands = [torch.ones(COUNT, dtype=dtype) for dtype in dtypes_of(name)]
        expected = OPS[name].reference(*operands)
        torch.testing.assert_close(result, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_each_has_a_triton_form() -> None:
    """Each compiles for a GPU, which needs none."""
    program = CUBIN.format(here=str(Path(__file__).parent))
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", program, *OPS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == list(OPS), done.stderr[-2000:]
