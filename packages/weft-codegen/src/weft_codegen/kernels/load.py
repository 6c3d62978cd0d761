"""From a loop program to a Python callable: emit, build, load.

A program is one C function that Python calls directly (`METH_FASTCALL`, no wrapper): tensors' C
handles are read out of the Python objects, and the interpreter lock is released while steps run.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from weft_core.errors import BackendCompilerError
from weft_core.events import enabled, logger, span
from weft_core.fake import is_plain

from weft_codegen.kernels.build import Sources, build, program_path
from weft_codegen.kernels.emit_c import emit_kernel
from weft_codegen.kernels.externs import PythonStep, python_step, torch_library, writes_into
from weft_codegen.kernels.host import HostWriter
from weft_codegen.kernels.malloc import keep_freed_memory
from weft_codegen.kernels.plan import make_plan
from weft_codegen.loops.program import CPU, Extern, Launch, Program

_output_code = logger("codegen", "output_code")


@dataclass(frozen=True)
class Loadable:
    """All that loading a built program takes, less its constants; it can be pickled.

    Args:
        stem: names the shared object (see build.program_path).
        mutated: positions of the inputs that a call writes.
        repeatable: a call with the same inputs gives the same results: no mutation, no symbolic
            sizes, nothing but the CPU.
        steps: what the program calls for an operator that has no C function, or whose C function
            failed, by the position of its step.
        kernels, launches, externs: what the program consists of, for counters.
    """

    stem: str
    mutated: tuple[int, ...]
    repeatable: bool
    steps: dict[int, PythonStep]
    kernels: int
    launches: int
    externs: tuple[str, ...]


class CompiledGraph:
    """A compiled program: call it with the program's inputs, get the list of its outputs.

    It may be called from any thread and after a fork.  Inputs with other strides than the program
    was compiled for are copied; other sizes, dtypes or devices raise RuntimeError.  Exceptions of
    operators are eager's own.
    """

    __slots__ = ("__weakref__", "_dispatches", "_library", "_mutated", "_run", "loadable", "path")

    def __init__(self, loadable: Loadable, constants: tuple[torch.Tensor, ...]) -> None:
        self.loadable = loadable
        self.path = program_path(loadable.stem)
        keep_freed_memory()
        with span("codegen.load"):
            library = _open(self.path)
            self._run = _new_function(library, loadable.steps, constants)
        self._mutated = loadable.mutated
        self._dispatches = bool(loadable.steps)
        self._library = library._handle

    def __call__(self, *args: Any) -> list[Any]:
        """Run the program; tensors, ints and Nones in the order of its outputs."""
        if self._dispatches and torch._C._is_any_autocast_enabled():
            # The graph already holds the casts that autocast made while it was traced.
            with torch._C._DisableAutocast():
                outputs = self._run(*args)
        else:
            outputs = self._run(*args)
        if self._mutated:
            torch.autograd.graph.increment_version([args[k] for k in self._mutated])
        return outputs

    def call_owning(self, args: list[Any]) -> list[Any]:
        """`self(*args)` that takes large tensors out of `args` when no later step needs them."""
        mutated = [args[k] for k in self._mutated]
        if self._dispatches and torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                outputs = self._run(args)
        else:
            outputs = self._run(args)
        if mutated:
            torch.autograd.graph.increment_version(mutated)
        return outputs

    def __del__(self) -> None:
        # First the function, whose code is in the library; a call in progress holds `self`.
        if hasattr(self, "_run") and not sys.is_finalizing():
            del self._run
            _ctypes.dlclose(self._library)


def compile_program(program: Program) -> CompiledGraph:
    """Compile `program` for this machine's CPU.

    Raises:
        CompilerNotFound: no C compiler.
        BackendCompilerError: the generated source did not compile.
    """
    with span("codegen.emit"):
        sources, text = emit_program(program)
    if enabled("output_code"):
        _output_code.info("%s", text)
    names = [item.name for item in program.inputs]
    on_cpu = all(buffer.device == CPU for buffer in program.buffers.values())
    loadable = Loadable(
        build(sources).stem,
        tuple(names.index(name) for name in program.mutations),
        on_cpu and not program.mutations and not program.sizes,
        {k: python_step(s)[2] for k, s in enumerate(program.steps) if isinstance(s, Extern)},
        len(program.kernels),
        sum(isinstance(step, Launch) for step in program.steps),
        tuple(str(s.op) for s in program.steps if isinstance(s, Extern) and s.when is None),
    )
    return CompiledGraph(loadable, tuple(program.constants.values()))


def emit_program(program: Program) -> tuple[Sources, str]:
    """The C of a program: as units to compile, and as one readable text."""
    codes = {name: emit_kernel(kernel) for name, kernel in program.kernels.items()}
    externs = {k: step for k, step in enumerate(program.steps) if isinstance(step, Extern)}
    plan = make_plan(program, frozenset(k for k, s in externs.items() if not writes_into(s)))
    host = HostWriter(program, plan, codes).text()
    kernels = {code.symbol: code.text for code in codes.values()}
    return Sources(host, kernels), "\n\n".join([*kernels.values(), host]) + "\n"


# ---- loading ----


def _open(path: Path) -> ctypes.PyDLL:
    """Load a shared object and look up what it needs of libtorch."""
    library = ctypes.PyDLL(str(path))
    library.weft_load.restype = ctypes.c_char_p
    names = ("torch_cpu", "torch_python")
    missing = library.weft_load(*(torch_library(name).encode() for name in names))
    if missing is not None:
        raise BackendCompilerError(
            "codegen.load", f"torch {torch.__version__} has no {missing.decode()}"
        )
    return library


def _new_function(
    library: ctypes.PyDLL, steps: dict[int, PythonStep], constants: tuple[torch.Tensor, ...]
) -> Callable[..., list[Any]]:
    def run(position: int, tensors: list[Any], ints: list[int]) -> tuple[Any, ...]:
        return steps[position](tensors, ints)

    new = library.weft_new
    new.restype = ctypes.py_object
    objects = [ctypes.py_object] * 3
    new.argtypes = (*objects, ctypes.c_int64)
    types = (is_plain, torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    function = new(run, constants, types, handle_offset())
    return function  # type: ignore[no-any-return]


@functools.cache
def handle_offset() -> int:
    """Where a Python tensor keeps its at::Tensor, in bytes from the start of the object.

    An at::Tensor is a pointer to the TensorImpl that `_cdata` gives, so it is found by value.

    Raises:
        BackendCompilerError: when it is not where any known torch keeps it.
    """
    probe = torch.empty(0)
    for offset in range(16, 64, 8):
        word = ctypes.c_uint64.from_address(id(probe) + offset).value
        if word == probe._cdata:
            return offset
    raise BackendCompilerError(
        "codegen.load", f"unknown tensor layout in torch {torch.__version__}"
    )
