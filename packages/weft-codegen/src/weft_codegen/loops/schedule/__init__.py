"""Loop nodes to a program: fusion (fuse.py), then one kernel a group (assemble.py, kernels.py)."""

from __future__ import annotations

from weft_codegen.loops.nodes import Lowered
from weft_codegen.loops.program import Alias, Buffer, Extern, Program, Step
from weft_codegen.loops.schedule.again import compute_again, outside_readers
from weft_codegen.loops.schedule.assemble import assemble
from weft_codegen.loops.schedule.both import share_rows
from weft_codegen.loops.schedule.dependences import as_late_as_possible, live_items
from weft_codegen.loops.schedule.fuse import Fusion
from weft_codegen.loops.schedule.group import Group
from weft_codegen.loops.schedule.kernels import KernelTable
from weft_codegen.loops.schedule.matmul import Prefer, small_products
from weft_codegen.loops.schedule.stages import in_stages

__all__ = ["schedule"]


def schedule(lowered: Lowered, *, fuse: bool = True, prefer: Prefer | None = None) -> Program:
    """The program of a lowered graph; without `fuse` every node gets a kernel of its own.

    `prefer` decides which larger matrix products become loops too (see matmul.py).
    """
    lowered = in_stages(small_products(lowered, prefer) if fuse else lowered)
    mutated = frozenset(lowered.mutations)
    items = as_late_as_possible(live_items(lowered), mutated)
    units = Fusion(lowered, items).run(join_groups=fuse)
    table, buffers = KernelTable(), dict(lowered.buffers)
    if fuse:
        units = share_rows(compute_again(units, lowered), lowered, buffers)
    outside = outside_readers(units, lowered).keys()
    steps: list[Step] = []
    stored: set[str] = set()
    for unit in units:
        if not isinstance(unit, Group):
            steps.append(unit)
            continue
        needed = frozenset(unit.results.keys() & outside)
        nest = assemble(unit, needed, mutated, buffers)
        origins = tuple(dict.fromkeys(text for m in unit.members for text in m.node.origins))
        launch = table.launch(nest, buffers, origins)
        steps.append(launch)
        stored.update(launch.buffers)
    return Program(
        lowered.sizes,
        lowered.inputs,
        lowered.constants,
        _used_buffers(lowered, buffers, steps, stored),
        table.kernels,
        tuple(steps),
        lowered.outputs,
        lowered.mutations,
    )


def _used_buffers(
    lowered: Lowered, buffers: dict[str, Buffer], steps: list[Step], stored: set[str]
) -> dict[str, Buffer]:
    """Buffers that the steps still name; fused-away ones are gone."""
    names = {item.name for item in lowered.inputs} | set(lowered.constants) | stored
    for step in steps:
        if isinstance(step, Alias):
            names.add(step.name)
        elif isinstance(step, Extern):
            names.update(name for name in step.results if name is not None)
    return {name: buffer for name, buffer in buffers.items() if name in names}
