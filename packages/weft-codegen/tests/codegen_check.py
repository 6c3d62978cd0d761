"""Shared by the tests: run a function through the pipeline and compare with eager."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from weft_codegen.compile import make_program
from weft_codegen.config import Options, settings
from weft_codegen.kernels import compile_program
from weft_codegen.kernels.build import INCLUDE
from weft_codegen.kernels.toolchain import find, isa_flags
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.lower.decompose import decompositions
from weft_codegen.loops.program import Extern, Launch, Program
from weft_core.fake import fake_mode, make_shape_env, to_fake
from weft_core.tracing import trace_aten

# Flags of gcc for each width of lanes, and what the CPU needs to run it.
WIDTHS = {
    "four": (("-mno-avx",), ()),
    "eight": (("-mavx2", "-mfma"), ("avx2", "fma")),
    "sixteen": (("-mavx512f",), ("avx512f",)),
}


def of_width(width: str, name: str, folder: Path) -> Any:
    """A function of weft's own (include/NAME.h), compiled for lanes of a width; skips the test
    where this CPU cannot run it."""
    flags, needed = WIDTHS[width]
    source, built = folder / f"{name}.c", folder / f"{name}.so"
    exported = f'__attribute__((visibility("default"))) int {name}('
    text = (INCLUDE / f"{name}.h").read_text().replace(f"int {name}(", exported)
    source.write_text(f'#include "weft_kernel.h"\n{text}\nweft_team_t weft_team;\n')
    tools = find()
    kept = [flag for flag in tools.kernel_flags if not flag.startswith(("-march", "-mprefer"))]
    command = [*tools.command, *kept, *flags, f"-I{INCLUDE}", "-shared", source, "-o", built]
    subprocess.run(command, check=True)
    if not isa_flags().issuperset(needed):
        pytest.skip("compiled; this CPU cannot run it")
    return getattr(ctypes.CDLL(str(built)), name)


def trace(fn: Callable[..., Any], args: Sequence[Any]) -> torch.fx.GraphModule:
    """The aten graph of `fn` for tensors like `args`."""
    mode = fake_mode()
    fakes = [to_fake(mode, a) if isinstance(a, torch.Tensor) else a for a in args]
    with torch.no_grad():
        return trace_aten(fn, fakes, decompositions=decompositions())


def dynamic_trace(
    fn: Callable[..., Any], args: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The aten graph of `fn` with every size above one symbolic, and its fake inputs."""
    mode = fake_mode(make_shape_env())
    fakes = [
        to_fake(mode, arg, [dim for dim, n in enumerate(arg.shape) if n > 1], f"in{position}")
        for position, arg in enumerate(args)
    ]
    with torch.no_grad():
        return trace_aten(fn, fakes, decompositions=decompositions()), fakes


def with_lines(fn: Callable[..., Any]) -> torch.fx.GraphModule:
    """The torch-level graph of `fn`, each node with its source line."""
    return torch.fx.GraphModule(torch.nn.Module(), _LineTracer().trace(fn))


class _LineTracer(torch.fx.Tracer):
    record_stack_traces = True

    def _filter_traceback_frames(self, frames):
        return frames  # torch's own keeps those of a module's forward only


def program_of(fn: Callable[..., Any], *args: Any, fuse: bool = True) -> Program:
    """The verified program of `fn`."""
    with settings.patch(verify_ir=True):
        return make_program(trace(fn, args), args, Options(epilogue_fusion=fuse))


def launches(program: Program) -> int:
    """How many kernels one call runs."""
    return sum(isinstance(step, Launch) for step in program.steps)


def externs(program: Program) -> list[str]:
    """The operators called through the dispatcher."""
    return [str(step.op) for step in program.steps if isinstance(step, Extern)]


def clones(args: Sequence[Any]) -> list[Any]:
    """Copies with the same strides."""
    return [_clone(a) if isinstance(a, torch.Tensor) else a for a in args]


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def check(
    fn: Callable[..., Any],
    *args: Any,
    fuse: bool = True,
    interpret: bool = True,
    native: bool = False,
    **close: Any,
) -> Program:
    """Assert that interpreter (with `native`: C code) and eager agree on results and mutations.

    `fn` returns a tensor or a tuple of them.  Extra keywords go to assert_close.
    """
    program = program_of(fn, *args, fuse=fuse)
    expected_args = clones(args)
    expected = fn(*expected_args)
    expected = list(expected) if isinstance(expected, tuple | list) else [expected]
    runs = [lambda a: run_program(program, a)] if interpret else []
    if native:
        compiled = compile_program(program)
        runs.append(lambda a: compiled(*a))
    for run in runs:
        given = clones(args)
        results = run(given)
        assert len(results) == len(expected)
        for result, want in zip(results, expected):
            _assert_same(result, want, close)
        for after, want in zip(given, expected_args):
            if isinstance(want, torch.Tensor):
                _assert_same(after, want, close)
    return program


def _assert_same(result: torch.Tensor, want: torch.Tensor, close: dict[str, Any]) -> None:
    assert result.dtype == want.dtype
    assert result.shape == want.shape
    if want.numel():
        # The stride of a dimension of size one means nothing.
        for extent, got, expected in zip(want.shape, result.stride(), want.stride()):
            assert extent == 1 or got == expected
    assert_close(result, want, equal_nan=True, **close)
