"""What becomes of each aten operator in the samples of torch's operator database.

Each sample is traced forward and backward by weft_aot and lowered by weft_codegen. What the graph
holds then is a loop or a call; what the decomposition table has taken apart meanwhile is in it no
more. Operators that torch itself takes apart before the dispatcher sees them do not show up.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from op_samples import DATABASE, samples_of, traced
from torch import fx
from weft_aot import JointGraph
from weft_codegen.loops.lower.decompose import decompositions
from weft_codegen.loops.lower.graph import NO_ROW, GraphLowering, NoLowering
from weft_codegen.loops.lower.shapes import rewritten
from weft_codegen.loops.lower.sizes import learn

CLASSES = {"float32": "float", "bfloat16": "16-bit float", "int64": "integer", "bool": "bool"}
"""The dtype that stands for each class of them."""
Fact = tuple[str, str, str, str]
"""(operator, "forward" or "backward", "loop", "call" or "decomposed", why it is a call)"""


class _RecordingLowering(GraphLowering):
    """Notes which nodes become calls, and why."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, fallback_random=True)
        self.calls: dict[fx.Node, str] = {}

    def extern(self, call: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        reason = kwargs.get("reason") or (args[2] if len(args) > 2 else "")
        self.calls.setdefault(call.node, reason)
        return super().extern(call, target, *args, **kwargs)


def facts_of(op: str, dtype: str, most: int) -> Iterator[dict[str, Any]]:
    """The facts of some samples of an operator, one JSON object a sample."""
    for fn, tensors in samples_of(DATABASE[op], getattr(torch, dtype), most, "cpu"):
        taken: set[Fact] = set()
        try:
            joint, _ = traced(fn, tensors, recording(decompositions(), taken))
        except Exception:  # op_samples says which graphs cannot be traced
            continue
        yield {"kind": "facts", "facts": sorted({*taken, *_lowered(joint)})}


def recording(
    table: dict[Any, Callable[..., Any]], taken: set[Fact]
) -> dict[Any, Callable[..., Any]]:
    """A decomposition table that notes what it is used for."""

    def wrapped(op: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(rule)
        def run(*args: Any, **kwargs: Any) -> Any:
            backward = torch._C._current_autograd_node() is not None
            result = rule(*args, **kwargs)
            if result is not NotImplemented:
                taken.add((name_of(op), _DIRECTION[backward], "decomposed", ""))
            return result

        return run

    return {op: wrapped(op, rule) for op, rule in table.items()}


_DIRECTION = {False: "forward", True: "backward"}


def _lowered(joint: JointGraph) -> Iterator[Fact]:
    """What becomes of each node of a traced graph."""
    gm = joint.module
    backward: set[fx.Node] = {*gm.graph.find_nodes(op="placeholder")[joint.num_inputs :]}
    for node in gm.graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    failed, why = "", ""
    with rewritten(learn(gm)):
        lowering = _RecordingLowering(gm)
        try:
            lowering.run()
        except NoLowering as reason:
            failed, why = reason.operator, f"no program: {reason}"
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.users:
            continue
        name, direction = name_of(node.target), _DIRECTION[node in backward]
        if node in lowering.calls:
            yield name, direction, "call", lowering.calls[node]
        elif str(node.target) == failed:
            yield name, direction, "no program", why
        elif not failed:
            yield name, direction, "loop", ""


def name_of(op: Any) -> str:
    """An operator without its overload: `aten.add`."""
    return str(op._schema.name).replace("::", ".") if hasattr(op, "_schema") else str(op)


_INTRODUCTION = """\
# Operator coverage

What becomes of {0} of torch's own operator database, traced forward and backward. Made by
`python benchmarks/op_coverage.py aten --write` with torch {1}. An operator is

- **loop**: it becomes loops of weft's own (views cost nothing);
- **call**: it stays a call of libtorch, for the reason in the last column;
- **decomposed**: the decomposition table takes it apart into operators of other rows;
- **no program**: it makes the whole graph run op by op.

Where a cell holds several of these, arguments and layouts decide. `WEFT_LOGS=lowering` gives the
reason of each call of a program. 16-bit floats are bfloat16 and float16; the column of floats
holds for float32 and float64; of complex numbers only views are no calls. Operators that torch
takes apart before the dispatcher sees them (`linear`, `matmul`) do not occur. Whether results are
eager's is on [another page](operator-samples.md).

"""


def aten_report(results: list[dict[str, Any]], torch_version: str) -> str:
    """The page: an operator a row."""
    outcomes: dict[str, dict[tuple[str, str], set[str]]] = defaultdict(lambda: defaultdict(set))
    reasons: dict[str, set[str]] = defaultdict(set)
    for result in results:
        for name, direction, outcome, why in (f for s in result["samples"] for f in s["facts"]):
            outcomes[name][direction, CLASSES[result["dtype"]]].add(outcome)
            reasons[name] |= {why} - {""}
    columns = [(d, c) for d in ("forward", "backward") for c in CLASSES.values()]
    columns = [c for c in columns if any(c in cells for cells in outcomes.values())]
    heads = " | ".join(f"{direction}, {kind}" for direction, kind in columns)
    rule = "|---|" + "--:|" * len(columns)
    entries = len({result["op"] for result in results})
    counts = f"{len(outcomes)} aten operators in samples of {entries} entries"
    lines = _INTRODUCTION.format(counts, torch_version).splitlines()
    lines += [f"| operators | {heads} |", rule]
    for outcome in ("loop", "call", "decomposed", "no program"):
        counts = (sum(outcome in cells[c] for cells in outcomes.values()) for c in columns)
        lines.append(f"| {outcome} | {' | '.join(map(str, counts))} |")
    lines += ["", f"| operator | {heads} | why it is a call |", rule.replace("--:", "---") + "---|"]
    for name in sorted(outcomes):
        cells = (", ".join(sorted(outcomes[name].get(column, ()))) for column in columns)
        why = "; ".join(sorted(reasons[name])).replace("|", "/").replace(NO_ROW, "no row")
        lines.append(f"| {name.removeprefix('aten.')} | {' | '.join(cells)} | {why} |")
    return "\n".join(lines) + "\n"
