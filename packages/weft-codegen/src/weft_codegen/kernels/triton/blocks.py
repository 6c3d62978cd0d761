"""How many lanes, rows and warps a Triton program takes of a loop nest.

Lengths that are symbolic count as long as they were in the example that was compiled; a loop over
lanes then is a loop over blocks of that many, right for any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft_codegen.kernels.exprs import locals_of
from weft_codegen.loops import program as ir
from weft_codegen.loops.evaluate import evaluate_known
from weft_codegen.loops.expr import is_product
from weft_codegen.loops.index import Axis, IndexExpr, product
from weft_codegen.loops.schedule.assemble import GPU_FEW_COLUMNS, GPU_LANES, GPU_ROW

CHUNK = 2048
# Fewer would not be loaded 16 bytes a thread; and of a warp whose loop over tiles is pipelined.
LANES_OF_A_WARP, LANES_OF_A_TILED_WARP = 256, 512
# Programs that keep a GPU busy.
BUSY = 1024
# Lanes of a warp that multiplies a row by a column: the more it loads at once, the better.
PRODUCT_LANES = 2048
# Lanes of a block that takes several rows at once: of sums of columns that store each element, too,
# and of sums of so few columns that there are few programs.
TILE, FEW_COLUMNS_TILE = 1024, 8192


@dataclass(frozen=True)
class Tile:
    """Iterations of `loop` and lanes of `leaf`, the only thing in it, that one block takes: `rows`
    times `columns`."""

    loop: ir.Loop
    leaf: ir.Loop
    rows: int
    columns: int

    @property
    def lanes(self) -> int:
        """Elements of the block."""
        return self.rows * self.columns

    def bounds(self) -> list[tuple[Axis, IndexExpr]]:
        """What the block may exceed: (axis, end)."""
        ends = [(self.leaf.axis, end) for end in (self.leaf.limit,) if end is not None]
        for loop, size in ((self.loop, self.rows), (self.leaf, self.columns)):
            extent = loop.axis.extent
            if not extent.is_const or extent.value % size:
                ends.append((loop.axis, extent))
        return ends


@dataclass(frozen=True)
class Blocks:
    """Chooses blocks; `hints` are the lengths that symbolic sizes had in the example.

    `fitting` is set for code that only runs where a symbolic length fits the block of the example.
    """

    hints: Mapping[str, int]
    fitting: bool = False

    def _length(self, extent: IndexExpr) -> int | None:
        return evaluate_known(extent, self.hints)

    def columns(self, loop: ir.Loop) -> int:
        """Lanes of an innermost loop: all of it, or those of one iteration over its blocks."""
        extent = loop.axis.extent
        length = self._length(extent)
        longest = GPU_ROW if extent.is_const or self.fitting else CHUNK
        if length is None or length > longest:
            return CHUNK
        return max(16, _power_of_two(length))

    def is_whole(self, loop: ir.Loop) -> bool:
        """Whether a loop becomes one block of lanes, and so no loop of Triton."""
        extent = loop.axis.extent
        if not extent.is_const:
            return self.fitting and self.may_fit(loop)
        return loop.is_innermost and self.columns(loop) >= extent.value

    def may_fit(self, loop: ir.Loop) -> bool:
        """Whether a loop of symbolic length fit one block in the example."""
        extent, length = loop.axis.extent, self._length(loop.axis.extent)
        short = length is not None and length <= GPU_ROW
        return loop.is_innermost and short and not extent.is_const

    def rows(self, grid: list[Axis], body: ir.Body) -> int:
        """Points of the grid that one program takes, where rows are so short that it pays."""
        loops = [s for s in body if isinstance(s, ir.Loop)]
        every = list(ir.statements(body))
        reduced = (t for s in every if isinstance(s, ir.Reduce) for t in s.targets)
        if (
            not grid
            or not loops
            or not all(loop.is_innermost for loop in loops)
            or not all(target.is_scalar for target in reduced)
            or _multiplies(every)
        ):
            return 1
        points = self._length(product(axis.extent for axis in grid))
        most = GPU_LANES // max(map(self.columns, loops))
        enough = most if points is None else min(most, points // BUSY)
        return 1 << max(0, enough.bit_length() - 1)

    def warps(self, grid: list[Axis], body: ir.Body, widest: int, tiled: bool) -> int:
        """Warps of a program whose widest block has `widest` lanes, in a loop over tiles or not."""
        points = product(axis.extent for axis in grid)
        warps = 4 if widest <= CHUNK else 8 if widest <= 4 * CHUNK else 16
        known = self._length(points)
        if known is not None and known >= BUSY:  # else a program has the more warps
            lanes = LANES_OF_A_TILED_WARP if tiled else LANES_OF_A_WARP
            warps = min(warps, max(1, widest // lanes))
        return max(1, widest // PRODUCT_LANES) if _multiplies(ir.statements(body)) else warps

    def tile(self, loop: ir.Loop) -> Tile | None:
        """The tile of a sum of columns that stores each element, too, or of few columns: a loop
        around lanes. Unrolled, so much code would take longer to fetch than to run."""
        leaf = leaf_of(loop)
        if leaf is None or leaf is loop or not self.is_whole(leaf):
            return None
        while loop.body[0] is not leaf:
            loop = loop.body[0]  # type: ignore[assignment]
        extent, columns = loop.axis.extent, self.columns(leaf)
        kinds = set(map(type, leaf.body))
        few = kinds == {ir.Reduce} and columns <= GPU_FEW_COLUMNS
        most, length = (FEW_COLUMNS_TILE if few else TILE) // columns, self._length(extent)
        rows = 0 if length is None else min(most, _power_of_two(length))
        targets = {t for s in leaf.body if isinstance(s, ir.Reduce) for t in s.targets}
        used = {local for local in locals_of(leaf.body) if not local.is_scalar}
        alone = targets == used and (few or kinds == {ir.Reduce, ir.Store})
        return Tile(loop, leaf, rows, columns) if alone and used and rows > 1 else None


def leaf_of(loop: ir.Loop) -> ir.Loop | None:
    """The innermost loop, where every loop around it holds nothing else."""
    while not loop.is_innermost:
        inner = loop.body[0]
        if len(loop.body) > 1 or not isinstance(inner, ir.Loop):
            return None
        loop = inner
    return loop


def _power_of_two(length: int) -> int:
    """The smallest that is not below `length`."""
    return 1 << (length - 1).bit_length()


def _multiplies(statements: Iterable[ir.Stmt]) -> bool:
    return any(map(is_product, ir.stmt_exprs(*statements)))
