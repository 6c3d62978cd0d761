"""Generated libraries are plain C: a C program calls them, without Python in its process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from kernel_programs import buffer, program, softmax_program
from weft_codegen import get_include
from weft_codegen.kernels import compile_program
from weft_codegen.kernels.toolchain import find
from weft_codegen.loops.program import BufferRef, Extern
from weft_codegen.torch_compat import torch_library

pytestmark = pytest.mark.cc
SOURCE = Path(__file__).parent / "caller.c"


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("caller") / "caller"
    flags = ["-std=gnu11", "-Wall", "-Werror", f"-I{get_include()}"]
    subprocess.run([*find().command, *flags, SOURCE, "-o", built, "-ldl", "-lm"], check=True)
    return built


def run(caller: Path, library: Path) -> subprocess.CompletedProcess[str]:
    command = [caller, torch_library("torch_cpu"), library]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_c_calls_kernels_and_operators_of_libtorch(caller: Path) -> None:
    graph = compile_program(softmax_program(8, 16))
    done = run(caller, graph.path)
    assert done.returncode == 0, done.stderr
    x, w = (torch.arange(n, dtype=torch.float64).cos().float() for n in (8 * 16, 16 * 16))
    x, w = x.view(8, 16), w.view(16, 16)
    expected = [(x.softmax(-1) @ w).softmax(-1), x]
    for line, tensor in zip(done.stdout.splitlines(), expected, strict=True):
        actual = torch.tensor([float(word) for word in line.split()])
        torch.testing.assert_close(actual, tensor.flatten())


def test_a_step_that_needs_python_fails_with_a_message(caller: Path) -> None:
    roll = Extern(torch.ops.aten.roll.default, (BufferRef("x"), [1], [0]), (), ("y",))
    graph = compile_program(program([buffer("x", 6), buffer("y", 6)], ["x"], [roll], ["y"]))
    done = run(caller, graph.path)
    assert done.returncode == 2
    assert "libtorch cannot run step 0" in done.stderr


def test_a_library_names_nothing_of_python() -> None:
    assert b"Py" not in compile_program(softmax_program(8, 16)).path.read_bytes()
