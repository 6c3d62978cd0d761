"""From a loop program to a Python callable: emit, build, load.

A program is one C function that Python calls directly (`METH_FASTCALL`, no wrapper): tensors' C
handles are read out of the Python objects, and the interpreter lock is released while steps run.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from weft_core.errors import BackendCompilerError
from weft_core.events import enabled, logger, span
from weft_core.fake import is_plain

from weft_codegen.config import settings
from weft_codegen.kernels.build import Sources, build, program_path
from weft_codegen.kernels.emit_c import emit_kernel
from weft_codegen.kernels.externs import PythonStep, python_step, torch_library, writes_into
from weft_codegen.kernels.host import HostWriter
from weft_codegen.kernels.malloc import keep_freed_memory
from weft_codegen.kernels.plan import MemoryPlan, make_plan
from weft_codegen.loops.program import CPU, Extern, Launch, Program

_output_code = logger("codegen", "output_code")
Kernel = Callable[[bool], Callable[..., None]]
"""A kernel of a GPU: gives what launches it, for aligned buffers or for any (`triton.load`)."""


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
        library: the part of libtorch that has the operators of its device.
    """

    stem: str
    mutated: tuple[int, ...]
    repeatable: bool
    steps: dict[int, PythonStep]
    kernels: int
    launches: int
    externs: tuple[str, ...]
    library: str = "torch_cpu"


class CompiledGraph:
    """A compiled program: call it with the program's inputs, get the list of its outputs.

    Inputs and outputs are tensors, ints and Nones.  It may be called from any thread and after a
    fork.  Inputs with other strides than the program was compiled for are copied; other sizes,
    dtypes or devices raise RuntimeError.  Exceptions of operators are eager's own.
    """

    # What a call runs is an attribute: the program's own function, where nothing is around it.
    __slots__ = ("__call__", "__weakref__", "_library", "_run", "loadable", "path")
    __call__: Callable[..., list[Any]]

    def __init__(
        self,
        loadable: Loadable,
        constants: tuple[torch.Tensor, ...],
        kernels: Sequence[Kernel] = (),
    ) -> None:
        """`kernels` are a GPU's, that the program launches."""
        self.loadable = loadable
        self.path = program_path(loadable.stem)
        keep_freed_memory()
        with span("codegen.load"):
            library = open_library(self.path, loadable.library)
            run = _new_function(library, loadable.steps, constants, kernels)
        run = _checked(run) if settings.check_bounds else run
        self._library = library._handle
        self.__call__ = _counting(run, loadable.mutated) if loadable.mutated else run
        self._run = run

    def call_owning(self, args: list[Any]) -> list[Any]:
        """`self(*args)` that takes large tensors out of `args` when no later step needs them."""
        return self.__call__(args)

    def __del__(self) -> None:
        # First the function, whose code is in the library; who calls `self` holds it meanwhile.
        if hasattr(self, "_run") and not sys.is_finalizing():
            run = self._run
            del self.__call__, self._run
            kept = sys.getrefcount(run) > 2  # by somebody else, who may still call it
            del run
            if not kept:
                _ctypes.dlclose(self._library)


def _counting(run: Callable[..., list[Any]], mutated: tuple[int, ...]) -> Callable[..., list[Any]]:
    """`run`, after which the arguments that it writes have other versions."""

    def call(*args: Any) -> list[Any]:
        given = args[0] if type(args[0]) is list else args
        changed = [given[k] for k in mutated]
        outputs = run(*args)
        torch.autograd.graph.increment_version(changed)
        return outputs

    return call


class OutOfBounds(BaseException):
    """A kernel accesses what its buffer does not have (with the setting check_bounds).

    This is a bug of weft that nothing may catch to run eagerly instead, so it is no Exception.
    """


def _checked(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def call(*args: Any) -> list[Any]:
        try:
            return run(*args)
        except AssertionError as error:
            raise OutOfBounds(str(error)) from None

    return call


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
    return CompiledGraph(describe(program, build(sources).stem), tuple(program.constants.values()))


def describe(program: Program, stem: str) -> Loadable:
    """What loading `program` takes, which was built as the shared object `stem`."""
    names = [item.name for item in program.inputs]
    on_cpu = all(buffer.device == CPU for buffer in program.buffers.values())
    return Loadable(
        stem,
        tuple(names.index(name) for name in program.mutations),
        on_cpu and not program.mutations and not program.sizes,
        {k: python_step(s)[2] for k, s in enumerate(program.steps) if isinstance(s, Extern)},
        len(program.kernels),
        sum(isinstance(step, Launch) for step in program.steps),
        tuple(str(s.op) for s in program.steps if isinstance(s, Extern) and s.when is None),
        "torch_cpu" if on_cpu else "torch_cuda",
    )


def emit_program(program: Program) -> tuple[Sources, str]:
    """The C of a program: as units to compile, and as one readable text."""
    codes = {name: emit_kernel(kernel) for name, kernel in program.kernels.items()}
    host = HostWriter(program, plan_of(program), codes).text()
    kernels = {code.symbol: code.text for code in codes.values()}
    return Sources(host, kernels), "\n\n".join([*kernels.values(), host]) + "\n"


def plan_of(program: Program) -> MemoryPlan:
    """The memory plan for a host in C."""
    externs = {k: step for k, step in enumerate(program.steps) if isinstance(step, Extern)}
    return make_plan(program, frozenset(k for k, s in externs.items() if not writes_into(s)))


# ---- loading ----


def open_library(path: Path, device: str = "torch_cpu") -> ctypes.PyDLL:
    """Load a shared object, which looks up what it needs of libtorch: `device` is a part of it."""
    library = ctypes.PyDLL(str(path))
    library.weft_load.restype = ctypes.c_char_p
    names = ("torch_cpu", "torch_python", device)
    missing = library.weft_load(*(torch_library(name).encode() for name in names))
    if missing is not None:
        raise BackendCompilerError(
            "codegen.load", f"torch {torch.__version__} has no {missing.decode()}"
        )
    return library


def _new_function(
    library: ctypes.PyDLL,
    steps: dict[int, PythonStep],
    constants: tuple[torch.Tensor, ...],
    kernels: Sequence[Kernel],
) -> Callable[..., list[Any]]:
    def run(position: int, tensors: list[Any], ints: list[int]) -> Any:
        if position >= 0:
            return steps[position](tensors, ints)
        if position < -1:
            number, aligned = divmod(-2 - position, 2)
            return kernels[number](bool(aligned))
        # The graph already holds the casts that autocast made while it was traced.
        guard = torch._C._DisableAutocast()
        guard.__enter__()  # until the program drops it
        return guard

    new = library.weft_new
    new.restype = ctypes.py_object
    objects = [ctypes.py_object] * 3
    new.argtypes = (*objects, ctypes.c_int64, ctypes.c_int)
    types = (is_plain, torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    python = run if steps or kernels else None
    function = new(python, constants, types, handle_offset(), len(kernels))
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
