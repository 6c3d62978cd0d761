"""Writes the host side of a program whose kernels are Triton's: one Python function.

    def run(args):
        in0, in1 = args
        args.clear()
        if in0.stride() != (64, 1): in0 = laid_out(in0, (64, 1), 'argument 0')
        aligned, stream = True, stream_of()
        aligned = aligned and (in0.data_ptr() | in1.data_ptr()) % 16 == 0
        buf0 = empty_strided((64, 64), (64, 1), dtype=torch.float32, device=value2)
        kernel0(aligned)(stream, 64, in0, in1, buf0)
        del in1
        return [buf0]

A name is deleted after its last use, so that the caching allocator of the device hands its memory
on; views are tensors that share the storage, and need no care.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from weft_codegen.kernels.load import compile_program
from weft_codegen.kernels.triton.emit import TritonKernel, emit
from weft_codegen.kernels.triton.values import ALIGNED, NoTritonForm
from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.index import ONE, IndexExpr
from weft_codegen.loops.program import (
    CPU,
    Alias,
    BufferRef,
    Extern,
    Input,
    Launch,
    Program,
    refs,
    size_positions,
    step_reads,
    step_writes,
)


class PythonHostWriter:
    """Writes the function of one program.

    Its text names the functions of `kernels`, by name, and what is in `scope`.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.kernels: dict[str, TritonKernel] = {}
        self._lines: list[str] = []
        self.scope: dict[str, Any] = dict(program.constants)
        self._made = {item.name for item in program.inputs} | set(program.constants)
        launches = (step for step in program.steps if isinstance(step, Launch))
        here = (step for step in launches if not self._is_on_cpu(step))
        self._launched = {name for step in here for name in step.buffers}
        self._dying: dict[int, list[str]] = defaultdict(list)
        for name, step in _last_uses(program).items():
            self._dying[step].append(name)

    def text(self) -> str:
        """The source of `run(args)`, which takes the arguments out of the list `args`."""
        inputs = self._program.inputs
        # The name of a size is an expression, or a number.
        names = [
            item.name if item.kind == "tensor" else f"argument{position}"
            for position, item in enumerate(inputs)
        ]
        self._line(f"{_tuple(names)} = args" if names else "")
        self._line("args.clear()")
        for name, (position, dim) in size_positions(self._program).items():
            self._line(f"{name} = {names[position]}" + ("" if dim is None else f".shape[{dim}]"))
        for position, item in enumerate(inputs):
            if item.kind == "tensor":
                self._expect(item.name, f"argument {position}")
        given = [item.name for item in inputs if item.kind == "tensor"]
        self._line("aligned, stream = True, stream_of()" if self._launched else "")
        self._check_alignment(*given, *self._program.constants)
        for position, step in enumerate(self._program.steps):
            if isinstance(step, Launch):
                self._launch(step)
            elif isinstance(step, Extern):
                self._extern(step)
            elif isinstance(step, Alias):
                self._alias(step)
            gone = ", ".join(self._dying[position])
            self._line(f"del {gone}" if gone else "")
        if self._program.mutations:
            self._line(f"increment_version({_tuple(self._program.mutations)})")
        self._line(f"return [{', '.join(map(self._output, self._program.outputs))}]")
        return "\n".join(["def run(args):", *self._lines]) + "\n"

    def _line(self, text: str) -> None:
        if text:
            self._lines.append(f"    {text}")

    def _expect(self, name: str, what: str) -> None:
        """Bring a tensor that others made into the layout that the kernels rely on."""
        buffer = self._program.buffers[name]
        strides = _tuple(buffer.strides)
        self._line(
            f"if {name}.stride() != {strides} or {name}.dtype is not {buffer.dtype}: {name} = "
            f"laid_out({name}, {_tuple(buffer.shape)}, {strides}, {buffer.dtype}, {what!r}, "
            f"{name not in self._program.mutations})"
        )

    def _check_alignment(self, *names: str) -> None:
        """Note whether memory that the allocator has not just given begins where it would."""
        addresses = " | ".join(f"{n}.data_ptr()" for n in names if n in self._launched)
        if addresses:
            self._line(f"aligned = aligned and ({addresses}) % {ALIGNED} == 0")

    # ---- steps

    def _allocate(self, name: str) -> None:
        buffer = self._program.buffers[name]
        layout = f"{_tuple(buffer.shape)}, {_tuple(buffer.strides)}, dtype={buffer.dtype}"
        self._line(f"{name} = empty_strided({layout}, device={self._named(buffer.device)})")
        self._made.add(name)

    def _is_on_cpu(self, step: Launch) -> bool:
        devices = {self._program.buffers[name].device for name in step.buffers}
        return devices == {CPU} != {home(self._program)}

    def _launch(self, step: Launch) -> None:
        for name in step.buffers:
            if name not in self._made:
                self._allocate(name)
        if self._is_on_cpu(step):
            self._line(f"{self._named(_on_cpu(self._program, step))}({', '.join(step.buffers)})")
            return
        kernel = self.kernels.get(step.kernel) or emit(self._program.kernels[step.kernel])
        self.kernels[step.kernel] = kernel
        buffers = self._at_home(step)
        sizes = dict(zip(kernel.kernel.sizes, step.sizes, strict=True))
        arguments = "".join(f", {text}" for text in (*buffers, *map(str, step.sizes)))
        for phase in kernel.phases:
            points = substitute(phase.grid, lambda atom: sizes.get(atom.key))
            programs = f"-(-({points}) // {phase.block})" if phase.block else str(points)
            self._line(f"{phase.name}(aligned)(stream, {programs}{arguments})")

    def _at_home(self, step: Launch) -> list[str]:
        """The buffers of a launch on its one device; a CPU's scalar is copied there."""
        kernel = self._program.kernels[step.kernel]
        actual = [self._program.buffers[name] for name in step.buffers]
        here = next((b.device for b in actual if b.device != CPU), CPU)
        for buffer, param in zip(actual, kernel.params, strict=True):
            scalar = buffer.device == CPU and buffer.storage == ONE and not param.written
            if buffer.device != here and not scalar:
                raise NoTritonForm(f"kernel {step.kernel} touches the memory of several devices")
        there = self._named(here)
        return [b.name if b.device == here else f"{b.name}.to({there})" for b in actual]

    def _extern(self, step: Extern) -> None:
        arguments = [self._argument(value) for value in step.args]
        arguments += [f"{name}={self._argument(value)}" for name, value in step.kwargs]
        call = f"{self._named(getattr(step.op, '_op', step.op))}({', '.join(arguments)})"
        if step.when is not None:
            self._line(f"if {step.when}.any(): {call}")
            return
        self._line(f"made = {call}")
        returns = [str(item.type) for item in step.op._schema.returns]
        several = returns != ["Tensor"]
        for number, name in enumerate(step.results):
            if name is None:
                continue
            self._line(f"{name} = made[{number}]" if several else f"{name} = made")
            self._made.add(name)
            if name in self._program.buffers:
                self._expect(name, str(step.op))
            self._check_alignment(name)
        self._line("del made")

    def _argument(self, value: Any) -> str:
        if isinstance(value, BufferRef):
            return value.name
        if isinstance(value, IndexExpr):
            return str(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._argument, value))}]"
        return self._named(value)

    def _named(self, value: Any) -> str:
        name = f"value{len(self.scope)}"
        self.scope[name] = value
        return name

    def _alias(self, step: Alias) -> None:
        buffer = self._program.buffers[step.name]
        self._line(
            f"{step.name} = {step.base}.as_strided({_tuple(buffer.shape)}, "
            f"{_tuple(buffer.strides)}, {step.base}.storage_offset() + {step.offset})"
        )
        self._made.add(step.name)
        self._check_alignment(step.name)

    def _output(self, output: Any) -> str:
        return output.name if isinstance(output, BufferRef) else str(output)


def home(program: Program) -> torch.device:
    """Where the kernels of a program run: the first of its devices that is no CPU, if any."""
    devices = {buffer.device for buffer in program.buffers.values()} - {CPU}
    return min(devices, key=str, default=CPU)


def _on_cpu(program: Program, step: Launch) -> Callable[..., Any]:
    """A launch on the CPU's tensors alone (steps that an optimizer counts), as a program in C."""
    if step.sizes:
        raise NoTritonForm(f"kernel {step.kernel} runs on the CPU, with symbolic sizes")
    kernel = program.kernels[step.kernel]
    pairs = zip(step.buffers, kernel.params, strict=True)
    alone = replace(
        program,
        sizes=(),
        inputs=tuple(map(Input, step.buffers)),
        constants={},
        buffers={name: program.buffers[name] for name in step.buffers},
        kernels={step.kernel: kernel},
        steps=(step,),
        outputs=(),
        mutations=tuple(name for name, param in pairs if param.written),
    )
    return compile_program(alone)


def _tuple(values: Iterable[object]) -> str:
    return f"({''.join(f'{value}, ' for value in values)})"


def _last_uses(program: Program) -> dict[str, int]:
    """For each name that the function may forget, the last step that needs it."""
    last: dict[str, int] = {}
    for position, step in enumerate(program.steps):
        touched = step_reads(step, program.kernels) + step_writes(step, program.kernels)
        last.update(dict.fromkeys([*touched, *_watched(step)], position))
    kept = {name for output in program.outputs for name in refs(output)}
    kept |= set(program.constants) | set(program.mutations)
    return {name: step for name, step in last.items() if name not in kept}


def _watched(step: Any) -> Iterator[str]:
    if isinstance(step, Extern) and step.when is not None:
        yield step.when
