"""Split a graph at control flow on tensors, and at numbers read out of them; Python runs between.

A branch or a loop on a tensor's value (`tensors/control_ops.py`) cannot be in a compiled graph, nor
can a change of a mode that the subgraphs after it run in. The nodes between them form the longest
subgraphs possible. Each is compiled when it first runs, for the inputs of that call, and so are
branches and bodies of loops. Autograd records what ran.

What reads a number or a size out of a tensor (`item`, `nonzero`, a mask as an index) runs eagerly,
and so does arithmetic on such numbers. The subgraphs between are captured again, as functions:
their sizes become symbolic once they have changed, and guards say which code fits.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from weft_core.graph_copy import copy_nodes
from weft_core.tracing import ASSERT
from weft_guards.state import TorchState

from weft_capture import frame
from weft_capture.model.contexts import enter_attention, leave_attention
from weft_capture.tensors import control_ops


@dataclass(frozen=True)
class Subgraph:
    """Nodes of a graph copied into a module of their own.

    Args:
        module: returns a tuple.
        given: the nodes from outside whose values are its inputs, in order.
        outputs: the nodes whose values it returns: those that others use.
    """

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    def call(
        self, graph: fx.Graph, run: Callable[..., Any], copies: dict[fx.Node, fx.Node]
    ) -> None:
        """Add a call of `run`, the compiled module, to a copy of the whole graph."""
        result = graph.call_function(run, tuple(map(copies.__getitem__, self.inputs)))
        for index, node in enumerate(self.outputs):
            copies[node] = graph.call_function(operator.getitem, (result, index))


def extract_subgraph(root: torch.nn.Module, nodes: Sequence[fx.Node]) -> Subgraph:
    """Copy nodes, given in order, out of a graph; `root` has what its `get_attr` nodes name."""
    inside = set(nodes)
    outputs = [node for node in nodes if not inside.issuperset(node.users)]
    used = (arg for node in nodes for arg in node.all_input_nodes)
    inputs = list(dict.fromkeys(node for node in used if node not in inside))
    return Subgraph(copy_nodes(root, nodes, outputs, inputs), inputs, outputs)


Compiled = Callable[..., Any]
CompileOne = Callable[[fx.GraphModule, list[Any]], Compiled]

_MODES = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    enter_attention,
    leave_attention,
)
_VARIANTS = 16
"""The limit of input variants for which a subgraph is compiled; beyond it runs uncompiled."""


def compile_split(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    compile_one: CompileOne,
    capture_piece: Callable[[Compiled, CompileOne], Compiled] | None = None,
) -> Compiled:
    """Compile a graph; with control flow, compile the subgraphs between on their first run.

    Args:
        gm: a captured graph, which is not changed.
        example_inputs: its inputs.
        compile_one: (module, example inputs) -> callable on the inputs.
        capture_piece: (function, compile_one) -> function that is captured and compiled; without
            it, a graph that reads numbers out of tensors is compiled as a whole.
    """
    if _is_split(gm):
        return _split(gm, compile_one)
    by_data = _nodes_by_data(gm) if capture_piece is not None else set()
    if not by_data or capture_piece is None:
        return compile_one(gm, example_inputs)

    def capture(module: fx.GraphModule) -> Compiled:
        code = type(module).forward.__code__.replace(co_name=_PIECE, co_qualname=_PIECE)
        forward = types.FunctionType(code, type(module).forward.__globals__, _PIECE)
        captured = capture_piece(types.MethodType(forward, module), compile_one)

        def piece(*args: Any) -> Any:  # fx prints its name
            return captured(*args)

        return piece

    return _between(gm, lambda node: node in by_data or node.target in _MODES, capture)


_PIECE = "piece_of_graph"


def _nodes_by_data(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that read numbers or sizes out of tensors, and those that compute numbers.

    Nothing where the graph reads none, or has nodes without an example.
    """
    found: set[fx.Node] = set()
    known: set[Any] = set()
    reads = False
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        example = node.meta.get("example_value")
        new = _unbacked(example) - known
        known |= new
        reads |= bool(new)
        part = node.target is operator.getitem and node.args[0] in found
        if new or part or isinstance(example, _NUMBERS) or node.target is ASSERT:
            found.add(node)
    return found if reads else set()


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _unbacked(example: Any) -> set[Any]:
    """Return the symbols of a value that stand for numbers out of tensors."""
    leaves = example if isinstance(example, tuple | list) else [example]
    sizes = [n for leaf in leaves for n in getattr(leaf, "shape", [leaf])]
    symbolic = [n for n in sizes if isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool)]
    if not symbolic:
        return set()
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # noqa: PLC0415

    return set(free_unbacked_symbols(symbolic))


def _is_split(gm: fx.GraphModule) -> bool:
    return any(node.target in control_ops.TARGETS for node in gm.graph.nodes)


def _split(gm: fx.GraphModule, compile_one: CompileOne) -> Compiled:
    if not _is_split(gm):
        return _CompiledPiece(gm, compile_one).run

    def branch(of: Any) -> Any:
        return _CompiledBranch(_split(of, compile_one))

    return _between(gm, _stays, lambda module: _CompiledPiece(module, compile_one).run, branch)


def _between(
    gm: fx.GraphModule,
    stays: Callable[[fx.Node], bool],
    compile_piece: Callable[[fx.GraphModule], Compiled],
    attribute: Callable[[Any], Any] = lambda value: value,
) -> Compiled:
    """Return a graph whose nodes between those that stay are calls of compiled pieces."""
    root = torch.nn.Module()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    pending: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
        elif node.op not in ("get_attr", "output") and not stays(node):
            pending.append(node)
        else:
            if pending:
                piece = extract_subgraph(gm, pending)
                piece.call(graph, compile_piece(piece.module), copies)
                pending.clear()
            if node.op == "get_attr":
                setattr(root, str(node.target), attribute(getattr(gm, str(node.target))))
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(root, graph).forward


def _stays(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.target in control_ops.TARGETS
    return node.target in control_ops.TARGETS or node.target in _MODES


class _CompiledBranch(torch.nn.Module):
    """A branch as a submodule, so that a graph can refer to it."""

    def __init__(self, run: Compiled) -> None:
        super().__init__()
        self.forward = run


class _CompiledPiece:
    """A graph that is compiled for each variant of its inputs."""

    def __init__(self, module: fx.GraphModule, compile_one: CompileOne) -> None:
        self.module = module
        self.compile_one = compile_one
        self.compiled: dict[object, Compiled] = {}
        self.__name__ = "piece"  # fx prints it

    def run(self, *args: Any) -> Any:
        key = (torch.is_grad_enabled(), TorchState.now(), *map(_kind, args))
        compiled = self.compiled.get(key)
        if compiled is None:
            if len(self.compiled) >= _VARIANTS:
                return self.module(*args)
            # The frame hook is off while the backend's code runs.
            compiled = frame.run(None, self.compile_one, self.module, list(args))
            self.compiled[key] = compiled
        return compiled(*args)


def _kind(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return type(value), value
    layout = (value.shape, value.stride()) if value.layout is torch.strided else None
    return type(value), value.dtype, value.device, layout, value.requires_grad, value.is_leaf
