"""Triton kernels: right in the interpreter, and compiled down to sm_90 machine code without a GPU.

Triton decides at import whether it interprets, so each half runs in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton_kernels import CASES, softmax
from triton_programs import GRAPHS, SYMBOLIC, symbolic_program, symbolic_sizes
from weft_codegen.compile import make_program
from weft_codegen.kernels.build import Sources, build
from weft_codegen.kernels.triton.emit import NoTritonForm, emit
from weft_codegen.kernels.triton.gpu_host import GpuHostWriter
from weft_codegen.kernels.triton.launch import compile_program
from weft_codegen.loops.program import Buffer, Extern, Input, Launch

HERE = Path(__file__).parent

_INTERPRET = """
import sys; sys.path.insert(0, {here!r})
import torch
from triton_kernels import CASES
from weft_codegen.kernels.triton.emit import emit
from weft_codegen.kernels.triton.launch import launcher
torch.manual_seed(0)
for name, case in CASES.items():
    *inputs, out = buffers = case.inputs()
    emitted = emit(case.kernel)
    sizes = dict(zip(case.kernel.sizes, case.sizes))
    for phase in emitted.phases:
        launcher(emitted, phase, out.device)(True)(0, phase.programs(sizes), *buffers, *case.sizes)
    expected = case.reference(*inputs)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5), (name, out, expected)
    print(name, "ok")
"""

_CUBIN = """
import sys; sys.path.insert(0, {here!r})
from triton_kernels import CASES
from weft_codegen.kernels.triton.emit import emit
from weft_codegen.kernels.triton.jit import SM90, compile_phase
for name, case in CASES.items():
    kernel = emit(case.kernel)
    for phase in kernel.phases:
        stages = compile_phase(kernel, phase, target=SM90).asm
        assert stages["cubin"][:4] == b"\\x7fELF", name
        assert ".target sm_90" in stages["ptx"], name
        print(name, "ok")
"""

_GRAPHS = """
import sys; sys.path.insert(0, {here!r})
import torch
from triton_programs import GRAPHS, program
from weft_codegen.kernels.triton.emit import emit
from weft_codegen.kernels.triton.jit import SM90, compile_phase
from weft_codegen.kernels.triton.launch import compile_program
for name in GRAPHS:
    prog, inputs, eager = program(name)
    assert prog.kernels, name
    if {interpret}:
        results = compile_program(prog)(*inputs)
        torch.testing.assert_close(results, eager(*inputs), rtol=1e-5, atol=1e-4, msg=name)
    else:
        for kernel in map(emit, prog.kernels.values()):
            for phase in kernel.phases:
                assert compile_phase(kernel, phase, target=SM90).asm["cubin"], name
    print(name, "ok")
"""

_SYMBOLIC = """
import sys; sys.path.insert(0, {here!r})
import torch
from torch.utils import _pytree as pytree
from triton_programs import SYMBOLIC, symbolic_program
from weft_codegen.kernels.triton.launch import compile_program
torch.manual_seed(0)
for name, (function, _, calls) in SYMBOLIC.items():
    compiled = compile_program(symbolic_program(name))
    for shape in calls:
        x = torch.randn(shape)
        expected = pytree.tree_leaves(function(x))
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-4, msg=name)
    print(name, "ok")
"""


def _run(program: str, interpret: bool) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-c", program.format(here=str(HERE), interpret=interpret)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_interpreted_kernels_equal_eager() -> None:
    printed = _run(_INTERPRET, interpret=True)
    assert printed.split()[::2] == list(CASES)


@pytest.mark.slow
def test_kernels_compile_to_cubin_without_a_gpu() -> None:
    printed = _run(_CUBIN, interpret=False)
    assert set(printed.split()[::2]) == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("interpret", [True, False])
def test_scheduled_graphs(interpret: bool) -> None:
    assert _run(_GRAPHS, interpret).split()[::2] == list(GRAPHS)


@pytest.mark.slow
def test_blocks_of_the_example_serve_other_sizes() -> None:
    assert _run(_SYMBOLIC, interpret=True).split()[::2] == list(SYMBOLIC)


def test_symbolic_rows_are_as_wide_as_in_the_example() -> None:
    program = symbolic_program("softmax")
    (launch,) = (step for step in program.steps if isinstance(step, Launch))
    kernel = program.kernels[launch.kernel]
    known, unknown = emit(kernel, program.kernel_hints(launch)), emit(kernel)
    assert "[8, 32]" in known.source and "[2048]" not in known.source
    assert "[2048]" in unknown.source
    assert known.phases[0].programs({"n0": 2100, "n1": 20}) == 263


def test_a_row_too_long_for_a_block_is_refused() -> None:
    with pytest.raises(NoTritonForm, match="does not fit one block"):
        emit(softmax(2, 100_000).kernel)


def test_a_program_is_one_row_or_a_block_of_elements() -> None:
    pointwise, rows = emit(CASES["pointwise"].kernel), emit(CASES["softmax"].kernel)
    assert pointwise.phases[0].programs({}) == -(-37 * 51 // 1024)
    assert rows.phases[0].programs({}) == 7


def test_a_kernel_of_the_cpu_in_a_program_of_a_gpu_is_c() -> None:
    with FakeTensorMode():
        fakes = [torch.empty(5), torch.empty(7, device="cuda")]
        graph = make_fx(lambda steps, weight: [steps + 1, weight.view(7, 1)])(*fakes)
    compiled = compile_program(make_program(graph, fakes))
    steps, weight = torch.arange(5.0), torch.randn(7)  # the weight is never touched
    counted, view = compiled(steps, weight)
    assert torch.equal(counted, torch.arange(1.0, 6.0))
    assert view.data_ptr() == weight.data_ptr()


def test_a_scalar_of_the_cpu_is_copied_to_the_gpu() -> None:
    with FakeTensorMode():
        fakes = [torch.empty(5, device="cuda"), torch.empty(5, device="cuda")]
        graph = make_fx(lambda a, b: [a + b])(*fakes)
    program = make_program(graph, fakes)
    scalar = Buffer("in1", torch.float32, (), ())
    program = replace(program, buffers=program.buffers | {"in1": scalar})
    kernels = {name: emit(kernel) for name, kernel in program.kernels.items()}
    for direct in (True, False):
        text = GpuHostWriter(program, kernels, {}, direct=direct).text()
        assert re.search(r"weft_copy\(&own\[\d+\], in\[1\], &v_in1_copy\)", text)
        assert build(Sources(text, {})).exists()


def test_memory_of_two_devices_in_one_kernel_is_refused() -> None:
    with FakeTensorMode():
        fakes = [torch.empty(5, device="cuda:0"), torch.empty(5, device="cuda:0")]
        graph = make_fx(lambda a, b: [a + b])(*fakes)
    program = make_program(graph, fakes)
    buffers = program.buffers | {"in1": replace(program.buffers["in1"], device=torch.device("cpu"))}
    with pytest.raises(NoTritonForm, match="several devices"):
        compile_program(replace(program, buffers=buffers))


def test_a_size_that_is_a_number_or_an_expression_is_an_argument() -> None:
    with FakeTensorMode():
        fakes = [torch.empty(5, device="cuda"), torch.empty(7, device="cuda")]
        graph = make_fx(lambda a, b: [a + 1, b * 2])(*fakes)
    program = make_program(graph, fakes)
    sizes = (Input("3", "unused"), Input("(2*s0)", "unused"))
    program = replace(program, inputs=program.inputs + sizes)
    kernels = {name: emit(kernel) for name, kernel in program.kernels.items()}
    assert build(Sources(GpuHostWriter(program, kernels, {}).text(), {})).exists()


def test_an_empty_sum_over_a_symbolic_size_is_not_cut() -> None:
    mode, (columns,) = symbolic_sizes(9)
    with mode:
        fake = torch.empty(0, columns, device="cuda")
        graph = make_fx(lambda x: [x.sum()])(fake)
    assert make_program(graph, [columns, fake]).kernels


def test_only_innermost_loops_are_unrolled() -> None:
    """Copies of copies of a block took LLVM minutes."""
    mode, sizes = symbolic_sizes(6, 7, 8)
    with mode:
        fakes = [torch.empty(sizes, device="cuda"), torch.empty(sizes[::-1], device="cuda")]
        graph = make_fx(lambda x, y: [(x + y.permute(2, 1, 0)).sum()])(*fakes)
    (kernel,) = make_program(graph, [*sizes, *fakes]).kernels.values()
    source = emit(kernel).source
    factors = [int(text) for text in re.findall(r"loop_unroll_factor=(\d+)", source)]
    assert factors and factors.count(1) == len(factors) - 1, source


def test_writes_to_computed_places_on_a_gpu() -> None:
    """Sums stay with the library, whose order does not vary; under deterministic rules all do."""

    def externs(function: Callable[..., torch.Tensor]) -> list[str]:
        with FakeTensorMode():
            fakes = [torch.empty(9, 4, device="cuda"), torch.empty(3, 4, device="cuda")]
            fakes.append(torch.empty(3, device="cuda", dtype=torch.int64))
            graph = make_fx(lambda *args: [function(*args)])(*fakes)
        steps = make_program(graph, fakes).steps
        return [str(step.op) for step in steps if isinstance(step, Extern)]

    copy, add = torch.ops.aten.index_copy, torch.ops.aten.index_add
    assert externs(lambda x, v, i: copy(x, 0, i, v)) == ["aten._assert_async.msg"]
    assert externs(lambda x, v, i: add(x, 0, i, v)) == ["aten.index_add.default"]
    torch.use_deterministic_algorithms(True)
    try:
        assert externs(lambda x, v, i: copy(x, 0, i, v)) == ["aten.index_copy.default"]
    finally:
        torch.use_deterministic_algorithms(False)
