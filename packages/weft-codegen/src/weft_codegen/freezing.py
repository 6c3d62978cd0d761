"""`options={"freezing": True}`: what depends on parameters alone is computed once.

    graph(parameters, x)  ->  constants = prologue(parameters);  main(constants, x)

The prologue runs again when a call brings other tensors, or ones whose version counter moved.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from weft_core.graph_copy import copy_nodes

from weft_codegen.folding import fold_affine, pack_weights
from weft_codegen.layout import laid_out
from weft_codegen.loops.lower.fxnodes import is_pure, is_view

Run = Callable[..., Any]
_Held = tuple[int, weakref.ref[torch.Tensor], int | None]
"""The position of a frozen input, the tensor, and its version, which inference tensors lack."""


def frozen_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """The inputs of a captured graph that are parameters or buffers of modules, by position."""
    names = [node.meta.get("source_name", "") for node in gm.graph.find_nodes(op="placeholder")]
    kinds = (torch.nn.Parameter, torch.nn.Buffer)
    return {
        position: value
        for position, (name, value) in enumerate(zip(names, inputs, strict=True))
        if isinstance(value, kinds) or (isinstance(value, torch.Tensor) and "_buffers" in name)
    }


def frozen(
    gm: fx.GraphModule, tensors: Mapping[int, torch.Tensor], build: Callable[..., Run]
) -> Run:
    """Compile an inference graph whose frozen inputs are folded; call it with all inputs.

    Inputs of which nothing is computed stay inputs, which need no check in a call.

    Args:
        gm: an aten graph; it is left as it is.
        tensors: the frozen inputs by position.
        build: compiles what is left, whose constants are attributes of the module.
    """
    main = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    with torch.no_grad():
        fold_affine(main.graph, _constants(main.graph, tensors))
        main = laid_out(main)
        constants = _constants(main.graph, tensors)
        pack_weights(main.graph, constants)
    constants = _behind_computed(main.graph, constants)
    return Frozen(main, constants, tensors, build) if constants else build(gm)


class Frozen:
    """A compiled graph whose frozen inputs are folded; it is called with all inputs.

    Args:
        main: an inference aten graph, which this may change.
        constants: its nodes that are computed once, and the inputs that they depend on.
        tensors: the frozen inputs by position.
        build: compiles what is left, whose constants are attributes of the module.
    """

    def __init__(
        self,
        main: fx.GraphModule,
        constants: set[fx.Node],
        tensors: Mapping[int, torch.Tensor],
        build: Callable[..., Run],
    ) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._main = main
        holders = self._main.graph.find_nodes(op="placeholder")
        self._frozen = tuple(k for k, node in enumerate(holders) if node in constants)
        self._free = tuple(k for k, node in enumerate(holders) if node not in constants)
        frozen = [holders[k] for k in self._frozen]
        self._names, self._prologue = _split(self._main, frozen, constants)
        self._state = self._freeze([tensors[k] for k in self._frozen])

    def __call__(self, *args: Any) -> Any:
        """The outputs of the graph."""
        held, run = self._state
        for position, reference, version in held:
            tensor: torch.Tensor = args[position]
            if reference() is not tensor or (version is not None and tensor._version != version):
                with self._lock:
                    self._state = _, run = self._freeze([args[k] for k in self._frozen])
                break
        return run(*[args[k] for k in self._free])

    def _freeze(self, tensors: Sequence[torch.Tensor]) -> tuple[list[_Held], Run]:
        held = [
            (k, weakref.ref(tensor), None if tensor.is_inference() else tensor._version)
            for k, tensor in zip(self._frozen, tensors, strict=True)
        ]
        with torch.no_grad(), torch._C._DisableAutocast():
            values = self._prologue(*tensors)
        for name, value in zip(self._names, values, strict=True):
            parameter = isinstance(value, torch.nn.Parameter)
            setattr(self._main, name, value.detach() if parameter else value)
        return held, self._build(self._main)


def _constants(graph: fx.Graph, tensors: Mapping[int, torch.Tensor]) -> set[fx.Node]:
    """The nodes that depend on frozen inputs alone; an output is made anew in each call."""
    found = {
        node
        for position, node in enumerate(graph.find_nodes(op="placeholder"))
        if position in tensors
        and _is_static(node)
        and all(is_pure(user.target) for user in node.users)
    }
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and all(used in found for used in inputs):
            returned = any(user.op == "output" for user in node.users)
            if _is_static(node) and not returned and is_pure(node.target):
                found.add(node)
    return found


def _behind_computed(graph: fx.Graph, constants: set[fx.Node]) -> set[fx.Node]:
    """Those of `constants` behind inputs of which something is computed, not only viewed."""
    roots: dict[fx.Node, set[fx.Node]] = {}
    computed: set[fx.Node] = set()
    for node in graph.nodes:
        if node in constants:
            used = [roots[one] for one in node.all_input_nodes]
            roots[node] = set().union(*used) if used else {node}
            if node.op == "call_function" and not is_view(node.target):
                computed |= roots[node]
    return {node for node, found in roots.items() if found <= computed}


def _is_static(node: fx.Node) -> bool:
    fake = node.meta.get("val")
    return isinstance(fake, torch.Tensor) and all(type(n) is int for n in fake.shape)


def _split(
    gm: fx.GraphModule, frozen: list[fx.Node], constants: set[fx.Node]
) -> tuple[list[str], fx.GraphModule]:
    """Move `constants` out of `gm`: the attributes that it now reads, and what computes those."""
    names: list[str] = []
    moved = [node for node in gm.graph.nodes if node in constants]
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    computed = [node for node in moved if node.op != "placeholder"]
    needed = [node for node in moved if not constants.issuperset(node.users)]
    prologue = copy_nodes(torch.nn.Module(), computed, needed, frozen)
    for node in needed:
        names.append(f"frozen{len(names)}")
        with gm.graph.inserting_before(first):
            constant = gm.graph.create_node("get_attr", names[-1])
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant, lambda user: user not in constants)
    for node in computed[::-1] + frozen:
        gm.graph.erase_node(node)
    gm.recompile()
    return names, prologue
