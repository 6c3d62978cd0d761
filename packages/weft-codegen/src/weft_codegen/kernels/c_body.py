"""Writes the statements of a loop nest as C, and its innermost loops for vector lanes.

An innermost loop becomes one of
    plain      for (i...)                               iterations depend on each other
    simd       #pragma omp simd for (i...)              lanes are independent
    lanes      for (block...) simd for (lane...)        sums over a long axis: 64 partial sums, so
                                                        several chains are in flight, added up by
                                                        a tree (weft_kernel.h); gcc would add the
                                                        lanes of a simd reduction one by one.
                                                        Loops over float16 too (staged.py)
A long sum of floats is also cut into chunks, so that its rounding error does not grow with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weft_codegen.kernels.c_expr import ExprWriter
from weft_codegen.kernels.c_types import C_TYPES, HALVES, convert, wrap
from weft_codegen.kernels.simd import SimdLoop, analyse
from weft_codegen.kernels.staged import Staged, find_staged
from weft_codegen.kernels.turn import Turn, match_turn
from weft_codegen.loops.expr import Cast, Op, Read, walk
from weft_codegen.loops.index import Axis
from weft_codegen.loops.lower.origins import by_line
from weft_codegen.loops.ops import OPS, REDUCTIONS
from weft_codegen.loops.program import Loop, Reduce, Set, Stmt, Store, statements, stmt_exprs
from weft_codegen.loops.schedule.tile import TILE

LANES = 64
SUM_CHUNK = 16384
# Elements of a block whose rows are unrolled.
_IN_REGISTERS = 256
NOTE = "/* @ "
_EACH_LANE = f"for (int64_t lane = 0; lane < {LANES}; lane++)"
_CLAUSES = {"sum": "+", "prod": "*", "any": "|", "all": "&", "max": "max", "min": "min"}


def without_notes(text: str) -> str:
    """C text without the lines that `CText.notes` wrote: what the compiler gets."""
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(NOTE))


class CText:
    """Lines of C with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 0

    def line(self, text: str) -> None:
        """One line at the current depth."""
        self.lines.append("    " * self._depth + text)

    def notes(self, origins: Iterable[str]) -> None:
        """Comments that say where a loop comes from (`without_notes` takes them out again)."""
        for text in by_line(origins):
            self.line(f"{NOTE}{text.replace('*/', '* /')} */")

    def open(self, head: str) -> None:
        """Begin a block: a function at depth zero, else a statement with braces."""
        if self._depth == 0:
            self.lines += [*head.splitlines(), "{"]
        else:
            self.line(f"{head} {{" if head else "{")
        self._depth += 1

    def close(self) -> None:
        """End a block."""
        self._depth -= 1
        self.line("}")
        if self._depth == 0:
            self.lines.append("")


class BodyWriter:
    """Writes bodies into `text`; `dtypes` are those of the kernel's parameters."""

    def __init__(self, text: CText, dtypes: dict[str, torch.dtype]) -> None:
        self._text = text
        self._dtypes = dtypes
        self._exprs = ExprWriter()
        self._count = 0
        self._staged: dict[Store, str] = {}
        self._nest: Counter[str] = Counter()

    def begin(self, body: tuple[Stmt, ...]) -> frozenset[str]:
        """Start a nest; gives the names of locals that its simd loops declare themselves."""
        self._nest = _uses(body)
        found: set[str] = set()
        for stmt in statements(body):
            if isinstance(stmt, Loop):
                simd = self.simd(stmt)
                found.update(local.name for local in simd.private) if simd else None
        return frozenset(found)

    def simd(self, loop: Loop) -> SimdLoop | None:
        """How `loop` vectorises, given what the rest of the nest uses."""
        inside = _uses(loop.body)
        elsewhere = frozenset(name for name in inside if self._nest[name] > inside[name])
        return analyse(loop, elsewhere)

    def body(self, body: tuple[Stmt, ...]) -> None:
        """Write a body's statements in order."""
        saved = self._exprs.enter(expr for stmt in body for expr in stmt_exprs(stmt))
        for stmt in body:
            if isinstance(stmt, Loop):
                self._loop(stmt)
            else:
                self._statement(stmt)
        self._exprs.leave(saved)

    def _loop(self, loop: Loop) -> None:
        end = self._exprs.index(loop.axis.extent)
        if loop.limit is not None:
            end = f"weft_min({end}, {self._exprs.index(loop.limit)})"
        self._exprs.forget(changed(loop.body))
        turn = match_turn(loop)
        if turn is not None and not self._turn(turn):
            return
        if any(isinstance(stmt, Loop) for stmt in loop.body):
            self._text.notes(loop.notes)
            if _in_registers(loop):
                self._text.line(f"#pragma GCC unroll {loop.axis.extent.value}")
            self._text.open(for_head(loop.axis, "0", end))
            self.body(loop.body)
            self._text.close()
        else:
            self.innermost(loop, "0", end)

    def _turn(self, turn: Turn) -> bool:
        """Write a call for a full tile; whether its loops are needed too, for tiles at an edge."""
        size = C_TYPES[turn.local.dtype].bytes
        source = f"{turn.buffer} + {self._exprs.index(turn.base)}"
        call = f"weft_turn_{size}({source}, {self._exprs.index(turn.step)}, {turn.local.name});"
        full = " && ".join(f"{self._exprs.index(limit)} >= {TILE}" for limit in turn.limits)
        self._text.line(f"if ({full}) {call} else" if full else call)
        return bool(full)

    # ---- statements ----

    def _statement(self, stmt: Set | Reduce | Store) -> None:
        self._define(stmt)
        if isinstance(stmt, Store):
            self._store(stmt)
        elif isinstance(stmt, Set):
            target = self._exprs.local(stmt.local, stmt.index)
            self._text.line(f"{target} = {self._exprs.text(stmt.value)};")
            self._exprs.forget([stmt.local.name])
        else:
            self._combine(stmt, [self._exprs.local(local, stmt.index) for local in stmt.targets])
            self._exprs.forget(local.name for local in stmt.targets)

    def _define(self, stmt: Stmt) -> None:
        for root in stmt_exprs(stmt):
            for line in self._exprs.define(root):
                self._text.line(line)

    def _store(self, stmt: Store) -> None:
        dtype = self._dtypes[stmt.buffer]
        target = f"{stmt.buffer}[{self._exprs.index(stmt.index)}]"
        if stmt in self._staged:
            assert isinstance(stmt.value, Cast)
            self._text.line(f"{self._staged[stmt]}[lane] = {self._exprs.text(stmt.value.arg)};")
            return
        value = self._exprs.text(stmt.value)
        if stmt.mode == "set":
            self._text.line(f"{target} = {value};")
            return
        number = torch.float32 if dtype in HALVES else dtype
        total = f"({convert(target, dtype, number)} + {convert(value, dtype, number)})"
        self._text.line(f"{target} = {wrap(convert(total, number, dtype), dtype)};")

    def _combine(self, stmt: Reduce, targets: Sequence[str]) -> None:
        """targets = op(targets, values)"""
        values = [self._exprs.text(value) for value in stmt.values]
        if len(targets) == 2:
            self._extreme_position(stmt, targets, values)
            return
        dtype, value = stmt.targets[0].dtype, stmt.values[0]
        fused = isinstance(value, Op) and value.name == "product" and stmt.op == "sum"
        if fused and dtype is torch.float32:
            factors = ", ".join(map(self._exprs.text, value.children))
            self._text.line(f"{targets[0]} = WEFT_FMA({factors}, {targets[0]});")
            return
        row = OPS[REDUCTIONS[stmt.op].combine]
        text = row.c.format(values[0], targets[0], t=C_TYPES[dtype].suffix)
        self._text.line(f"{targets[0]} = {wrap(text, dtype)};")

    def _extreme_position(self, stmt: Reduce, targets: Sequence[str], values: list[str]) -> None:
        """argmax, argmin: the first of equals wins, and nan beats everything."""
        sign = ">" if stmt.op == "argmax" else "<"
        best, place = targets
        value = self._name("x")
        self._text.open("")
        self._text.line(f"const {C_TYPES[stmt.targets[0].dtype].value} {value} = {values[0]};")
        better = f"{value} {sign} {best} || ({value} != {value} && {best} == {best})"
        self._text.open(f"if ({better})")
        self._text.line(f"{best} = {value};")
        self._text.line(f"{place} = {values[1]};")
        self._text.close()
        self._text.close()

    # ---- innermost loops ----

    def innermost(self, loop: Loop, start: str, end: str) -> None:
        """Write a loop without loops inside, over [start, end)."""
        self._text.notes(loop.notes)
        simd = self.simd(loop)
        if simd is None:
            self._text.open(for_head(loop.axis, start, end))
            self.body(loop.body)
            self._text.close()
            return
        registers = {stmt: self._name("r") for stmt in simd.carried}
        chunked = any(_long_float_sum(stmt, loop) for stmt in simd.carried)
        if chunked:
            self._text.open(f"for (int64_t first = {start}; first < {end}; first += {SUM_CHUNK})")
            start, end = "first", f"weft_min(first + {SUM_CHUNK}, {end})"
        staged = find_staged(loop)
        if _wants_lanes(loop, simd, staged):
            self._lane_loop(loop, simd, registers, staged, start, end)
        else:
            for stmt, name in registers.items():
                target = self._exprs.local(stmt.targets[0], stmt.index)
                self._register(stmt, name, "0" if stmt.op == "sum" else target)
            self._simd_loop(loop, simd, registers, start, end)
        for stmt, name in registers.items():
            target = self._exprs.local(stmt.targets[0], stmt.index)
            self._text.line(f"{target} {'+=' if stmt.op == 'sum' else '='} {name};")
        if chunked:
            self._text.close()

    def _lane_loop(
        self,
        loop: Loop,
        simd: SimdLoop,
        registers: dict[Reduce, str],
        staged: Staged,
        start: str,
        end: str,
    ) -> None:
        """64 partial results a reduction, then what is left of the axis."""
        for stmt, name in registers.items():
            kind = C_TYPES[stmt.targets[0].dtype].value
            self._text.line(f"{kind} {name}_lanes[{LANES}] WEFT_ALIGNED = {{0}};")
            if stmt.op != "sum":
                first = self._exprs.local(stmt.targets[0], stmt.index)
                self._text.line(f"{_EACH_LANE} {name}_lanes[lane] = {first};")
        block = self._name("block")
        self._text.line(f"int64_t {block} = {start};")
        self._text.open(f"for (; {block} + {LANES} <= {end}; {block} += {LANES})")
        if staged:
            self._text.line(f"const int64_t {loop.axis.key} = {block};")
        saved = self._exprs.enter(())
        narrowed = self._stage(staged)
        self._text.line("#pragma omp simd")
        self._text.open(_EACH_LANE)
        self._text.line(f"const int64_t {loop.axis.key} = {block} + lane;")
        self._simd_body(loop, simd, registers, lambda name: f"{name}_lanes[lane]")
        self._text.close()
        for text in narrowed:
            self._text.line(text)
        self._text.close()
        self._exprs.leave(saved)
        self._staged = {}
        for stmt, name in registers.items():
            self._join_lanes(stmt, name)
        extent = loop.axis.extent
        if start == "lo" or loop.limit or not extent.is_const or extent.value % LANES:
            self._simd_loop(loop, simd, registers, block, end)

    def _stage(self, staged: Staged) -> list[str]:
        """Convert what a block reads; the lines that convert what it stores."""
        for node, element in staged.reads:
            name = self._name("h")
            where = self._exprs.index(element.index)
            self._text.line(f"float {name}[{LANES}] WEFT_ALIGNED;")
            self._text.line(f"weft_widen_f16({element.buffer} + {where}, {name});")
            self._exprs.name(node, f"{name}[lane]")
        lines: list[str] = []
        for stmt in staged.stores:
            name = self._staged[stmt] = self._name("h")
            where = self._exprs.index(stmt.index)
            self._text.line(f"float {name}[{LANES}] WEFT_ALIGNED;")
            lines.append(f"weft_narrow_f16({name}, {stmt.buffer} + {where});")
        return lines

    def _join_lanes(self, stmt: Reduce, name: str) -> None:
        """Declare the register of a reduction with what its lanes hold."""
        if stmt.op == "sum":
            suffix = C_TYPES[stmt.targets[0].dtype].suffix
            self._register(stmt, name, f"sum_lanes_{suffix}({name}_lanes)")
            return
        self._register(stmt, name, f"{name}_lanes[0]")
        self._text.open("")
        with self._reducing({stmt: name}, _EACH_LANE):
            self._clause_combine(stmt, name, f"{name}_lanes[lane]")
        self._text.close()

    def _simd_loop(
        self, loop: Loop, simd: SimdLoop, registers: dict[Reduce, str], start: str, end: str
    ) -> None:
        with self._reducing(registers, for_head(loop.axis, start, end)):
            self._simd_body(loop, simd, registers, None)

    @contextmanager
    def _reducing(self, registers: dict[Reduce, str], head: str) -> Iterator[None]:
        """A loop in vector lanes that combines into `registers`."""
        clauses = ""
        for stmt, name in registers.items():
            clauses += f" reduction({_CLAUSES[stmt.op]}:{name})"
            if _may_be_nan(stmt):
                # A vector maximum does not keep nan, so that is noted apart.
                wide = stmt.targets[0].dtype is torch.float64
                self._text.line(
                    f"{'int64_t' if wide else 'int32_t'} {name}_nan = {name} != {name};"
                )
                clauses += f" reduction(|:{name}_nan)"
        self._text.line(f"#pragma omp simd{clauses}")
        self._text.open(head)
        yield
        self._text.close()
        for stmt, name in registers.items():
            if _may_be_nan(stmt):
                suffix = "f" if stmt.targets[0].dtype is torch.float32 else ""
                self._text.line(f'{name} = {name}_nan ? __builtin_nan{suffix}("") : {name};')

    def _register(self, stmt: Reduce, name: str, first: str) -> None:
        dtype = stmt.targets[0].dtype
        kind = "int32_t" if dtype is torch.bool else C_TYPES[dtype].value
        self._text.line(f"{kind} {name} = {first};")

    def _simd_body(
        self,
        loop: Loop,
        simd: SimdLoop,
        registers: dict[Reduce, str],
        lane: Callable[[str], str] | None,
    ) -> None:
        """The statements of one iteration; `lane` names a reduction's partial result."""
        for local in simd.private:
            self._text.line(f"{C_TYPES[local.dtype].value} {local.name};")
        saved = self._exprs.enter(expr for stmt in loop.body for expr in stmt_exprs(stmt))
        for stmt in loop.body:
            if isinstance(stmt, Reduce) and stmt in registers:
                self._define(stmt)
                if lane is not None:
                    self._combine(stmt, [lane(registers[stmt])])
                else:
                    self._clause_combine(stmt, registers[stmt], self._exprs.text(stmt.values[0]))
            elif not isinstance(stmt, Loop):
                self._statement(stmt)
        self._exprs.leave(saved)

    def _clause_combine(self, stmt: Reduce, name: str, value: str) -> None:
        """The combination in the form that a reduction clause expects."""
        if stmt.op in ("max", "min"):
            sign = ">" if stmt.op == "max" else "<"
            kind = C_TYPES[stmt.targets[0].dtype].value
            self._text.line(f"const {kind} {name}_x = {value};")
            self._text.line(f"{name} = {name}_x {sign} {name} ? {name}_x : {name};")
            if _may_be_nan(stmt):
                self._text.line(f"{name}_nan |= {name}_x != {name}_x;")
            return
        self._text.line(f"{name} {_CLAUSES[stmt.op]}= {value};")

    def _name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count - 1}"


def for_head(axis: Axis, start: str, end: str) -> str:
    """`for (axis from start to end)`"""
    return f"for (int64_t {axis.key} = {start}; {axis.key} < {end}; {axis.key}++)"


def changed(body: tuple[Stmt, ...]) -> list[str]:
    """The names of the locals that `body` changes."""
    names = []
    for stmt in statements(body):
        if isinstance(stmt, Set):
            names.append(stmt.local.name)
        elif isinstance(stmt, Reduce):
            names += [local.name for local in stmt.targets]
    return names


def _uses(body: tuple[Stmt, ...]) -> Counter[str]:
    """How many statements in `body` read or change each local."""
    found: Counter[str] = Counter()
    for stmt in statements(body):
        if not isinstance(stmt, Loop):
            reads = {n.local.name for n in walk(*stmt_exprs(stmt)) if isinstance(n, Read)}
            found.update(reads | set(changed((stmt,))))
    return found


def local_names(body: tuple[Stmt, ...]) -> frozenset[str]:
    """The names of the locals that `body` reads or changes."""
    return frozenset(_uses(body))


def _in_registers(loop: Loop) -> bool:
    """Whether a loop is the rows of a small block: unrolled, its sums stay in registers."""
    inner = loop.body[0]
    if len(loop.body) > 1 or not isinstance(inner, Loop):
        return False
    if loop.limit is not None or inner.limit is not None:
        return False
    rows, columns = loop.axis.extent, inner.axis.extent
    known = rows.is_const and columns.is_const and rows.value <= 8
    innermost = not any(isinstance(stmt, Loop) for stmt in inner.body)
    return known and innermost and rows.value * columns.value <= _IN_REGISTERS


def _may_be_nan(stmt: Reduce) -> bool:
    return stmt.op in ("max", "min") and stmt.targets[0].dtype.is_floating_point


def _long_float_sum(stmt: Reduce, loop: Loop) -> bool:
    """Whether to add up in chunks: the rounding error of one long chain would show."""
    extent = loop.axis.extent
    long = not extent.is_const or extent.value > SUM_CHUNK
    return stmt.op == "sum" and stmt.targets[0].dtype.is_floating_point and long


def _wants_lanes(loop: Loop, simd: SimdLoop, staged: Staged) -> bool:
    """Whether blocks pay: for float16, and sums of floats (a maximum alone measured slower)."""
    extent = loop.axis.extent
    if extent.is_const and extent.value < LANES:
        return False
    ops = ("sum", "max", "min") if staged else ("sum",)
    return bool(staged or simd.carried) and all(
        stmt.op in ops and stmt.targets[0].dtype.is_floating_point for stmt in simd.carried
    )
