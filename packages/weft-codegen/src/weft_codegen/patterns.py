"""Rewrite aten graphs by patterns: a pattern is written as a Python function, its replacement as
another.

    patterns = Patterns()
    patterns.add(lambda x: x * torch.sigmoid(x), torch.nn.functional.silu, [torch.empty(2, 3)])
    weft.compile(model, options={"post_grad_custom_pre_pass": patterns})

Both functions are traced to aten operators. A pattern fits wherever the same operators are applied
with the same numbers; its tensors stand for any tensors, so that an operator with sizes among its
arguments only fits graphs of those sizes. What is inside of the pattern has no other users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.subgraph_rewriter import replace_pattern_with_filters
from weft_core.fake import fake_inputs
from weft_core.tracing import trace_aten

from weft_codegen.loops.lower.decompose import decompositions

Check = Callable[[dict[str, fx.Node]], bool]


@dataclass(frozen=True)
class _Row:
    search: fx.GraphModule
    replacement: fx.GraphModule
    check: Check | None


class Patterns:
    """Patterns with their replacements, in the order in which they are tried; a pass of a graph."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self.count = 0

    def add(
        self,
        search: Callable[..., Any],
        replacement: Callable[..., Any],
        example_inputs: Sequence[torch.Tensor],
        *,
        check: Check | None = None,
    ) -> None:
        """Add a pattern.

        Args:
            search: a function of tensors; what it computes is looked for.
            replacement: a function of the same tensors, with the same results.
            example_inputs: tensors that both are traced with.
            check: says whether to replace what was found; gets the nodes of the graph by the
                pattern's parameters (`arg0`, `arg1`, ...), whose `meta["val"]` are fake tensors.
        """
        traced = [_traced(function, example_inputs) for function in (search, replacement)]
        self._rows.append(_Row(traced[0], traced[1], check))

    def __call__(self, graph: fx.Graph) -> None:
        """Replace in a graph whatever fits; `count` is how often that has happened."""
        gm = graph.owning_module
        assert gm is not None
        for row in self._rows:
            filters = [] if row.check is None else [_filter(row.check)]
            found = replace_pattern_with_filters(gm, row.search, row.replacement, filters)
            self.count += len(found)
        fill_values(graph)


def _filter(check: Check) -> Callable[..., bool]:
    def fits(match: Any, graph: fx.Graph, pattern: fx.Graph) -> bool:
        inputs = [node for node in pattern.nodes if node.op == "placeholder"]
        return check({f"arg{at}": match.nodes_map[node] for at, node in enumerate(inputs)})

    return fits


def _traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    probe = fx.GraphModule(torch.nn.Module(), fx.Graph())
    for at in range(len(inputs)):
        probe.graph.placeholder(f"arg{at}")
    probe.graph.output(())
    fakes = fake_inputs(probe, list(inputs))
    with torch.no_grad():
        traced = trace_aten(function, fakes, decompositions=decompositions())
    for node in traced.graph.find_nodes(op="output"):
        if len(node.args[0]) == 1:  # a tuple of one would be a part of the pattern
            node.args = (node.args[0][0],)
    return traced


def fill_values(graph: fx.Graph) -> None:
    """Give nodes that a pass has added the fake values that lowering reads, and tidy the graph."""
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            mode = next((v.fake_mode for v in _fakes((args, kwargs))), None)
            with torch.no_grad(), mode or torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)
    graph.eliminate_dead_code()
    graph.lint()


def _fakes(value: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if hasattr(leaf, "fake_mode")]
