"""Writes a Kernel as C.

    static void K_part(params, lo, hi)     the loop nest over a range of its parallel iterations
    static void K_share(args, lo, hi)      calls it for the thread team
    void K(params)                         gives the team its work

The nest is an own function so that `restrict` survives (an OpenMP region would lose it).  The
parallel loops in front are flattened into one range; the innermost loop is marked
`#pragma omp simd`, which gcc and clang turn into full vectors and a tail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from weft_codegen.config import settings
from weft_codegen.kernels.build import kernel_symbol
from weft_codegen.kernels.c_body import BodyWriter
from weft_codegen.kernels.c_expr import index_c
from weft_codegen.kernels.c_text import NOTE, CText, for_head, without_notes
from weft_codegen.kernels.c_types import C_TYPES
from weft_codegen.kernels.exprs import locals_of
from weft_codegen.kernels.simd import collides
from weft_codegen.kernels.toolchain import last_level_cache
from weft_codegen.loops import program as ir
from weft_codegen.loops.expr import Apply, Expr, Local, walk
from weft_codegen.loops.index import IndexExpr, const, product
from weft_codegen.loops.ops import OPS
from weft_codegen.loops.printer import kernel_text

SERIAL_WORK = 131072
STACK_BYTES = 65536
_CHEAP = 8
_NAME = "@KERNEL@"
_TRIGONOMETRY = re.compile(r"\b(sin|cos|tan)_f64\(|\btan_f32\(")


@dataclass(frozen=True)
class KernelCode:
    """A kernel in C: `prototype` declares it to the host, `symbol` names it.

    Above `text` stands the loop nest, and above every loop where it comes from.
    """

    symbol: str
    prototype: str
    text: str


def emit_kernel(kernel: ir.Kernel) -> KernelCode:
    """C text of `kernel` under a symbol made from that text, so equal kernels share it."""
    noted = _KernelWriter(kernel).text()
    symbol = kernel_symbol(without_notes(noted))
    prototype = f"void {symbol}({_parameters(kernel, restrict=False)});"
    text = noted.replace(NOTE, "/* ").replace(_NAME, symbol)
    nest = kernel_text(kernel).replace("*/", "* /")
    return KernelCode(symbol, prototype, f"/* {nest}\n */\n{text}")


def _parameters(kernel: ir.Kernel, *, restrict: bool) -> str:
    # The memory plan may put one of an in-place pair on the other: no promise about those.
    shared = {name for pair in kernel.in_place for name in pair}
    parts = []
    for param in kernel.params:
        kind = C_TYPES[param.dtype].memory
        mark = "restrict " if restrict and param.name not in shared else ""
        parts.append(f"{'' if param.written else 'const '}{kind} *{mark}{param.name}")
    parts += [f"int64_t {name}" for name in _numbers(kernel)]
    return ", ".join(parts)


def _numbers(kernel: ir.Kernel) -> list[str]:
    """The integers that a kernel takes: sizes, and how many elements each buffer has."""
    checked = kernel.params if settings.check_bounds else ()
    return [*kernel.sizes, *(f"{param.name}_size" for param in checked)]


def work_of(body: Sequence[ir.Stmt]) -> IndexExpr:
    """The cost of a body in float additions."""
    total = const(0)
    for stmt in body:
        if isinstance(stmt, ir.Loop):
            total = total + stmt.axis.extent * work_of(stmt.body)
        else:
            total = total + 1 + sum(map(_cost, walk(*ir.stmt_exprs(stmt))))
    return total


def _cost(node: Expr) -> int:
    return OPS[node.name].cost if isinstance(node, Apply) else 1


@dataclass(frozen=True)
class Nest:
    """A top-level statement of a kernel, split for threads.

    `shared` are the loops whose flattened range threads divide; `kept` parallel loops stay inside
    it (before `shared` when the innermost loop is the one divided); `body` is what they run.
    """

    around: tuple[ir.Loop, ...]
    shared: tuple[ir.Loop, ...]
    body: ir.Body


def split_nest(stmt: ir.Stmt) -> Nest:
    """Choose which parallel loops of `stmt` threads divide among them."""
    chain: list[ir.Loop] = []
    body: ir.Body = (stmt,)
    while len(body) == 1 and isinstance(body[0], ir.Loop) and body[0].kind == "parallel":
        if body[0].limit is not None:
            break
        chain.append(body[0])
        body = body[0].body
    if not chain or not chain[-1].is_innermost:
        return Nest((), tuple(chain), body)
    outer = product(loop.axis.extent for loop in chain[:-1])
    if len(chain) == 1 or (outer.is_const and outer.value < 16):
        return Nest(tuple(chain[:-1]), (chain[-1],), body)
    return Nest((), tuple(chain[:-1]), (chain[-1],))


class _KernelWriter:
    """Writes one kernel; `_lines` is the text so far, `_depth` its indentation."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self._kernel = kernel
        self._names = [*(param.name for param in kernel.params), *_numbers(kernel)]
        self._text = CText()
        self._private: frozenset[Local] = frozenset()
        dtypes = {param.name: param.dtype for param in kernel.params}
        self._streamed = _streamed(kernel, dtypes)
        self._body = BodyWriter(self._text, dtypes, self._streamed)

    def text(self) -> str:
        """The whole kernel."""
        body = self._kernel.body
        calls: list[str] = []
        if all(isinstance(stmt, ir.Loop) and stmt.kind == "parallel" for stmt in body):
            for number, stmt in enumerate(body):
                suffix = "part" if len(body) == 1 else f"part{number}"
                calls += self._nest(suffix, split_nest(stmt), (stmt,))
        else:
            self._part("part", Nest((), (), body))
            calls.append(f"{_NAME}_part({', '.join(self._names)});")
        entry = f"void {_NAME}({_parameters(self._kernel, restrict=False)})"
        with self._text.block(f'__attribute__((weak, visibility("hidden")))\n{entry}'):
            for line in calls:
                self._text.line(line)
        text = "\n".join(self._text.lines)
        headers = ["trig"] if _TRIGONOMETRY.search(text) else []
        headers += ["bounds"] if settings.check_bounds else []
        return "".join(f'#include "weft_{name}.h"\n\n' for name in headers) + text

    # ---- threads ----

    def _nest(self, suffix: str, nest: Nest, whole: ir.Body) -> list[str]:
        """Write the functions of one nest; the lines of the entry function that run it."""
        self._part(suffix, nest)
        chunks = product(loop.axis.extent for loop in nest.shared)
        work = work_of(whole)
        names = ", ".join(self._names)
        axes = tuple(loop.axis for loop in nest.shared)
        stores = [stmt for stmt in ir.statements(whole) if isinstance(stmt, ir.Store)]
        small = work.is_const and work.value < SERIAL_WORK
        if small or any(collides(store, axes) for store in stores):
            bounds = f"0, {index_c(chunks)}"
            return [f"{_NAME}_{suffix}({', '.join([*self._names, bounds])});"]
        self._share(suffix)
        share = f"{_NAME}_{suffix}_share"
        return [
            "{",
            f"    const struct {_NAME}_args args = {{{names}}};",
            f"    weft_parallel({share}, &args, {index_c(chunks)}, {index_c(work)});",
            "}",
        ]

    def _share(self, suffix: str) -> None:
        """A part as the thread team calls it: its parameters in a struct."""
        if not any(line.startswith("struct") for line in self._text.lines):
            fields = _parameters(self._kernel, restrict=False).replace(", ", "; ")
            self._text.lines += [f"struct {_NAME}_args {{ {fields}; }};", ""]
        head = f"static void {_NAME}_{suffix}_share(const void *args, int64_t lo, int64_t hi)"
        args = ", ".join(f"a->{name}" for name in self._names)
        with self._text.block(head):
            self._text.line(f"const struct {_NAME}_args *a = args;")
            self._text.line(f"{_NAME}_{suffix}({args}, lo, hi);")

    def _part(self, suffix: str, nest: Nest) -> None:
        """The nest over [lo, hi) of its shared loops (the whole body when there are none)."""
        ranged = ", int64_t lo, int64_t hi" if nest.shared else ""
        parameters = _parameters(self._kernel, restrict=True) + ranged
        used = locals_of(nest.body)
        locals_here = [local for local in self._kernel.locals if local in used]
        row = nest.shared[-1].axis if nest.shared else None
        self._private = self._body.begin(nest.body, row)
        heap = [local for local in locals_here if not _on_stack(local)]
        with self._text.block(f"WEFT_PART void {_NAME}_{suffix}({parameters})"):
            for local in heap:
                kind = C_TYPES[local.dtype].value
                size = f"sizeof({kind}) * ({index_c(local.extent)})"
                self._text.line(f"{kind} *restrict {local.name} = malloc({size});")
            with ExitStack() as around:
                for loop in nest.around:
                    head = for_head(loop.axis, "0", index_c(loop.axis.extent))
                    around.enter_context(self._text.block(head))
                if nest.shared:
                    self._shared_loops(nest, locals_here)
                else:
                    self._declare(locals_here)
                    self._body.body(nest.body)
            if self._streamed:
                self._text.line("weft_stream_end();")
            for local in heap:
                self._text.line(f"free({local.name});")

    def _shared_loops(self, nest: Nest, locals_here: list[Local]) -> None:
        notes = tuple(note for loop in nest.shared for note in loop.notes)
        innermost = ir.Loop(nest.shared[-1].axis, nest.body, notes=notes)
        alone = len(nest.shared) == 1
        if alone and self._body.simd(innermost) is not None:
            self._body.innermost(innermost, "lo", "hi")
            return
        self._text.notes(notes)
        chunks = "for (int64_t chunk = lo; chunk < hi; chunk++)"
        with self._text.block(for_head(innermost.axis, "lo", "hi") if alone else chunks):
            rest = "chunk"
            for position, loop in reversed(list(enumerate([] if alone else nest.shared))):
                extent = index_c(loop.axis.extent)
                text = rest if position == 0 else f"{rest} % ({extent})"
                self._text.line(f"const int64_t {loop.axis.key} = {text};")
                if position:
                    self._text.line(f"const int64_t chunk{position} = {rest} / ({extent});")
                    rest = f"chunk{position}"
            self._declare(locals_here)
            self._body.body(nest.body)

    # ---- locals ----

    def _declare(self, locals_here: list[Local]) -> None:
        """Declare what a parallel iteration owns, but for what a simd loop keeps private."""
        for local in locals_here:
            row = "" if local.is_scalar else f"[{index_c(local.extent)}] WEFT_ALIGNED"
            if local not in self._private if local.is_scalar else _on_stack(local):
                kind = "double" if local in self._body.wide else C_TYPES[local.dtype].value
                self._text.line(f"{kind} {local.name}{row};")


def _streamed(kernel: ir.Kernel, dtypes: dict[str, torch.dtype]) -> set[str]:
    """The parameters that are only stored to, by one statement, and larger than every cache.

    Not those of costly functions: arithmetic is what such loops wait for.
    """
    bytes_stored: dict[str, int] = {}

    def visit(body: Sequence[ir.Stmt], count: int) -> None:
        for stmt in body:
            if isinstance(stmt, ir.Loop):
                extent = stmt.axis.extent
                visit(stmt.body, count * (extent.value if extent.is_const else 0))
            elif isinstance(stmt, ir.Store):
                alone = stmt.buffer not in bytes_stored and stmt.buffer not in kernel.loads
                alone &= all(_cost(node) <= _CHEAP for node in walk(stmt.value))
                bytes_stored[stmt.buffer] = alone * count * C_TYPES[dtypes[stmt.buffer]].bytes

    visit(kernel.body, 1)
    return {name for name, size in bytes_stored.items() if size >= last_level_cache()}


def _on_stack(local: Local) -> bool:
    size = local.extent
    return size.is_const and size.value * C_TYPES[local.dtype].bytes <= STACK_BYTES
