"""From a loop program to a Python callable: emit, build, load.

A generated library is plain C (include/weft.h). cffi opens it, and the extension `_entry` calls it,
which reads tensors' handles out of the Python objects, releases the interpreter lock while the
program runs, and makes Python tensors of its outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from weft_core import recording
from weft_core.events import enabled, logger, span
from weft_core.fake import is_plain

from weft_codegen.config import settings
from weft_codegen.kernels._abi import ffi
from weft_codegen.kernels._entry import LoadedProgram, configure
from weft_codegen.kernels.build import INCLUDE, Sources, build, program_path
from weft_codegen.kernels.emit_c import emit_kernel
from weft_codegen.kernels.externs import OWN, library_of_gpu, python_step
from weft_codegen.kernels.host import HostWriter
from weft_codegen.kernels.malloc import keep_freed_memory
from weft_codegen.kernels.step_events import Origins, StepEvents
from weft_codegen.loops.program import CPU, Extern, Launch, Program
from weft_codegen.torch_compat import entry_addresses, handle_offset, missing, torch_library

_output_code = logger("codegen", "output_code")
_kernel_code = logger("codegen", "kernel_code")
KernelLoader = Callable[[bool], Any]
"""Gives a Kernel of a GPU, for aligned buffers or for any (`triton.launch`)."""


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
        origins: where the steps come from, for profilers.
    """

    stem: str
    mutated: tuple[int, ...]
    repeatable: bool
    steps: dict[int, Callable[[list[Any], list[int]], tuple[Any, ...]]]
    kernels: int
    launches: int
    externs: tuple[str, ...]
    library: str = "torch_cpu"
    origins: Origins = ()


class CompiledGraph:
    """A compiled program: call it with the program's inputs, get the list of its outputs.

    Inputs and outputs are tensors, ints and Nones.  It may be called from any thread and after a
    fork.  Inputs with other strides than the program was compiled for are copied; other sizes,
    dtypes or devices raise RuntimeError.  Exceptions of operators are eager's own.
    """

    # What a call runs is an attribute: the program's own function, where nothing is around it.
    __slots__ = ("__call__", "__weakref__", "_program", "loadable", "path")
    __call__: Callable[..., list[Any]]

    def __init__(
        self,
        loadable: Loadable,
        constants: tuple[torch.Tensor, ...],
        kernels: Sequence[KernelLoader] = (),
    ) -> None:
        """`kernels` are a GPU's, that the program launches."""
        self.loadable = loadable
        self.path = program_path(loadable.stem)
        keep_freed_memory()
        with span("codegen.load"):
            self._program = _open(self.path, loadable, constants, kernels)
        run: Callable[..., list[Any]] = self._program
        run = _checked(run) if settings.check_bounds else run
        self.__call__ = _counting(run, loadable.mutated) if loadable.mutated else run

    def listen(self, origins: Origins, gm: fx.GraphModule, timed: bool = False) -> None:
        """Name the steps for profilers after the nodes of `gm`; take their times."""
        self.loadable = replace(self.loadable, origins=origins)
        self._program.listener = StepEvents(origins, gm, timed)
        self._program.always = timed

    def call_owning(self, args: list[Any]) -> list[Any]:
        """`self(*args)` that takes large tensors out of `args` when no later step needs them."""
        return self.__call__(args)


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
    recording.keep("source", lambda: _source_record(program, sources.host))
    if enabled("output_code"):
        _output_code.info("%s", text)
    if enabled("kernel_code"):
        for kernel in sources.kernels.values():
            _kernel_code.info("%s", kernel)
    return CompiledGraph(describe(program, build(sources).stem), tuple(program.constants.values()))


def describe(program: Program, stem: str) -> Loadable:
    """What loading `program` takes, which was built as the shared object `stem`."""
    names = [item.name for item in program.inputs]
    on_cpu = program.device == CPU
    return Loadable(
        stem,
        tuple(names.index(name) for name in program.mutations),
        on_cpu and not program.mutations and not program.sizes,
        {k: python_step(s)[2] for k, s in enumerate(program.steps) if isinstance(s, Extern)},
        len(program.kernels),
        sum(isinstance(step, Launch) for step in program.steps),
        tuple(str(s.op) for s in program.steps if isinstance(s, Extern) and s.when is None),
        "torch_cpu" if on_cpu else library_of_gpu(),
    )


def emit_program(program: Program) -> tuple[Sources, str]:
    """The C of a program: as units to compile, and as one readable text."""
    codes = {name: emit_kernel(kernel) for name, kernel in program.kernels.items()}
    host = HostWriter(program, codes).text()
    kernels = {code.symbol: code.text for code in codes.values()}
    for step in program.steps:
        if isinstance(step, Extern) and step.op in OWN:
            name, _ = OWN[step.op]
            kernels[name] = (INCLUDE / f"{name}.h").read_text()
    return Sources(host, kernels), "\n\n".join([*kernels.values(), host]) + "\n"


def _source_record(program: Program, host: str) -> dict[str, Any]:
    """What a recording keeps of generated C: `{kernel: [symbol, text]}`, and the host's text."""
    codes = {name: emit_kernel(kernel) for name, kernel in program.kernels.items()}
    kernels = {name: (code.symbol, code.text) for name, code in codes.items()}
    return {"language": "C", "kernels": kernels, "host": host}


# ---- loading ----


def _open(
    path: Path,
    loadable: Loadable,
    constants: tuple[torch.Tensor, ...],
    kernels: Sequence[KernelLoader],
) -> LoadedProgram:
    """A function that runs a shared object, which stays loaded for as long as the function lives.

    Raises:
        BackendCompilerError: this libtorch lacks a function that every program needs.
    """
    library = ffi.dlopen(str(path))
    pointers = (library.weft_run, library.weft_load, ffi.addressof(library.weft_program))
    run, load, description = (int(ffi.cast("intptr_t", pointer)) for pointer in pointers)
    device, steps = torch_library(loadable.library), loadable.steps
    _configure()
    try:
        return LoadedProgram(
            library, run, load, description, device, steps, constants, tuple(kernels)
        )
    except LookupError as name:
        raise missing(name) from name


@functools.cache
def _configure() -> None:
    """Tell the extension how to read and make tensors."""
    classes = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    configure(*entry_addresses(), handle_offset(), classes, is_plain, _no_autocast)


def _no_autocast() -> Any:
    """What keeps autocast off until it is dropped: the graph already holds the casts."""
    guard = torch._C._DisableAutocast()
    guard.__enter__()
    return guard
