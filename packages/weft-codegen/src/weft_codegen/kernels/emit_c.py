"""Writes a Kernel as C.

    static void K_part(params, lo, hi)     the loop nest over a range of its parallel iterations
    static void K_team(void *args)         one thread's share of them
    void K(params)                         decides how many threads the work is worth

The nest is an own function so that `restrict` survives (an OpenMP region would lose it).  The
parallel loops in front are flattened into one range; the innermost loop is marked
`#pragma omp simd`, which gcc and clang turn into full vectors and a tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft_codegen.kernels.build import kernel_symbol
from weft_codegen.kernels.c_expr import ExprWriter, index_c, is_scalar
from weft_codegen.kernels.c_types import C_TYPES, convert, wrap
from weft_codegen.kernels.simd import SimdLoop, analyse, collides
from weft_codegen.loops.expr import Expr, Local, Op, Read, walk
from weft_codegen.loops.index import Axis, IndexExpr, const, product
from weft_codegen.loops.ops import OPS, REDUCTIONS
from weft_codegen.loops.program import (
    Kernel,
    Loop,
    Reduce,
    Set,
    Stmt,
    Store,
    statements,
    stmt_exprs,
)

SERIAL_WORK = 131072
STACK_BYTES = 65536
SUM_CHUNK = 4096
_NAME = "@KERNEL@"


@dataclass(frozen=True)
class KernelCode:
    """A kernel in C: `prototype` declares it to the host, `symbol` names it."""

    symbol: str
    prototype: str
    text: str


def emit_kernel(kernel: Kernel) -> KernelCode:
    """C text of `kernel` under a symbol made from that text, so equal kernels share it."""
    text = _KernelWriter(kernel).text()
    symbol = kernel_symbol(text)
    prototype = f"void {symbol}({_parameters(kernel, restrict=False)});"
    return KernelCode(symbol, prototype, text.replace(_NAME, symbol))


def _parameters(kernel: Kernel, *, restrict: bool) -> str:
    mark = "restrict " if restrict else ""
    parts = []
    for param in kernel.params:
        kind = C_TYPES[param.dtype].memory
        parts.append(f"{'' if param.written else 'const '}{kind} *{mark}{param.name}")
    parts += [f"int64_t {name}" for name in kernel.sizes]
    return ", ".join(parts)


def work_of(body: Sequence[Stmt]) -> IndexExpr:
    """The cost of a body in float additions."""
    total = const(0)
    for stmt in body:
        if isinstance(stmt, Loop):
            total = total + stmt.axis.extent * work_of(stmt.body)
        else:
            total = total + 1 + sum(map(_cost, walk(*stmt_exprs(stmt))))
    return total


def _cost(node: Expr) -> int:
    return OPS[node.name].cost if isinstance(node, Op) else 1


@dataclass(frozen=True)
class Nest:
    """A top-level statement of a kernel, split for threads.

    `shared` are the loops whose flattened range threads divide; `kept` parallel loops stay inside
    it (before `shared` when the innermost loop is the one divided); `body` is what they run.
    """

    around: tuple[Loop, ...]
    shared: tuple[Loop, ...]
    body: tuple[Stmt, ...]


def split_nest(stmt: Stmt) -> Nest:
    """Choose which parallel loops of `stmt` threads divide among them."""
    chain: list[Loop] = []
    body: tuple[Stmt, ...] = (stmt,)
    while len(body) == 1 and isinstance(body[0], Loop) and body[0].kind == "parallel":
        if body[0].limit is not None:
            break
        chain.append(body[0])
        body = body[0].body
    innermost = chain and not any(isinstance(item, Loop) for item in body)
    if not innermost:
        return Nest((), tuple(chain), body)
    outer = product(loop.axis.extent for loop in chain[:-1])
    if len(chain) == 1 or (outer.is_const and outer.value < 16):
        return Nest(tuple(chain[:-1]), (chain[-1],), body)
    return Nest((), tuple(chain[:-1]), (chain[-1],))


class _KernelWriter:
    """Writes one kernel; `_lines` is the text so far, `_depth` its indentation."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._lines: list[str] = []
        self._depth = 0
        self._exprs = ExprWriter()
        self._temps = 0

    def text(self) -> str:
        """The whole kernel."""
        body = self._kernel.body
        together = not all(isinstance(stmt, Loop) and stmt.kind == "parallel" for stmt in body)
        calls: list[str] = []
        if together:
            self._part("part", Nest((), (), body))
            calls.append(f"{_NAME}_part({self._names()});")
        else:
            for number, stmt in enumerate(body):
                suffix = "part" if len(body) == 1 else f"part{number}"
                calls += self._nest(suffix, split_nest(stmt), (stmt,))
        self._open(
            f'__attribute__((weak, visibility("hidden")))\n'
            f"void {_NAME}({_parameters(self._kernel, restrict=False)})"
        )
        for line in calls:
            self._line(line)
        self._close()
        return "\n".join(self._lines)

    # ---- threads ----

    def _nest(self, suffix: str, nest: Nest, whole: tuple[Stmt, ...]) -> list[str]:
        """Write the functions of one nest; the lines of the entry function that run it."""
        self._part(suffix, nest)
        chunks = product(loop.axis.extent for loop in nest.shared)
        work = work_of(whole)
        names = self._names()
        comma = ", " if names else ""
        serial = f"{_NAME}_{suffix}({names}{comma}0, {index_c(chunks)});"
        axes = tuple(loop.axis for loop in nest.shared)
        stores = [stmt for stmt in statements(whole) if isinstance(stmt, Store)]
        small = work.is_const and work.value < SERIAL_WORK
        if small or any(collides(store, axes) for store in stores):
            return [serial]
        self._team(suffix, chunks)
        args = ", ".join(f"{name}" for name in self._argument_names())
        return [
            "{",
            f"    int threads = weft_threads({index_c(chunks)}, {index_c(work)});",
            f"    struct {_NAME}_args args = {{{args}}};",
            "    if (threads == 1)",
            f"        {serial}",
            "    else",
            f"        weft_team.parallel({_NAME}_{suffix}_team, &args, threads, 0);",
            "}",
        ]

    def _argument_names(self) -> list[str]:
        return [param.name for param in self._kernel.params] + list(self._kernel.sizes)

    def _names(self) -> str:
        return ", ".join(self._argument_names())

    def _team(self, suffix: str, chunks: IndexExpr) -> None:
        if not any(line.startswith("struct") for line in self._lines):
            fields = _parameters(self._kernel, restrict=False).replace(", ", "; ")
            self._lines += [f"struct {_NAME}_args {{ {fields}; }};", ""]
        self._open(f"static void {_NAME}_{suffix}_team(void *args)")
        self._line(f"const struct {_NAME}_args *a = args;")
        self._lines += [f"    const int64_t {name} = a->{name};" for name in self._kernel.sizes]
        self._line("int64_t lo, hi;")
        self._line(f"weft_share({index_c(chunks)}, &lo, &hi);")
        args = [f"a->{param.name}" for param in self._kernel.params] + list(self._kernel.sizes)
        self._line(f"{_NAME}_{suffix}({', '.join([*args, 'lo', 'hi'])});")
        self._close()

    def _part(self, suffix: str, nest: Nest) -> None:
        """The nest over [lo, hi) of its shared loops (the whole body when there are none)."""
        ranged = ", int64_t lo, int64_t hi" if nest.shared else ""
        parameters = _parameters(self._kernel, restrict=True) + ranged
        self._open(f"WEFT_PART void {_NAME}_{suffix}({parameters})")
        locals_here = self._locals_of((*nest.shared, *nest.around, *nest.body))
        heap = [local for local in locals_here if not _on_stack(local)]
        for local in heap:
            kind = C_TYPES[local.dtype].value
            size = f"sizeof({kind}) * ({index_c(local.extent)})"
            self._line(f"{kind} *restrict {local.name} = malloc({size});")
        for loop in nest.around:
            self._open(_for(loop.axis, "0", index_c(loop.axis.extent)))
        if nest.shared:
            self._shared_loops(nest, locals_here)
        else:
            self._declare(locals_here, nest.body)
            self._body(nest.body)
        for _ in nest.around:
            self._close()
        for local in heap:
            self._line(f"free({local.name});")
        self._close()

    def _shared_loops(self, nest: Nest, locals_here: list[Local]) -> None:
        if not any(isinstance(item, Loop) for item in nest.body) and len(nest.shared) == 1:
            self._innermost(Loop(nest.shared[0].axis, nest.body), "lo", "hi", frozenset())
            return
        if len(nest.shared) == 1:
            self._open(_for(nest.shared[0].axis, "lo", "hi"))
        else:
            self._open("for (int64_t chunk = lo; chunk < hi; chunk++)")
            rest = "chunk"
            for position, loop in reversed(list(enumerate(nest.shared))):
                extent = index_c(loop.axis.extent)
                text = rest if position == 0 else f"{rest} % ({extent})"
                self._line(f"const int64_t {loop.axis.key} = {text};")
                if position:
                    self._line(f"const int64_t chunk{position} = {rest} / ({extent});")
                    rest = f"chunk{position}"
        self._declare(locals_here, nest.body)
        self._body(nest.body)
        self._close()

    # ---- locals ----

    def _locals_of(self, body: Sequence[Stmt]) -> list[Local]:
        used = _local_names(tuple(body))
        return [local for local in self._kernel.locals if local.name in used]

    def _declare(self, locals_here: list[Local], body: tuple[Stmt, ...]) -> None:
        """Declare what a parallel iteration owns, but for what a simd loop keeps private."""
        private = {local.name for loop in _simd_loops(body) for local in loop.private}
        for local in locals_here:
            kind = C_TYPES[local.dtype].value
            if is_scalar(local):
                if local.name not in private:
                    self._line(f"{kind} {local.name};")
            elif _on_stack(local):
                align = "__attribute__((aligned(64)))"
                self._line(f"{kind} {local.name}[{index_c(local.extent)}] {align};")

    # ---- statements ----

    def _body(self, body: tuple[Stmt, ...]) -> None:
        saved = self._exprs.enter(expr for stmt in body for expr in stmt_exprs(stmt))
        for position, stmt in enumerate(body):
            if isinstance(stmt, Loop):
                elsewhere = _local_names(body[:position] + body[position + 1 :])
                self._loop(stmt, elsewhere)
            else:
                self._statement(stmt)
        self._exprs.leave(saved)

    def _loop(self, loop: Loop, elsewhere: frozenset[str]) -> None:
        end = self._exprs.index(loop.axis.extent)
        if loop.limit is not None:
            end = f"weft_min({end}, {self._exprs.index(loop.limit)})"
        self._exprs.forget(_changed(loop.body))
        if any(isinstance(stmt, Loop) for stmt in loop.body):
            self._open(_for(loop.axis, "0", end))
            self._body(loop.body)
            self._close()
        else:
            self._innermost(loop, "0", end, elsewhere)

    def _statement(self, stmt: Set | Reduce | Store) -> None:
        for root in stmt_exprs(stmt):
            for line in self._exprs.define(root):
                self._line(line)
        if isinstance(stmt, Store):
            self._store(stmt)
        elif isinstance(stmt, Set):
            target = self._exprs.local(stmt.local, stmt.index)
            self._line(f"{target} = {self._exprs.text(stmt.value)};")
            self._exprs.forget([stmt.local.name])
        else:
            targets = [self._exprs.local(local, stmt.index) for local in stmt.targets]
            self._combine(stmt, targets)
            self._exprs.forget(local.name for local in stmt.targets)

    def _store(self, stmt: Store) -> None:
        dtype = next(p.dtype for p in self._kernel.params if p.name == stmt.buffer)
        target = f"{stmt.buffer}[{self._exprs.index(stmt.index)}]"
        value = self._exprs.text(stmt.value)
        if stmt.mode == "set":
            self._line(f"{target} = {value};")
            return
        number = torch.float32 if C_TYPES[dtype].suffix in ("f16", "bf16") else dtype
        old = convert(target, dtype, number)
        total = convert(f"({old} + {convert(value, dtype, number)})", number, dtype)
        self._line(f"{target} = {wrap(total, dtype)};")

    def _combine(self, stmt: Reduce, targets: Sequence[str]) -> None:
        """targets = op(targets, values), one iteration after another."""
        values = [self._exprs.text(value) for value in stmt.values]
        if len(targets) == 2:
            self._extreme_position(stmt, targets, values)
            return
        dtype = stmt.targets[0].dtype
        row = OPS[REDUCTIONS[stmt.op].combine]
        text = row.c.format(targets[0], values[0], t=C_TYPES[dtype].suffix)
        self._line(f"{targets[0]} = {wrap(text, dtype)};")

    def _extreme_position(self, stmt: Reduce, targets: Sequence[str], values: list[str]) -> None:
        """argmax, argmin: the first of equals wins, and nan beats everything."""
        sign = ">" if stmt.op == "argmax" else "<"
        best, place = targets
        value = f"x{self._temps}"
        self._temps += 1
        kind = C_TYPES[stmt.targets[0].dtype].value
        self._open("")
        self._line(f"const {kind} {value} = {values[0]};")
        better = f"{value} {sign} {best} || ({value} != {value} && {best} == {best})"
        self._open(f"if ({better})")
        self._line(f"{best} = {value};")
        self._line(f"{place} = {values[1]};")
        self._close()
        self._close()

    # ---- innermost loops ----

    def _innermost(self, loop: Loop, start: str, end: str, elsewhere: frozenset[str]) -> None:
        simd = analyse(loop, elsewhere)
        if simd is None:
            self._open(_for(loop.axis, start, end))
            self._body(loop.body)
            self._close()
            return
        sums = [stmt for stmt in simd.carried if _long_float_sum(stmt, loop)]
        registers = {stmt: f"r{self._temps + k}" for k, stmt in enumerate(simd.carried)}
        self._temps += len(registers)
        if sums:
            self._open(f"for (int64_t first = {start}; first < {end}; first += {SUM_CHUNK})")
            start, end = "first", f"weft_min(first + {SUM_CHUNK}, {end})"
        self._simd_loop(loop, simd, registers, start, end)
        if sums:
            self._close()

    def _simd_loop(
        self, loop: Loop, simd: SimdLoop, registers: dict[Reduce, str], start: str, end: str
    ) -> None:
        clauses = ""
        for reduction, name in registers.items():
            clauses += self._begin_reduction(reduction, name, loop)
        self._line(f"#pragma omp simd{clauses}")
        self._open(_for(loop.axis, start, end))
        for local in simd.private:
            self._line(f"{C_TYPES[local.dtype].value} {local.name};")
        saved = self._exprs.enter(expr for stmt in loop.body for expr in stmt_exprs(stmt))
        for stmt in loop.body:
            if isinstance(stmt, Reduce) and stmt in registers:
                self._lane_reduction(stmt, registers[stmt])
            elif not isinstance(stmt, Loop):
                self._statement(stmt)
        self._exprs.leave(saved)
        self._close()
        for reduction, name in registers.items():
            self._end_reduction(reduction, name, loop)

    def _begin_reduction(self, stmt: Reduce, name: str, loop: Loop) -> str:
        """Declare the accumulator of a reduction; its clause of the pragma."""
        target = self._exprs.local(stmt.targets[0], stmt.index)
        dtype = stmt.targets[0].dtype
        kind = "int32_t" if dtype is torch.bool else C_TYPES[dtype].value
        sign = {"sum": "+", "prod": "*", "any": "|", "all": "&"}.get(stmt.op, stmt.op)
        first = "0" if _long_float_sum(stmt, loop) else target
        self._line(f"{kind} {name} = {first};")
        clause = f" reduction({sign}:{name})"
        if stmt.op in ("max", "min") and dtype.is_floating_point:
            flag = "int64_t" if dtype is torch.float64 else "int32_t"
            self._line(f"{flag} {name}_nan = {target} != {target};")
            clause += f" reduction(|:{name}_nan)"
        return clause

    def _lane_reduction(self, stmt: Reduce, name: str) -> None:
        for line in self._exprs.define(stmt.values[0]):
            self._line(line)
        value = self._exprs.text(stmt.values[0])
        if stmt.op in ("max", "min"):
            sign = ">" if stmt.op == "max" else "<"
            kind = C_TYPES[stmt.targets[0].dtype].value
            self._line(f"const {kind} {name}_x = {value};")
            self._line(f"{name} = {name}_x {sign} {name} ? {name}_x : {name};")
            if stmt.targets[0].dtype.is_floating_point:
                self._line(f"{name}_nan |= {name}_x != {name}_x;")
            return
        sign = {"sum": "+", "prod": "*", "any": "|", "all": "&"}[stmt.op]
        self._line(f"{name} {sign}= {value};")

    def _end_reduction(self, stmt: Reduce, name: str, loop: Loop) -> None:
        target = self._exprs.local(stmt.targets[0], stmt.index)
        dtype = stmt.targets[0].dtype
        if stmt.op in ("max", "min") and dtype.is_floating_point:
            nan = f'__builtin_nan{"f" if dtype is torch.float32 else ""}("")'
            self._line(f"{target} = {name}_nan ? {nan} : {name};")
        else:
            sign = "+=" if _long_float_sum(stmt, loop) else "="
            self._line(f"{target} {sign} {name};")

    # ---- text ----

    def _line(self, text: str) -> None:
        self._lines.append("    " * self._depth + text)

    def _open(self, head: str) -> None:
        if self._depth == 0:
            self._lines += [*head.splitlines(), "{"]
        else:
            self._line(f"{head} {{" if head else "{")
        self._depth += 1

    def _close(self) -> None:
        self._depth -= 1
        self._line("}")
        if self._depth == 0:
            self._lines.append("")


def _for(axis: Axis, start: str, end: str) -> str:
    return f"for (int64_t {axis.key} = {start}; {axis.key} < {end}; {axis.key}++)"


def _on_stack(local: Local) -> bool:
    size = local.extent
    return size.is_const and size.value * C_TYPES[local.dtype].bytes <= STACK_BYTES


def _long_float_sum(stmt: Reduce, loop: Loop) -> bool:
    """Whether to add up in chunks: the rounding error of one long chain would show."""
    extent = loop.axis.extent
    long = not extent.is_const or extent.value > SUM_CHUNK
    return stmt.op == "sum" and stmt.targets[0].dtype.is_floating_point and long


def _changed(body: tuple[Stmt, ...]) -> list[str]:
    """The names of the locals that `body` changes."""
    names = []
    for stmt in statements(body):
        if isinstance(stmt, Set):
            names.append(stmt.local.name)
        elif isinstance(stmt, Reduce):
            names += [local.name for local in stmt.targets]
    return names


def _local_names(body: tuple[Stmt, ...]) -> frozenset[str]:
    """The names of the locals that `body` reads or changes."""
    exprs = [expr for stmt in statements(body) for expr in stmt_exprs(stmt)]
    reads = {node.local.name for node in walk(*exprs) if isinstance(node, Read)}
    return frozenset({*reads, *_changed(body)})


def _simd_loops(body: tuple[Stmt, ...]) -> list[SimdLoop]:
    found = []
    for position, stmt in enumerate(body):
        if isinstance(stmt, Loop):
            if any(isinstance(item, Loop) for item in stmt.body):
                found += _simd_loops(stmt.body)
                continue
            loop = analyse(stmt, _local_names(body[:position] + body[position + 1 :]))
            if loop is not None:
                found.append(loop)
    return found
