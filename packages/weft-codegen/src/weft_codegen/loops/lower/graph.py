"""Lowering an aten graph: fx nodes in, a program of loop nodes, extern calls and aliases out.

Walks the graph once.  A node with a row in the table becomes a lazy tensor; whatever has none (or
whose row declines the case) becomes an Extern through the dispatcher.  Lazy tensors get a buffer
when an extern, an output or a mutation needs memory, when several users would recompute something
that is not trivial, or when an expression has grown long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from weft_core import events
from weft_core.node_effects import must_run
from weft_core.tracing import ASSERT

from weft_codegen.loops import program as ir
from weft_codegen.loops.expr import Load, cost, walk
from weft_codegen.loops.index import ONE, ZERO, Size, as_axis, single
from weft_codegen.loops.lower import fxnodes
from weft_codegen.loops.lower.decompose import VARYING
from weft_codegen.loops.lower.lazy_tensor import ROUNDS, LazyTensor, broadcast_at, index_space
from weft_codegen.loops.lower.lowering import Call, LoweringContext
from weft_codegen.loops.lower.origins import origin_text
from weft_codegen.loops.lower.rows import LOWERINGS
from weft_codegen.loops.lower.shapes import NoLowering, rewritten, to_index
from weft_codegen.loops.lower.sizes import bound_sizes, learn, size_hints
from weft_codegen.loops.lower.strict import is_exact

_log = events.logger("codegen", "lowering")

# Operators that read a number or the size of their result out of a tensor.
_BY_DATA = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
_MASKED = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)
# A value that several users would recompute is stored when it costs more than this (in float adds,
# a load counting two): one store and one load per user replace the recomputation.
_RECOMPUTE_LIMIT = 5
# Why an operator is called that the table does not have.
NO_ROW = "no row in the lowering table"
# Longest chain of operators kept in one expression.
_CHAIN_LIMIT = 64


def lower_graph(
    gm: fx.GraphModule,
    fallback_random: bool = True,
    *,
    rounds: bool = False,
    strict: bool = False,
    called: bool = False,
) -> ir.Program:
    """Lower an aten graph whose nodes carry `meta["val"]`.

    With `fallback_random` random operators are externs, else numbers of random.py. With `rounds`
    each 16-bit result is rounded; with `strict` only exact operators become loops (strict.py), with
    `called` only views.
    The graph is functional apart from trailing `aten.copy_(placeholder, value)` nodes.  Raises
    NoLowering when the graph as a whole has no program (unbacked sizes, other mutations).
    """
    token = ROUNDS.set(rounds or strict)
    try:
        with rewritten(learn(gm)):
            return GraphLowering(gm, fallback_random, strict, called).run()
    finally:
        ROUNDS.reset(token)


class GraphLowering(LoweringContext):
    """State of one graph's lowering."""

    def __init__(
        self, gm: fx.GraphModule, fallback_random: bool, strict: bool, called: bool
    ) -> None:
        super().__init__(fallback_random)
        self._strict, self._called = strict, called
        self._gm = gm
        self._env: dict[fx.Node, Any] = {}
        self._inputs: list[ir.Input] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._outputs: list[ir.Output] = []
        self._copies: list[tuple[LazyTensor, LazyTensor]] = []
        self._uses, self._compared = fxnodes.count_uses(gm), fxnodes.compared(gm)
        self._sums: set[fx.Node] = set()
        self._weights: dict[LazyTensor, int] = {}

    def run(self) -> ir.Program:
        visit: dict[str, Callable[[fx.Node], None]] = {
            "placeholder": self._placeholder,
            "get_attr": self._get_attr,
            "call_function": self._call_function,
            "output": self._output,
        }
        for node in self._gm.graph.nodes:
            if getattr(getattr(node.meta.get("val"), "device", None), "type", "") == "meta":
                raise NoLowering(f"{node.target} makes a tensor without memory")
            if str(node.target).startswith("aten.quantize_per"):  # its fake result is a float
                raise NoLowering(f"{node.target} makes a quantised tensor")
            try:
                visit[node.op](node)
            except NoLowering as failure:
                failure.operator = failure.operator or str(node.target)
                _log.info("no program: %s: %s", origin_text(node), failure)
                raise
        mutations = self._mutate()
        inputs, steps, outputs = tuple(self._inputs), tuple(self._items), tuple(self._outputs)
        program = ir.Program(
            (), inputs, self._constants, self._buffers, {}, steps, outputs, mutations
        )
        return replace(program, sizes=bound_sizes(program), hints=size_hints(self._gm))

    # ---- the graph's boundary

    def _placeholder(self, node: fx.Node) -> None:
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            item = ir.Input(f"in{len(self._inputs)}")
            self._env[node] = self._in_memory(self._new_buffer(fake, item.name))
        elif isinstance(fake, torch.SymInt):
            self._env[node] = where = to_index(fake)
            item = ir.Input(str(where), "size" if isinstance(single(where), Size) else "unused")
        else:
            self._env[node], item = fake, ir.Input(node.name, "unused")
        self._inputs.append(item)

    def _get_attr(self, node: fx.Node) -> None:
        value = fxnodes.attribute(node)
        if not isinstance(value, torch.Tensor):
            raise NoLowering(f"graph attribute {node.target} of {type(value).__name__}")
        name = f"const{len(self._constants)}"
        self._constants[name] = value
        packed = value.is_mkldnn  # only an operator can read it
        shaped = node.meta["val"] if packed else value
        self._env[node] = self._in_memory(self._new_buffer(shaped, name))

    def _output(self, node: fx.Node) -> None:
        for value in self._arguments(node.args[0]):
            if isinstance(value, LazyTensor):
                if getattr((value.root or value).buffer, "name", "") in self._written:
                    value = replace(value, element=value.at, buffer=None, root=None, _seen={})
                buffer = self.materialise(value)
                dims = zip(value.shape, value.strides, buffer.strides, strict=True)
                if ZERO not in value.shape and any(n is not ONE and a is not b for n, a, b in dims):
                    raise NoLowering("the strides of a result are not known to be those of memory")
                self._outputs.append(ir.BufferRef(buffer.name))
            elif isinstance(value, bool):
                raise NoLowering("a bool as a result")
            else:
                self._outputs.append(None if value is None else to_index(value))

    # ---- operators

    def _call_function(self, node: fx.Node) -> None:
        target: Any = node.target
        # The symbols of masks, whose operators have such tags too, are refused where they are used.
        by_data = _BY_DATA.intersection(getattr(target, "tags", ())) and target not in _MASKED
        if by_data or target is ASSERT:
            raise NoLowering(f"{target} is about a number or size that is only known while running")
        if not node.users and not must_run(node):
            return
        args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
        name = getattr(target, "__name__", "")
        if name == "getitem":
            self._env[node] = args[0][args[1]]
        elif not isinstance(target, torch._ops.OpOverload):
            self._env[node] = fxnodes.symbolic(node, args)
        elif target is torch.ops.aten.copy_.default:
            self._copies.append((args[0], args[1]))
            self._env[node] = args[0]
        elif isinstance(node.meta.get("val"), torch.SymInt | int):
            self._env[node] = to_index(node.meta["val"])
        else:
            self._env[node] = self._operator(node, target, args, kwargs)

    def _operator(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        product = None if self._strict or self._called else fxnodes.added_product(node, self._sums)
        if product is not None:
            target, args, kwargs = torch.ops.aten.addmm.default, self._arguments(product), {}
        inlined = [o for t in _tensors((args, kwargs)) if not t.in_memory for o in t.origins]
        origins = tuple(dict.fromkeys((*inlined, origin_text(node))))
        call = Call(self, node.meta["val"], self._uses[node], origins, node)
        name = target._schema.name.split("::")[1]
        row = LOWERINGS.get(f"{target.namespace}.{name}")
        if row is None or target._schema.is_mutable:
            reason = NO_ROW
        elif name in VARYING and torch.are_deterministic_algorithms_enabled():
            reason = "deterministic algorithms are asked for"
        elif self._strict and not is_exact(target, node.meta["val"], node.args, node.kwargs):
            reason = "strict numerics: a loop may have other bits"
        elif self._called and not fxnodes.is_view(target):
            reason = "operators are called by default"
        else:
            try:
                result = row(call, *args, **kwargs)
            except NoLowering as declined:
                reason = str(declined)
            else:
                self._settle(result, (args, kwargs), node)
                return result
        _log.info("%s is called: %s", origins[-1], reason)
        return self.extern(call, target, args, kwargs, reason)

    def _settle(self, result: Any, arguments: Any, node: fx.Node) -> None:
        """Store results that are too costly to recompute or whose expression is long."""
        weight = 1 + sum(self._weights.get(t.root or t, 1) for t in _tensors(arguments))
        for tensor in _tensors(result):
            if tensor.buffer is not None or tensor.root is not None:
                continue
            self._weights[tensor] = weight
            tensor.is_compared = node in self._compared
            if weight > _CHAIN_LIMIT or (tensor.uses > 1 and self._costly(tensor)):
                self.realise(tensor)
                self._weights[tensor] = 1

    def _costly(self, tensor: LazyTensor) -> bool:
        _, where, value = self._element(tensor)
        inner = next((at for at, n in zip(where, tensor.strides, strict=True) if n is ONE), ZERO)
        nodes = walk(value)
        if inner is not ZERO:  # what does not change along it moves out of the innermost loop
            nodes = (node for node in nodes if as_axis(inner) in node.axes)
        return cost(nodes, load=2) > _RECOMPUTE_LIMIT

    def _mutate(self) -> tuple[str, ...]:
        """Emit the trailing copies into inputs, after everything that reads the old values."""
        targets = {target.buffer.name for target, _ in self._copies if target.buffer}
        for target, value in self._copies:
            if self._reads_mutated(target, value, targets):
                self.materialise(value)
        for target, value in self._copies:
            assert target.buffer is not None
            where, axes = index_space(target.shape)
            if (element := broadcast_at(value, where)) is not target.at(where):
                self._store(target.buffer, axes, where, element, value.origins)
        copied = [target.buffer.name for target, _ in self._copies if target.buffer]
        return tuple(dict.fromkeys([*copied, *self._written]))

    def _reads_mutated(self, target: LazyTensor, value: LazyTensor, targets: set[str]) -> bool:
        """Whether storing `value` late would see another input's new value, or a moved one."""
        where, _ = index_space(target.shape)
        own = target.at(where)
        loads = [n for n in walk(broadcast_at(value, where)) if isinstance(n, Load)]
        mutated = [node for node in loads if node.buffer in targets]
        return any(node not in set(walk(own)) for node in mutated)

    # ---- the fx graph

    def _arguments(self, value: Any) -> Any:
        return fx.map_arg(value, self._env.__getitem__)


def _tensors(value: Any) -> list[LazyTensor]:
    if isinstance(value, LazyTensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


__all__ = ["NoLowering", "lower_graph"]
