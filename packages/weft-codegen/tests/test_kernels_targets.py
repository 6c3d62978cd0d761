"""The same C on other CPUs than this one: AVX2, plain SSE2, and NEON under an emulator.

Generated C names no instruction set, so it is compiled once more for each target as a program of
its own: it reads the inputs of every case, runs the kernels, and writes what they gave.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from codegen_check import program_of
from kernel_programs import unary
from scalar_operands import FLOAT, operands_of
from torch.utils._pytree import tree_leaves
from weft_codegen.kernels import toolchain
from weft_codegen.kernels.build import INCLUDE, KERNEL_HEADER
from weft_codegen.kernels.c_types import C_TYPES
from weft_codegen.kernels.emit_c import emit_kernel
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.program import BufferRef, Launch, Program

X86 = platform.machine() in ("x86_64", "AMD64")
_ARM = ("aarch64-linux-gnu-gcc", "-mcpu=neoverse-n1", "-static")
TARGETS = {
    "avx2": (("gcc", "-march=haswell"), (), X86 and "avx2" in toolchain.isa_flags()),
    "sse2": (("gcc", "-march=x86-64"), (), X86),
    "neon": (_ARM, ("qemu-aarch64-static",), True),
}
GRAPHS: dict[str, Callable[..., object]] = {
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sums": lambda x: (x.sum(0), x.sum(1), x.amax(0), x.argmax(1)),
    "transposed": lambda x: x + x[:, :37].t().contiguous().sum(0)[None, :1],
    "turned": lambda x: (x.t() + 1).contiguous(),
    "gelu": lambda x: F.gelu(x),
    "cumulative": lambda x: x.cumsum(1),
    "narrowed": lambda x: (x.bfloat16() * 2, x.half() + 1, x.double().sin(), x.int()),
}
Case = tuple[Program, list[torch.Tensor], list[torch.Tensor]]


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for dtype in (torch.float32, torch.float64):
        for name in FLOAT:
            operands = operands_of(name, dtype)
            expected = OPS[name].reference(*operands)
            program = unary(name, dtype, len(operands[0]))
            cases[f"{name}-{dtype}"] = (program, operands, [expected])
    torch.manual_seed(0)
    for name, function in GRAPHS.items():
        x = torch.randn(37, 131)
        cases[name] = (program_of(function, x), [x], tree_leaves(function(x)))
    return cases


def _source(cases: dict[str, Case]) -> str:
    """One C program that takes every case's inputs from stdin and puts its results on stdout."""
    kernels: dict[str, str] = {}
    declared, statements = [], []
    for number, (program, _, _) in enumerate(cases.values()):
        codes = {name: emit_kernel(kernel) for name, kernel in program.kernels.items()}
        kernels |= {code.symbol: code.text for code in codes.values()}
        for name, item in program.buffers.items():
            memory = C_TYPES[item.dtype].memory
            declared.append(f"static {memory} b{number}_{name}[{max(1, int(str(item.storage)))}];")
        for given in program.inputs:
            statements.append(f"FROM(b{number}_{given.name});")
        for step in program.steps:
            assert isinstance(step, Launch), step
            arguments = ", ".join(f"b{number}_{name}" for name in step.buffers)
            statements.append(f"{codes[step.kernel].symbol}({arguments});")
        for output in program.outputs:
            assert isinstance(output, BufferRef)
            statements.append(f"TO(b{number}_{output.name});")
    return "\n".join([
        f'#include "{KERNEL_HEADER}"', "weft_team_t weft_team;", *kernels.values(),
        "typedef struct _IO_FILE FILE; extern FILE *stdin, *stdout;",
        "size_t fread(void *, size_t, size_t, FILE *);",
        "size_t fwrite(const void *, size_t, size_t, FILE *);",
        "#define FROM(b) fread(b, sizeof b, 1, stdin)",
        "#define TO(b) fwrite(b, sizeof b, 1, stdout)",
        *declared, "int main(void)\n{", *statements, "return 0;\n}\n",
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_same_results_on(target: str, tmp_path: Path) -> None:
    command, emulator, usable = TARGETS[target]
    missing = [name for name in (command[0], *emulator) if shutil.which(name) is None]
    if missing or not usable:
        pytest.skip(f"needs {', '.join(missing) or 'another CPU'}")
    cases = _cases()
    path, binary = tmp_path / "main.c", tmp_path / "main"
    path.write_text(_source(cases))
    flags = ("-O3", *toolchain._QUICK, *toolchain._COMMON)
    subprocess.run([*command, *flags, "-I", INCLUDE, path, "-o", binary, "-lm"], check=True)
    sent = b"".join(x.contiguous().numpy().tobytes() for _, xs, _ in cases.values() for x in xs)
    done = subprocess.run([*emulator, binary], input=sent, capture_output=True, check=True)
    at, wrong = 0, {}
    for name, (_, _, expected) in cases.items():
        for wanted in expected:
            size = wanted.numel() * wanted.element_size()
            actual = torch.frombuffer(bytearray(done.stdout[at : at + size]), dtype=wanted.dtype)
            at += size
            try:
                _check(name, actual, wanted)
            except AssertionError as error:
                wrong[name] = str(error)
    assert at == len(done.stdout)
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def _check(name: str, actual: torch.Tensor, wanted: torch.Tensor) -> None:
    eps = torch.finfo(wanted.dtype).eps if wanted.dtype.is_floating_point else 0
    # As in test_kernels_math; sums add up in another order.
    atol = 1e-5 if name in GRAPHS else 4 * eps if name.startswith("logaddexp") else 1e-37
    torch.testing.assert_close(
        actual.reshape(wanted.shape), wanted, rtol=4 * eps, atol=atol, equal_nan=True
    )
