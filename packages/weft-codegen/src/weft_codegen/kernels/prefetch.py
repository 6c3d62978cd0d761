"""What memory an innermost loop asks for while it works on other: the next row's, or next tile's.

No hardware prefetcher crosses a page, and none sees where a piece of a tile goes on. Of several
loops over a row only the first waits for memory; so the last one, for which the row is in a cache,
asks for the next row. Smaller tensors are in the last cache, and only sums gain a little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft_codegen.kernels.c_types import C_TYPES
from weft_codegen.kernels.simd import walks
from weft_codegen.kernels.toolchain import last_level_cache
from weft_codegen.kernels.transpose_tile import TransposeTile, match_transpose_tile
from weft_codegen.loops.evaluate import substitute
from weft_codegen.loops.expr import Expr, Load, load, walk
from weft_codegen.loops.index import ZERO, Atom, Axis, IndexExpr, atoms, product
from weft_codegen.loops.program import Body, Loop, stmt_exprs
from weft_codegen.loops.steps import coefficient


@dataclass(frozen=True)
class Prefetch:
    """Where `load` reads in the next iteration along `around`; `large` if no cache holds it all."""

    load: Load
    around: Axis
    large: bool


Prefetches = dict[Loop, list[Prefetch]]


def find_prefetches(body: Body, around: Axis | None) -> Prefetches:
    """What innermost loops ask for.

    Args:
        around: the axis of the loop that `body` is repeated in, if it is.
    """
    found: Prefetches = {}
    loops = [stmt for stmt in body if isinstance(stmt, Loop)]
    for loop in loops:
        found.update(find_prefetches(loop.body, loop.axis))
    if around is None or len(body) < 2:
        return found
    tiles = [tile for tile in map(match_transpose_tile, loops) if tile]
    claimed = {item.load for items in found.values() for item in items}
    passes: dict[tuple[str, IndexExpr], list[tuple[Loop, Load]]] = {}
    for path in _innermost(body, ()):
        inside: dict[Atom, IndexExpr] = {item.axis: ZERO for item in path}
        loop = path[-1]
        exprs = stmt_exprs(*loop.body)
        if len(path) > 1:
            exprs += [part for tile in tiles for part in _next_tile(tile, path[-2], loop)]
        for node in walk(*exprs):
            if not isinstance(node, Load) or node in claimed or not walks(node.index, loop.axis):
                continue
            if coefficient(node.index, around) not in (None, ZERO):
                place = substitute(node.index, inside.get)
                passes.setdefault((node.buffer, place), []).append((loop, node))
    for reads in passes.values():
        large = _large(reads[0][1])
        again = [(loop, node) for loop, node in reads if loop is not reads[0][0]]
        if again or (tiles and large):
            loop, node = reads[-1] if large else again[0]
            found.setdefault(loop, []).append(Prefetch(node, around, large))
    return found


def _innermost(body: Body, path: tuple[Loop, ...]) -> Iterator[tuple[Loop, ...]]:
    """The loops without loops inside, but for those that transpose a tile, in post-order."""
    for stmt in body:
        if isinstance(stmt, Loop) and not match_transpose_tile(stmt):
            yield from _innermost(stmt.body, (*path, stmt))
    if path and not any(isinstance(stmt, Loop) for stmt in body):
        yield path


def _large(node: Load) -> bool:
    """Whether what a load reads in all, and as much again, is more than every cache holds."""
    axes = {atom for atom in atoms(node.index) if isinstance(atom, Axis)}
    elements = product(atom.extent for atom in axes)
    size = elements.value * C_TYPES[node.dtype].bytes if elements.is_const else 0
    return 2 * size >= last_level_cache()


def _next_tile(tile: TransposeTile, rows: Loop, columns: Loop) -> list[Expr]:
    """The tile that is transposed next, walked through by the loops that use this one."""
    if columns.axis is not tile.column.axis or rows.axis is not tile.row.axis:
        return []
    place = tile.base + rows.axis.at * tile.step + columns.axis.at
    return [load(tile.buffer, place, tile.local.dtype)]
