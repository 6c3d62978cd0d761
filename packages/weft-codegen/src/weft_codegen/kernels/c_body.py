"""Writes the statements of a loop nest as C, and its innermost loops for vector lanes.

An innermost loop becomes one of
    plain      for (i...)                               iterations depend on each other
    simd       #pragma omp simd for (i...)              lanes are independent
    streams    for (chunk...) simd for (i...)           results too large for any cache go past
                                                        them, through a local (weft_stream)
    lanes      for (block...) simd for (lane...)        sums over a long axis: 64 partial sums, so
                                                        several chains are in flight, added up by
                                                        a tree (weft_memory.h); gcc would add the
                                                        lanes of a simd reduction one by one.
                                                        Loops over 16-bit floats too
                                                        (half_conversion.py)
A long sum of floats is also added up in parts (partial_sums.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from weft_codegen.config import settings
from weft_codegen.kernels.c_expr import CExprWriter
from weft_codegen.kernels.c_text import CText, for_head
from weft_codegen.kernels.c_types import C_TYPES, HALVES, convert, wrap
from weft_codegen.kernels.half_conversion import HalfConversions, find_half_conversions
from weft_codegen.kernels.partial_sums import (
    LANES_CHUNK,
    ROW_CHUNK,
    SUM_CHUNK,
    added_to_often,
    adds_floats,
    adds_long,
    long_chains,
    rows_to_part,
)
from weft_codegen.kernels.prefetch import Prefetches, find_prefetches
from weft_codegen.kernels.simd import (
    SimdLoop,
    adds_rows,
    analyse,
    in_registers,
    mixes_masked,
    walks,
)
from weft_codegen.kernels.transpose_tile import TransposeTile, match_transpose_tile
from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.expr import Cast, Local, index_of, is_product
from weft_codegen.loops.index import ZERO, Atom, Axis, IndexExpr, single
from weft_codegen.loops.ops import OPS, REDUCTIONS
from weft_codegen.loops.program import (
    Body,
    Loop,
    Reduce,
    Set,
    Stmt,
    Store,
    locals_changed,
    locals_read,
    statements,
    stmt_exprs,
)

Registers = dict[Reduce, str]  # the C variable of each reduction's result so far
Range = tuple[str, str]  # the first iteration of a loop, and past the last one
LANES = 64
STREAM_CHUNK = 256
# Rows that a column reduction takes at once.
ROWS = 8
_EACH_LANE = f"for (int64_t lane = 0; lane < {LANES}; lane++)"
_CLAUSES = {"sum": "+", "prod": "*", "any": "|", "all": "&", "max": "max", "min": "min"}


class BodyWriter:
    """Writes bodies into `text`; `dtypes` are those of the kernel's parameters.

    `streamed` names those that stores reach past the caches, where the loops allow it. Locals
    `in_order` are added to by several statements, one after the other; those `wide` are doubles.
    """

    def __init__(self, text: CText, dtypes: dict[str, torch.dtype], streamed: set[str]) -> None:
        self._text, self._dtypes, self._streamed = text, dtypes, streamed
        self._held: dict[str, str] = {}
        self._exprs = CExprWriter()
        self._count = 0
        self._narrowed: dict[Store, str] = {}
        self._nest: Counter[Local] = Counter()
        self.in_order: frozenset[Local] = frozenset()
        self.wide: frozenset[Local] = frozenset()
        self._prefetches: Prefetches = {}

    def begin(self, body: Body, row: Axis | None) -> frozenset[Local]:
        """Start a nest whose iterations along `row` follow one another; gives the locals that its
        simd loops declare themselves."""
        self._nest = _uses(body)
        self.in_order = added_to_often(body)
        self._prefetches = find_prefetches(body, row)
        ordered = (local for local in self.in_order if local.dtype is torch.float32)
        self.wide = self._exprs.wide = long_chains(body, self.simd).union(ordered)
        simds = [self.simd(stmt) for stmt in statements(body) if isinstance(stmt, Loop)]
        return frozenset(local for simd in simds if simd for local in simd.private)

    def simd(self, loop: Loop) -> SimdLoop | None:
        """How `loop` vectorises, given what the rest of the nest uses."""
        inside = _uses(loop.body)
        elsewhere = frozenset(x for x in inside if self._nest[x] > inside[x])
        return analyse(loop, elsewhere)

    def body(self, body: Body) -> None:
        """Write a body's statements in order."""
        with self._exprs.scope(body):
            for stmt in body:
                if isinstance(stmt, Loop):
                    self._loop(stmt)
                else:
                    self._statement(stmt)

    def _end(self, loop: Loop) -> str:
        end = self._exprs.at(loop.axis.extent)
        return end if loop.limit is None else f"weft_min({end}, {self._exprs.at(loop.limit)})"

    def _loop(self, loop: Loop) -> None:
        end = self._end(loop)
        self._exprs.forget(locals_changed(loop.body))
        tile = None if settings.check_bounds else match_transpose_tile(loop)
        if tile is not None:
            self._transpose_tile(tile)
            return
        if not loop.is_innermost:
            self._text.notes(loop.notes)
            with self._row_chunks(loop, end) as (start, end):
                if in_registers(loop):
                    self._text.line(f"#pragma GCC unroll {loop.axis.extent.value}")
                elif adds_rows(loop):
                    start = self._rows_together(loop, start, end)
                with self._text.block(for_head(loop.axis, start, end)):
                    self.body(loop.body)
        else:
            self.innermost(loop, "0", end)

    def _transpose_tile(self, tile: TransposeTile) -> None:
        """Write the call that fills a tile."""
        rows, columns = self._end(tile.row), self._end(tile.column)
        source = f"{tile.buffer} + {self._exprs.at(tile.base)}, {self._exprs.at(tile.step)}"
        target = f"{tile.local.name}, {tile.column.axis.extent}, {rows}, {columns}"
        self._text.line(f"weft_transpose_{C_TYPES[tile.local.dtype].bytes}({source}, {target});")

    # ---- statements ----

    def _statement(self, stmt: Set | Reduce | Store) -> None:
        self._define(stmt)
        if isinstance(stmt, Store):
            self._store(stmt)
        elif isinstance(stmt, Set):
            target = self._exprs.local(stmt.local, stmt.index)
            self._text.line(f"{target} = {self._exprs.text(stmt.value)};")
            self._exprs.forget([stmt.local])
        else:
            self._combine(stmt, [self._exprs.local(local, stmt.index) for local in stmt.targets])
            self._exprs.forget(stmt.targets)

    def _define(self, stmt: Stmt) -> None:
        for line in self._exprs.define(*stmt_exprs(stmt)):
            self._text.line(line)

    def _store(self, stmt: Store) -> None:
        dtype = self._dtypes[stmt.buffer]
        target = self._held.get(stmt.buffer)
        target = target or self._exprs.element(stmt.buffer, self._exprs.at(stmt.index))
        if stmt in self._narrowed:
            assert isinstance(stmt.value, Cast)
            self._text.line(f"{self._narrowed[stmt]}[lane] = {self._exprs.text(stmt.value.arg)};")
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
        fused = is_product(value) and stmt.op == "sum"
        if fused and dtype is torch.float32 and stmt.targets[0] not in self.wide:
            factors = ", ".join(map(self._exprs.text, value.children))
            self._text.line(f"{targets[0]} = WEFT_FMA({factors}, {targets[0]});")
        else:
            row = OPS[REDUCTIONS[stmt.op].combine]
            text = row.c.format(values[0], targets[0], t=C_TYPES[dtype].suffix)
            self._text.line(f"{targets[0]} = {wrap(text, dtype)};")
        self._keep_order(stmt, targets[0])

    def _keep_order(self, stmt: Reduce, target: str) -> None:
        if stmt.targets[0] in self.in_order and target == stmt.targets[0].name:
            self._text.line(f"WEFT_IN_ORDER({target});")

    def _extreme_position(self, stmt: Reduce, targets: Sequence[str], values: list[str]) -> None:
        """argmax, argmin: the lowest index of equals wins, and nan beats everything.

        Loops over several axes, or over one part after another, may have another order than it.
        """
        sign = ">" if stmt.op == "argmax" else "<"
        best, place = targets
        value = self._name("x")
        position = index_of(stmt.values[1])
        in_order = position is not None and isinstance(single(position), Axis)
        with self._text.block(""):
            self._text.line(f"const {C_TYPES[stmt.targets[0].dtype].value} {value} = {values[0]};")
            better = f"{value} {sign} {best} || ({value} != {value} && {best} == {best})"
            if not in_order:
                tie = f"{value} == {best} || ({value} != {value} && {best} != {best})"
                better += f" || ({values[1]} < {place} && ({tie}))"
            with self._text.block(f"if ({better})"):
                self._text.line(f"{best} = {value};")
                self._text.line(f"{place} = {values[1]};")

    # ---- innermost loops ----

    @contextmanager
    def _row_chunks(self, loop: Loop, end: str) -> Iterator[Range]:
        """A loop that adds to rows of accumulators: in chunks, each with sums of its own."""
        rows = rows_to_part(loop)
        if not rows:
            yield "0", end
            return
        first, last, before = self._name("first"), self._name("last"), dict(self._exprs.renamed)
        head = f"for (int64_t {first} = 0; {first} < {end}; {first} += {ROW_CHUNK})"
        with self._text.block(head):
            self._text.line(f"const int64_t {last} = weft_min({first} + {ROW_CHUNK}, {end});")
            for local in rows:
                part = self._exprs.renamed[local] = self._name("part")
                kind = C_TYPES[local.dtype].value
                self._text.line(f"{kind} {part}[{local.extent}] WEFT_ALIGNED = {{0}};")
            yield first, last
            parts, self._exprs.renamed = self._exprs.renamed, before
            for local in rows:
                self._text.line("#pragma omp simd")
                self._text.line(f"for (int64_t each = 0; each < {local.extent}; each++)")
                total = before.get(local, local.name)
                self._text.line(f"    {total}[each] += {parts[local]}[each];")

    def _rows_together(self, loop: Loop, start: str, end: str) -> str:
        """Column reductions: ROWS rows a pass over their accumulators; where the rest begins."""
        inner = loop.body[0]
        simd = self.simd(inner) if isinstance(inner, Loop) else None
        if not isinstance(inner, Loop) or simd is None:
            return start
        row = self._name("row")
        self._text.line(f"int64_t {row} = {start};")
        columns = for_head(inner.axis, "0", self._end(inner))
        rows = f"for (int64_t next = 0; next < {ROWS}; next++)"  # compilers unroll it
        with self._text.block(f"for (; {row} + {ROWS} <= {end}; {row} += {ROWS})"):
            self._text.line("#pragma omp simd")
            with self._text.block(columns):
                sums = [x for x in inner.body if isinstance(x, Reduce) and adds_floats(x)]
                totals = [self._exprs.local(stmt.targets[0], stmt.index) for stmt in sums]
                names = {stmt.targets[0]: self._name("s") for stmt in sums}
                for local, name in names.items():
                    self._text.line(f"{C_TYPES[local.dtype].value} {name} = 0;")
                self._exprs.registers = names
                with self._text.block(rows):
                    self._text.line(f"const int64_t {loop.axis.key} = {row} + next;")
                    self._simd_body(simd, {}, None)
                self._exprs.registers = {}
                for total, name in zip(totals, names.values(), strict=True):
                    self._text.line(f"{total} += {name};")
        return row

    def innermost(self, loop: Loop, start: str, end: str) -> None:
        """Write a loop without loops inside, over [start, end)."""
        self._text.notes(loop.notes)
        simd = self.simd(loop)
        if simd is None:
            with self._text.block(for_head(loop.axis, start, end)):
                if mixes_masked(loop):
                    self._text.line('__asm__ volatile("");  // not to be vectorised')
                self.body(loop.body)
            return
        conversions = find_half_conversions(loop)
        if not conversions.reads and self._stream(simd, start, end):
            return
        registers = {stmt: self._name("r") for stmt in simd.carried}
        size = LANES_CHUNK if _wants_lanes(simd, conversions) else SUM_CHUNK
        if any(adds_long(stmt, loop, size) for stmt in simd.carried):
            chunks = f"for (int64_t first = {start}; first < {end}; first += {size})"
            with self._text.block(chunks):
                end = f"weft_min(first + {size}, {end})"
                self._reduction(simd, registers, conversions, ("first", end))
        else:
            self._reduction(simd, registers, conversions, (start, end))

    def _reduction(
        self, simd: SimdLoop, registers: Registers, conversions: HalfConversions, over: Range
    ) -> None:
        """A loop whose reductions go through `registers`."""
        if _wants_lanes(simd, conversions):
            self._lane_loop(simd, registers, conversions, over)
        else:
            for stmt, name in registers.items():
                target = self._exprs.local(stmt.targets[0], stmt.index)
                self._register(stmt, name, "0" if stmt.op == "sum" else target)
            self._simd_loop(simd, registers, over)
        for stmt, name in registers.items():
            target = self._exprs.local(stmt.targets[0], stmt.index)
            self._text.line(f"{target} {'+=' if stmt.op == 'sum' else '='} {name};")
            self._keep_order(stmt, target)

    def _stream(self, simd: SimdLoop, start: str, end: str) -> bool:
        """Write a loop without reductions in chunks, where results go past the caches or memory is
        asked for ahead."""
        loop, key, extent = simd.loop, simd.loop.axis.key, simd.loop.axis.extent
        stores = [s for s in loop.body if isinstance(s, Store) and s.buffer in self._streamed]
        stores = [stmt for stmt in stores if walks(stmt.index, loop.axis)]
        if simd.carried or not (stores or any(x.large for x in self._prefetches.get(loop, []))):
            return False
        size = min(STREAM_CHUNK, extent.value) if extent.is_const else STREAM_CHUNK
        with self._text.block(f"for (int64_t first = {start}; first < {end}; first += {size})"):
            self._text.line(f"const int64_t last = weft_min(first + {size}, {end});")
            for stmt in stores:
                name, kind = self._name("s"), C_TYPES[self._dtypes[stmt.buffer]].memory
                self._text.line(f"{kind} {name}[{size}] WEFT_ALIGNED;")
                self._held[stmt.buffer] = f"{name}[{key} - first]"
            self._fetch(loop, "first", size, ", 0, 2")
            self._simd_loop(simd, {}, ("first", "last"))
            for stmt in stores:
                name = self._held.pop(stmt.buffer).partition("[")[0]
                row = substitute(stmt.index, lambda atom: ZERO if atom is loop.axis else None)
                start = f"{self._exprs.at(row)} + first"
                place = self._exprs.block(stmt.buffer, start, "last - first")
                self._text.line(f"weft_stream({place}, {name}, (last - first) * sizeof *{name});")
        return True

    def _fetch(self, loop: Loop, start: str, count: int, cache: str = "") -> None:
        """Ask the first cache, or `cache`, for what is read soon (it may lie past the end)."""
        for item in self._prefetches.get(loop, []):
            buffer, after = item.load.buffer, item.around.at + 1
            moved: dict[Atom, IndexExpr] = {loop.axis: ZERO, item.around: after}
            place = self._exprs.at(substitute(item.load.index, moved.get))
            step = 64 // C_TYPES[self._dtypes[buffer]].bytes
            where = f"{buffer} + {place} + {start} + line"
            self._text.line(f"for (int64_t line = 0; line < {count}; line += {step})")
            self._text.line(f"    __builtin_prefetch({where}{cache});")

    def _lane_loop(
        self, simd: SimdLoop, registers: Registers, conversions: HalfConversions, over: Range
    ) -> None:
        """64 partial results a reduction, then what is left of the axis."""
        loop, (start, end) = simd.loop, over
        for stmt, name in registers.items():
            kind = C_TYPES[stmt.targets[0].dtype].value
            self._text.line(f"{kind} {name}_lanes[{LANES}] WEFT_ALIGNED = {{0}};")
            if stmt.op != "sum":
                first = self._exprs.local(stmt.targets[0], stmt.index)
                self._text.line(f"{_EACH_LANE} {name}_lanes[lane] = {first};")
        block = self._name("block")
        self._text.line(f"int64_t {block} = {start};")
        blocks = f"for (; {block} + {LANES} <= {end}; {block} += {LANES})"
        with self._text.block(blocks), self._exprs.scope():
            self._fetch(loop, block, LANES)
            if conversions:
                self._text.line(f"const int64_t {loop.axis.key} = {block};")
            narrowed = self._convert_halves(conversions)
            self._text.line("#pragma omp simd")
            with self._text.block(_EACH_LANE):
                self._text.line(f"const int64_t {loop.axis.key} = {block} + lane;")
                self._simd_body(simd, registers, lambda name: f"{name}_lanes[lane]")
            for text in narrowed:
                self._text.line(text)
        self._narrowed = {}
        for stmt, name in registers.items():
            self._join_lanes(stmt, name)
        extent = loop.axis.extent
        if start == "lo" or loop.limit or not extent.is_const or extent.value % LANES:
            self._simd_loop(simd, registers, (block, end))

    def _convert_halves(self, conversions: HalfConversions) -> list[str]:
        """Convert what a block reads; the lines that convert what it stores."""
        for node, element in conversions.reads:
            name = self._name("h")
            where = self._exprs.at(element.index)
            self._text.line(f"float {name}[{LANES}] WEFT_ALIGNED;")
            place = self._exprs.block(element.buffer, where, LANES)
            self._text.line(f"weft_widen_f16({place}, {name});")
            self._exprs.name(node, f"{name}[lane]")
        lines: list[str] = []
        for stmt in conversions.stores:
            name = self._narrowed[stmt] = self._name("h")
            where = self._exprs.at(stmt.index)
            self._text.line(f"float {name}[{LANES}] WEFT_ALIGNED;")
            kind = C_TYPES[stmt.value.dtype].suffix
            place = self._exprs.block(stmt.buffer, where, LANES)
            lines.append(f"weft_narrow_{kind}({name}, {place});")
        return lines

    def _join_lanes(self, stmt: Reduce, name: str) -> None:
        """Declare the register of a reduction with what its lanes hold."""
        if stmt.op == "sum":
            suffix = C_TYPES[stmt.targets[0].dtype].suffix
            self._register(stmt, name, f"sum_lanes_{suffix}({name}_lanes)")
            return
        self._register(stmt, name, f"{name}_lanes[0]")
        with self._text.block(""), self._reducing({stmt: name}, _EACH_LANE):
            self._clause_combine(stmt, name, f"{name}_lanes[lane]")

    def _simd_loop(self, simd: SimdLoop, registers: Registers, over: Range) -> None:
        with self._reducing(registers, for_head(simd.loop.axis, *over)):
            self._simd_body(simd, registers, None)

    @contextmanager
    def _reducing(self, registers: Registers, head: str) -> Iterator[None]:
        """A loop in vector lanes that combines into `registers`."""
        clauses = ""
        for stmt, name in registers.items():
            clauses += f" reduction({_CLAUSES[stmt.op]}:{name})"
            if _may_be_nan(stmt):
                # A vector maximum does not keep nan, so that is noted apart.
                wide = stmt.targets[0].dtype is torch.float64
                kind = "int64_t" if wide else "int32_t"
                self._text.line(f"{kind} {name}_nan = {name} != {name};")
                clauses += f" reduction(|:{name}_nan)"
        self._text.line(f"#pragma omp simd{clauses}")
        with self._text.block(head):
            yield
        for stmt, name in registers.items():
            if _may_be_nan(stmt):
                suffix = "f" if stmt.targets[0].dtype is torch.float32 else ""
                self._text.line(f'{name} = {name}_nan ? __builtin_nan{suffix}("") : {name};')

    def _register(self, stmt: Reduce, name: str, first: str) -> None:
        dtype = stmt.targets[0].dtype
        kind = "int32_t" if dtype is torch.bool else C_TYPES[dtype].value
        self._text.line(f"{kind} {name} = {first};")

    def _simd_body(
        self, simd: SimdLoop, registers: Registers, lane: Callable[[str], str] | None
    ) -> None:
        """The statements of one iteration; `lane` names a reduction's partial result."""
        for local in simd.private:
            self._text.line(f"{C_TYPES[local.dtype].value} {local.name};")
        with self._exprs.scope(simd.loop.body):
            for stmt in simd.loop.body:
                if isinstance(stmt, Reduce) and stmt in registers:
                    self._define(stmt)
                    name, value = registers[stmt], self._exprs.text(stmt.values[0])
                    if lane is not None:
                        self._combine(stmt, [lane(name)])
                    else:
                        self._clause_combine(stmt, name, value)
                elif not isinstance(stmt, Loop):
                    self._statement(stmt)

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


def _uses(body: Body) -> Counter[Local]:
    """How many statements in `body` read or change each local."""
    simple = (stmt for stmt in statements(body) if not isinstance(stmt, Loop))
    return Counter(
        local
        for stmt in simple
        for local in locals_read(*stmt_exprs(stmt)) | locals_changed((stmt,))
    )


def _may_be_nan(stmt: Reduce) -> bool:
    return stmt.op in ("max", "min") and stmt.targets[0].dtype.is_floating_point


def _wants_lanes(simd: SimdLoop, conversions: HalfConversions) -> bool:
    """Whether blocks pay: for 16-bit floats, and sums of floats (a maximum alone is slower)."""
    extent = simd.loop.axis.extent
    if extent.is_const and extent.value < LANES:
        return False
    ops = ("sum", "max", "min") if conversions else ("sum",)
    return bool(conversions or simd.carried) and all(
        stmt.op in ops and stmt.targets[0].dtype.is_floating_point for stmt in simd.carried
    )
