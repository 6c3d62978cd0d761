"""Loop nodes to a program: fusion (fuse.py), then one kernel a group (assemble.py, kernels.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft_codegen.loops.program import (
    Buffers,
    Extern,
    Kernel,
    Launch,
    Program,
    Step,
    expanded,
    step_writes,
)
from weft_codegen.loops.schedule.assemble import assemble
from weft_codegen.loops.schedule.attention import AttentionWins, own_attention
from weft_codegen.loops.schedule.convolution import ConvolutionWins, own_convolution
from weft_codegen.loops.schedule.dependences import as_late_as_possible, live_items
from weft_codegen.loops.schedule.fuse import Fusion
from weft_codegen.loops.schedule.group import Group
from weft_codegen.loops.schedule.group_key import group_key
from weft_codegen.loops.schedule.kernels import launch
from weft_codegen.loops.schedule.linear import Wins, own_product
from weft_codegen.loops.schedule.matmul import Prefer, small_products
from weft_codegen.loops.schedule.overlap import overlap_collectives
from weft_codegen.loops.schedule.rematerialize import outside_readers, rematerialize
from weft_codegen.loops.schedule.row_column_fusion import fuse_rows_and_columns
from weft_codegen.loops.schedule.split_reduction import split_reductions

__all__ = ["schedule"]


def schedule(
    lowered: Program,
    *,
    fuse: bool = True,
    prefer: Prefer | None = None,
    linear: Wins | None = None,
    attention: AttentionWins | None = None,
    convolution: ConvolutionWins | None = None,
    strict: bool = False,
) -> Program:
    """The program of a lowered graph; without `fuse` every node gets a kernel of its own.

    `prefer` decides which larger matrix products become loops too (matmul.py), and `linear`,
    `attention`, `convolution` what weft's own functions compute (modules of that name);
    `strict`: none.
    """
    if not strict:
        lowered = small_products(lowered, prefer) if fuse else lowered
        own = (own_product, linear), (own_attention, attention), (own_convolution, convolution)
        lowered = expanded(lowered, partial(_by_own, [pair for pair in own if pair[1]]))
    lowered = split_reductions(lowered)
    mutated = frozenset(lowered.mutations)
    items = as_late_as_possible(live_items(lowered), mutated)
    units = Fusion(lowered, items).run(join_groups=fuse)
    buffers = dict(lowered.buffers)
    kernels: dict[str, Kernel] = {}
    launches: dict[Any, tuple[Launch, tuple[int, ...]]] = {}
    if fuse:
        units = fuse_rows_and_columns(rematerialize(units, lowered), lowered, buffers)
    outside = outside_readers(units, lowered).keys()
    steps: list[Step] = []
    # What is fused away has no buffer.
    kept = {item.name for item in lowered.inputs} | set(lowered.constants)
    named = set(kept)
    for unit in units:
        if not isinstance(unit, Group):
            steps.append(unit)
            named.update(step_writes(unit))
            continue
        needed = frozenset(unit.results.keys() & outside)
        origins = tuple(dict.fromkeys(text for m in unit.members for text in m.node.origins))
        key, names = group_key(unit, needed, mutated, buffers)
        if key in launches:
            like, positions = launches[key]
            arguments = tuple(names[position] for position in positions)
            step = replace(like, buffers=arguments, origins=origins)
        else:
            nest = assemble(unit, needed, mutated, buffers, lowered.hints)
            step = launch(nest, buffers, origins, kernels)
            launches[key] = step, tuple(map(names.index, step.buffers))
        steps.append(step)
        named.update(step.buffers)
    by_name = {kernel.name: kernel for kernel in kernels.values()}
    overlap_collectives(steps, by_name, kept)
    used = {name: buffer for name, buffer in buffers.items() if name in named}
    return replace(lowered, buffers=used, kernels=by_name, steps=tuple(steps))


def _by_own(
    functions: Sequence[tuple[Callable[..., Extern | None], Any]], step: Step, buffers: Buffers
) -> Iterator[Step]:
    """A step, by weft's own function where one takes a call of a library."""
    calls = (
        (own(step, buffers, wins) for own, wins in functions) if isinstance(step, Extern) else ()
    )
    yield next(filter(None, calls), step)
