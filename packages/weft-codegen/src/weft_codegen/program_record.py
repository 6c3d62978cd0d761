"""What a recording keeps of a scheduled program: texts, steps, memory plan and diagram."""

from __future__ import annotations

from typing import Any

from torch import fx
from weft_core.errors import user_frame

from weft_codegen.diagram import svg_of
from weft_codegen.kernels.plan import Allocation, MemoryPlan
from weft_codegen.loops.index import IndexExpr
from weft_codegen.loops.lower.origins import origin_text
from weft_codegen.loops.printer import buffer_text, program_text, step_text
from weft_codegen.loops.program import Alias, Launch, Program, Step, step_reads, step_writes


def program_record(lowered: Program, program: Program, gm: fx.GraphModule) -> dict[str, Any]:
    """Return what is kept of a program.

    Args:
        lowered: the program before the schedule, with one node a loop.
        program: the program.
        gm: the aten graph that it was made of.

    The dict has the texts `loops` and `schedule`, the SVG `diagram`, `steps` (kernels and operator
    calls, see `_step`), `buffers` (see `_buffer`) and `scratch`, the bytes of the scratch block.
    """
    nodes: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        nodes.setdefault(origin_text(node), []).append(node)
    plan = MemoryPlan(program)
    return {
        "loops": program_text(lowered),
        "schedule": program_text(program),
        "diagram": svg_of(program),
        "device": str(program.device),
        "steps": [_step(position, program, nodes) for position in range(len(program.steps))],
        "buffers": [_buffer(name, program, plan) for name in plan.allocation],
        "scratch": plan.fixed,
    }


def _step(position: int, program: Program, nodes: dict[str, list[fx.Node]]) -> dict[str, Any]:
    """A step: its text, the nodes and lines of the user that it comes from, the bytes it moves."""
    step = program.steps[position]
    origins = getattr(step, "origins", ())
    sources = [node for origin in origins for node in nodes.get(origin, ())]
    places = (user_frame(node.meta.get("stack_trace")) for node in sources)
    touched = {*step_reads(step, program.kernels), *step_writes(step, program.kernels)}
    sizes = [program.buffers[name].bytes for name in touched if name in program.buffers]
    return {
        "kind": _KINDS.get(type(step), "operator"),
        "name": _name(step),
        "text": step_text(step).partition("  # ")[0],
        "reason": getattr(step, "reason", ""),  # why it is a call
        "nodes": [node.name for node in sources],
        "lines": list(dict.fromkeys(":".join(place[:2]) for place in places if place)),
        "bytes": _sum(sizes),
    }


_KINDS: dict[type, str] = {Launch: "kernel", Alias: "view"}


def _name(step: Step) -> str:
    if isinstance(step, Launch):
        return step.kernel
    return step.name if isinstance(step, Alias) else str(getattr(step, "op", ""))


def _sum(sizes: list[IndexExpr]) -> int | None:
    """The sum of sizes; None where one is symbolic."""
    return sum(int(n.value) for n in sizes) if all(n.is_const for n in sizes) else None


def _buffer(name: str, program: Program, plan: MemoryPlan) -> dict[str, Any]:
    """A root buffer: where its memory is, and the steps in which it is alive."""
    writers = [k for k, s in enumerate(program.steps) if name in step_writes(s, program.kernels)]
    memory = plan.allocation[name]
    outside = memory in (Allocation.INPUT, Allocation.CONSTANT)
    return {
        "text": buffer_text(program.buffers[name]),
        "bytes": _sum([program.buffers[name].bytes]),
        "memory": memory.value,
        "offset": plan.offset.get(name),
        "over": plan.over.get(name),
        "first": -1 if outside else min(writers, default=-1),
        "last": plan.last.get(name, -1),
    }
