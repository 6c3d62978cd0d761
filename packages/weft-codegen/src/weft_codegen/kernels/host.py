"""Writes the host unit: the whole program as one C function, `weft_run` of include/weft.h.

`own[k]` holds the tensors that the call made; whatever happens, they are dropped at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from weft_codegen.config import settings
from weft_codegen.kernels import externs
from weft_codegen.kernels.c_expr import index_c
from weft_codegen.kernels.c_tables import Tables
from weft_codegen.kernels.c_types import C_TYPES
from weft_codegen.kernels.emit_c import KernelCode
from weft_codegen.kernels.plan import ALIGN, Allocation, MemoryPlan
from weft_codegen.loops import program as ir
from weft_codegen.loops.index import ONE, ZERO, IndexExpr, const
from weft_codegen.loops.lower.origins import by_line


class HostWriter:
    """Writes the host unit of one program, whose tensors are on one device."""

    stack = 4096
    """Scratch memory of at most so many bytes is on the stack."""
    operators_choose = False
    """Whether what no kernel touches may be on other devices: seeds, which are on the CPU."""

    def __init__(self, program: ir.Program, codes: Mapping[str, KernelCode]) -> None:
        self._program, self._device = program, program.device
        self._plan = plan = MemoryPlan(program)
        self._codes = codes
        self._lines: list[str] = []
        self._tables = Tables(program)
        self._own: dict[str, int] = {}
        self._handles: dict[str, str] = {}
        self._pointers: set[str] = set()
        self._shims: dict[str, int] = {}
        self._externs = any(isinstance(step, ir.Extern) for step in program.steps)
        self._launched = self._launched_buffers()
        self._positions = {item.name: k for k, item in enumerate(program.inputs)}
        self._offsets = _view_offsets(program)
        self._dying: dict[int, list[str]] = {}
        large = frozenset(_large_inputs(program))
        for name, root in plan.root.items():
            if root in plan.last and (plan.allocation[root] is Allocation.OWNED or root in large):
                self._dying.setdefault(plan.last[root], []).append(name)

    def text(self) -> str:
        """The whole unit, without the include."""
        for name, (position, dim) in ir.size_positions(self._program).items():
            text = f"integers[{position}]" if dim is None else f"weft_size(in[{position}], {dim})"
            self._line(f"const int64_t {name} = {text};")
        self._inputs()
        self._take_scratch()
        for position, step in enumerate(self._program.steps):
            if not isinstance(step, ir.Alias):
                self._line(f"WEFT_BEGIN({position});")
            if isinstance(step, ir.Launch):
                self._launch(position, step)
            elif isinstance(step, ir.Extern):
                self._extern(position, step)
            elif isinstance(step, ir.Alias):
                self._alias(step)
            self._release(position)
        self._outputs()
        return "\n".join([*self._opening(), *self._lines, *self._closing()])

    def _launched_buffers(self) -> frozenset[str]:
        """Buffers that some kernel touches, so that they need a C pointer; views' bases too."""
        names: set[str] = set()
        for step in reversed(self._program.steps):
            if isinstance(step, ir.Launch):
                names.update(step.buffers)
            elif isinstance(step, ir.Alias) and step.name in names:
                names.add(step.base)
        return frozenset(names)

    # ---- arguments ----

    def _inputs(self) -> None:
        for position, item in enumerate(self._program.inputs):
            if item.kind != "tensor":
                continue
            self._handles[item.name] = f"in[{position}]"
            mutated = item.name in self._program.mutations
            copy = "NULL" if mutated else f"&{self._slot(item.name)}"
            self._expect(item.name, copy, f"argument {position}")
        for position, name in enumerate(self._program.constants):
            handle = self._handles[name] = f"call->constants[{position}]"
            self._pointer(name, f"weft_data({handle})")

    def _expect(self, name: str, copy: str, what: str) -> None:
        """Check a tensor that others made; in other strides it is copied to `copy`."""
        handle, buffer = self._handles[name], self._program.buffers[name]
        anywhere = int(self.operators_choose and name not in self._launched)
        value = self._tables.value(buffer)
        self._check(f'weft_expect(call, &{handle}, {copy}, "{what}", {value}, {anywhere})')
        self._pointer(name, f"weft_data({handle})")

    def _take_scratch(self) -> None:
        size = self._plan.fixed
        if 0 < size <= self.stack:
            self._line(f"char scratch[{size}] __attribute__((aligned({ALIGN})));")
        elif size:
            slot = self._slot("")
            memory = ir.Buffer("scratch", torch.uint8, (const(size),), (ONE,), self._device)
            self._check(f"weft_empty(&{slot}, {self._tables.value(memory)})")
            self._line(f"char *const scratch = weft_data({slot});")

    # ---- steps ----

    def _origins(self, origins: tuple[str, ...]) -> None:
        for text in by_line(origins):
            self._line(f"/* {text.replace('*/', '* /')} */")

    def _launch(self, position: int, step: ir.Launch) -> None:
        self._origins(step.origins)
        kernel = self._program.kernels[step.kernel]
        for param, name in zip(kernel.params, step.buffers, strict=True):
            if param.written:
                self._make(name)
        self._call(position, step)

    def _call(self, position: int, step: ir.Launch) -> None:
        """Call a kernel in C."""
        arguments = [pointer_c(name) for name in step.buffers]
        arguments += [index_c(size) for size in step.sizes]
        if settings.check_bounds:
            arguments += [f"{pointer_c(name)}_size" for name in step.buffers]
        self._line(f"{self._codes[step.kernel].symbol}({', '.join(arguments)});")
        if settings.check_bounds:
            params = self._program.kernels[step.kernel].params
            pairs = zip(params, step.buffers, strict=True)
            names = ", ".join(f"{param.name} is {name}" for param, name in pairs)
            self._check(f'weft_left(call, "{names}")')

    def _make(self, name: str) -> None:
        """Give a buffer that the program makes its memory, the first time it is written."""
        root = self._plan.root[name]
        if root in self._pointers or root in self._handles:
            return
        buffer = self._program.buffers[root]
        if self._plan.allocation[root] is Allocation.OWNED:
            over = self._plan.over.get(root)
            slot = self._slot(root)
            if over is None:
                self._check(f"weft_empty(&{slot}, {self._tables.value(buffer)})")
            elif self._program.buffers[over] == replace(buffer, name=over):
                slot = self._handles[over]  # the same tensor under another name
                self._dying[self._plan.last[over]].remove(over)
            else:
                memory = f"{self._handles[over]}, 0"
                self._check(f"weft_view(&{slot}, {memory}, {self._tables.value(buffer)})")
            self._handles[root] = slot
            self._pointer(root, f"weft_data({slot})")
        else:
            self._pointer(root, f"scratch + {self._plan.offset[root]}", always=True)

    def _alias(self, step: ir.Alias) -> None:
        base = self._plan.root[step.base]
        self._make(base)
        if step.name in self._launched:
            base_type = _memory(self._program.buffers[step.base])
            text = f"({base_type} *){pointer_c(step.base)} + {index_c(step.offset)}"
            self._pointer(step.name, text)
            if settings.check_bounds:
                size, whole = (f"{pointer_c(name)}_size" for name in (step.name, step.base))
                place = f'"{step.name}", {index_c(step.offset)}, {size}, {whole}'
                self._check(f"weft_inside(call, {place})")
        # The handle, if an operator or an output wants one, is made when it does.

    def _handle(self, name: str) -> str:
        """The handle of a buffer, made now if it has none."""
        found = self._handles.get(name)
        if found is not None:
            return found
        buffer = self._program.buffers[name]
        root = self._plan.root[name]
        slot, value = self._slot(name), self._tables.value(buffer)
        if self._plan.allocation[root] is Allocation.SCRATCH:
            offset = self._offsets[name] * buffer.dtype.itemsize
            address = f"scratch + {self._plan.offset[root]} + {index_c(offset)}"
            self._check(f"weft_wrap(&{slot}, {address}, {value})")
        else:
            self._make(root)
            base = self._handles[root]
            start = index_c(self._offsets[name])  # counted from where `base` starts
            self._check(f"weft_view(&{slot}, {base}, {start}, {value})")
        self._handles[name] = slot
        return slot

    def _extern(self, position: int, step: ir.Extern) -> None:
        self._origins(step.origins)
        if step.when is not None:
            self._line(f"if (*{pointer_c(step.when)}) {{")
        tensors, sizes, python_call = externs.python_step(step)
        handles = [externs.Handle(self._handle(name)) for name in tensors]
        ints = [externs.Integer(index_c(size)) for size in sizes]
        floating = all(self._program.buffers[name].dtype.is_floating_point for name in tensors)
        filled = python_call.filled(handles, ints)
        shim = externs.shim_call(step, *filled, floating, self._device_of(step))
        function, pieces = shim or ("", [])
        arguments = step_arguments(position, handles, ints)
        if externs.writes_into(step):
            result = step.results[0]
            assert result is not None
            self._make(result)
            target = self._handle(result)
            python = f"weft_step_into({arguments}, {target})"
            pieces = [target, *pieces]
            own = externs.own_call(step, target, handles, self._program.buffers)
            python = f"{own} && {python}" if own else python
        else:
            slots = ["NULL" if name is None else f"&{self._slot(name)}" for name in step.results]
            array = f"(weft_tensor *[]){{{', '.join(slots) or 'NULL'}}}"
            python = f"weft_step({arguments}, {len(slots)}, {array})"
            unused = ["NULL"] * (externs.results_of(step.op) - len(slots))
            for slot in [*slots, *unused][: externs.results_of(step.op)]:
                pieces.append(f"&{self._slot('')}" if slot == "NULL" else slot)
        if function:
            number = self._shims.setdefault(function, len(self._shims))
            python = f"WEFT_CALL({number}, {function}, {', '.join(pieces)}) && {python}"
        self._check(python)
        if step.when is not None:
            self._line("}")
        if not externs.writes_into(step):
            self._results(step)

    def _device_of(self, step: ir.Extern) -> str:
        """The type of device that all tensors of an operator are on; "" where they differ."""
        names = (*ir.step_reads(step), *ir.step_writes(step))
        found = {self._program.buffers[n].device for n in names if n in self._program.buffers}
        return (found or {self._device}).pop().type if len(found) < 2 else ""

    def _results(self, step: ir.Extern) -> None:
        for name in step.results:
            if name is None or name not in self._program.buffers:
                continue
            slot = self._handles[name] = self._slot(name)
            self._expect(name, f"&{slot}", f"the result of {step.op}")

    def _release(self, position: int) -> None:
        """Drop tensors that no later step needs."""
        for name in self._dying.get(position, ()):
            if self._plan.allocation.get(name) is Allocation.INPUT:
                self._line(f"weft_drop(&{self._slot(name)});")  # a copy in other strides
                self._line(f"weft_release(call, {self._positions[name]});")
            elif name in self._handles:
                self._line(f"weft_drop(&{self._handles[name]});")

    # ---- outputs ----

    def _outputs(self) -> None:
        taken: set[str] = set()
        for position, output in enumerate(self._program.outputs):
            if output is None:
                continue
            if not isinstance(output, ir.BufferRef):
                self._line(f"integers[{position}] = {index_c(output)};")
                continue
            self._make(output.name)
            handle = self._handle(output.name)
            if handle.startswith("own[") and handle not in taken:
                taken.add(handle)
                self._line(f"out[{position}] = {handle};")
            else:
                self._check(f"torch.new_tensor_handle({handle}, &out[{position}])")
        for handle in sorted(taken):
            self._line(f"{handle} = NULL;")

    # ---- pieces ----

    def _line(self, text: str) -> None:
        self._lines.append("    " + text)

    def _check(self, condition: str) -> None:
        self._line(f"if ({condition}) goto done;")

    def _slot(self, name: str) -> str:
        """The place in `own` for the tensor of buffer `name` ("" for results nobody wants)."""
        if name == "":
            name = f" {len(self._own)}"
        return f"own[{self._own.setdefault(name, len(self._own))}]"

    def _pointer(self, name: str, text: str, *, always: bool = False) -> None:
        if name in self._launched or always:
            self._pointers.add(name)
            kind = _memory(self._program.buffers[name])
            self._line(f"{kind} *const {pointer_c(name)} = (void *)({text});")
            if settings.check_bounds:
                if (handle := self._handles.get(name)) is not None:
                    size = f"weft_extent({handle})"
                else:
                    size = f"weft_span({self._tables.value(self._program.buffers[name])})"
                self._line(f"const int64_t {pointer_c(name)}_size = {size};")

    # ---- around the function ----

    def _opening(self) -> list[str]:
        names = sorted(self._shims, key=lambda name: self._shims[name])
        symbols = "".join(f'{{"{name}"}}, ' for name in names)
        grad = ["    const _Bool grad = torch.grad_mode_is_enabled();", *_set_grad(0)]
        return [
            *sorted({code.prototype for code in self._codes.values()}),
            *(['#include "weft_bounds.h"'] if settings.check_bounds else []),
            "",
            *self._tables.lines(),
            "",
            f"static weft_symbol symbols[] = {{{symbols}{{NULL}}}};",
            "",
            "const char *weft_load(void *(*find)(void *, const char *), void *library)",
            "{",
            "    return weft_link(find, library, symbols);",
            "}",
            "",
            "WEFT_RUN int weft_run(weft_call *call, weft_tensor *in, weft_tensor *out, "
            "int64_t *integers)",
            "{",
            "    int status = 1;",
            f"    weft_tensor own[{max(1, len(self._own))}] = {{NULL}};",
            *(grad if self._externs else []),
        ]

    def _closing(self) -> list[str]:
        return [
            "    status = 0;",
            "done:",
            f"    for (int k = 0; k < {len(self._own)}; k++)",
            "        weft_drop(&own[k]);",
            *(_set_grad(1) if self._externs else []),
            "    return status;",
            "}",
        ]


def _set_grad(mode: int) -> list[str]:
    return ["    if (grad)", f"        torch.grad_mode_set_enabled({mode});"]


# Elements from which dropping an argument early is worth taking the interpreter lock for it.
_LARGE = 4096


def _large_inputs(program: ir.Program) -> list[str]:
    """Tensors among the arguments that a call may drop when it needs them no more."""
    names = []
    for item in program.inputs:
        if item.kind == "tensor" and item.name not in program.mutations:
            shape = program.buffers[item.name].shape
            fixed = math.prod(int(dim.value) for dim in shape if dim.is_const)
            if fixed >= _LARGE or not all(dim.is_const for dim in shape):
                names.append(item.name)
    return names


def step_arguments(position: int, handles: Sequence[str], integers: Sequence[str]) -> str:
    """What a step that the caller runs is called with, but for its results."""
    tensors = f"(const weft_tensor[]){{{', '.join(handles) or 'NULL'}}}"
    numbers = f"(const int64_t[]){{{', '.join(integers) or '0'}}}"
    return f"call, {position}, {len(handles)}, {tensors}, {len(integers)}, {numbers}"


def _view_offsets(program: ir.Program) -> dict[str, IndexExpr]:
    """For every buffer, the elements from its root's first to its own first."""
    offsets = dict.fromkeys(program.buffers, ZERO)
    for step in program.steps:
        if isinstance(step, ir.Alias):
            offsets[step.name] = offsets[step.base] + step.offset
    return offsets


def _memory(buffer: ir.Buffer) -> str:
    """The C type of a buffer's elements (bytes for dtypes that no kernel touches)."""
    kind = C_TYPES.get(buffer.dtype)
    return kind.memory if kind is not None else "char"


def pointer_c(name: str) -> str:
    """The C variable that points to a buffer's elements."""
    return f"p_{name}"
