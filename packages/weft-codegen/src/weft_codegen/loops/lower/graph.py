"""Lowering an aten graph: fx nodes in, a program of loop nodes, extern calls and aliases out.

Walks the graph once.  A node with a row in the table becomes a lazy tensor; whatever has none (or
whose row declines the case) becomes an Extern through the dispatcher.  Lazy tensors get a buffer
when an extern, an output or a mutation needs memory, when several users would recompute something
that is not trivial, or when an expression has grown long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from weft_core.launches import LAUNCH_
from weft_core.tracing import ASSERT, must_run

from weft_codegen.loops import checks
from weft_codegen.loops import program as ir
from weft_codegen.loops.expr import Expr, Load, apply, cast, constant, cost, walk
from weft_codegen.loops.index import ONE, ZERO, Axis, IndexExpr, Size, as_axis, single
from weft_codegen.loops.lower import fxnodes
from weft_codegen.loops.lower.decompose import VARYING
from weft_codegen.loops.lower.lazy_tensor import (
    Element,
    LazyTensor,
    broadcast_at,
    contiguous_strides,
    flatten,
    index_space,
    is_dense,
    offset_of,
)
from weft_codegen.loops.lower.origins import origin_text
from weft_codegen.loops.lower.rows import LOWERINGS
from weft_codegen.loops.lower.shapes import NoLowering, rewritten, to_index, to_shape
from weft_codegen.loops.lower.sizes import bound_sizes, learn
from weft_codegen.loops.lower.table import (
    Call,
    IndexMap,
    LoweringContext,
    Shape,
    require,
)
from weft_codegen.loops.ops import DTYPES

# Operators that read a number or the size of their result out of a tensor.
_BY_DATA = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
_MASKED = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)
# A value that several users would recompute is stored when it costs more than this (in float adds,
# a load counting two): one store and one load per user replace the recomputation.
_RECOMPUTE_LIMIT = 5
# Longest chain of operators kept in one expression.
_CHAIN_LIMIT = 64


def lower_graph(gm: fx.GraphModule, fallback_random: bool = True) -> ir.Program:
    """Lower an aten graph whose nodes carry `meta["val"]`.

    With `fallback_random` random operators are externs, else numbers of random.py.
    The graph is functional apart from trailing `aten.copy_(placeholder, value)` nodes.  Raises
    NoLowering when the graph as a whole has no program (unbacked sizes, other mutations).
    """
    with rewritten(learn(gm)):
        return GraphLowering(gm, fallback_random).run()


class GraphLowering(LoweringContext):
    """State of one graph's lowering."""

    def __init__(self, gm: fx.GraphModule, fallback_random: bool) -> None:
        self._gm = gm
        self.fallback_random = fallback_random
        self.seed: LazyTensor | None = None
        self.draws = 0
        self._env: dict[fx.Node, Any] = {}
        self._buffers: dict[str, ir.Buffer] = {}
        self._items: list[ir.Step] = []
        self._inputs: list[ir.Input] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._outputs: list[ir.Output] = []
        self._copies: list[tuple[LazyTensor, LazyTensor]] = []
        self._written: list[str] = []
        self._aliases: dict[tuple[Any, ...], ir.Buffer] = {}
        self._uses = fxnodes.count_uses(gm)
        self._sums: set[fx.Node] = set()
        self._weights: dict[LazyTensor, int] = {}
        self._checked: set[tuple[LazyTensor, IndexExpr, bool]] = set()

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
            visit[node.op](node)
        mutations = self._mutate()
        program = ir.Program(
            (),
            tuple(self._inputs),
            self._constants,
            self._buffers,
            {},
            tuple(self._items),
            tuple(self._outputs),
            mutations,
        )
        return replace(program, sizes=bound_sizes(program))

    # ---- the graph's boundary

    def _placeholder(self, node: fx.Node) -> None:
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            name = f"in{len(self._inputs)}"
            self._inputs.append(ir.Input(name))
            self._env[node] = self._in_memory(self._new_buffer(fake, name))
            return
        if isinstance(fake, torch.SymInt):
            self._env[node] = where = to_index(fake)
            kind = "size" if isinstance(single(where), Size) else "unused"
            self._inputs.append(ir.Input(str(where), kind))
            return
        self._env[node] = fake
        self._inputs.append(ir.Input(node.name, "unused"))

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
        if (product := fxnodes.added_product(node, self._sums)) is not None:
            target, args, kwargs = torch.ops.aten.addmm.default, self._arguments(product), {}
        inlined = [o for t in _tensors((args, kwargs)) if not _in_buffer(t) for o in t.origins]
        origins = tuple(dict.fromkeys((*inlined, origin_text(node))))
        call = Call(self, node.meta["val"], self._uses[node], origins, node)
        name = target._schema.name.split("::")[1]
        row = LOWERINGS.get(f"{target.namespace}.{name}")
        called = name in VARYING and torch.are_deterministic_algorithms_enabled()
        if row is not None and not target._schema.is_mutable and not called:
            try:
                result = row(call, *args, **kwargs)
            except NoLowering:
                pass
            else:
                self._settle(result, (args, kwargs), node)
                return result
        return self.extern(call, target, args, kwargs)

    def _settle(self, result: Any, arguments: Any, node: fx.Node) -> None:
        """Store results that are too costly to recompute or whose expression is long."""
        weight = 1 + sum(self._weights.get(t.root or t, 1) for t in _tensors(arguments))
        for tensor in _tensors(result):
            if tensor.buffer is not None or tensor.root is not None:
                continue
            self._weights[tensor] = weight
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

    def extern(self, call: Call, target: Any, args: Any, kwargs: Any) -> Any:
        owning = fxnodes.without_alias(target, args)
        if owning._schema.is_mutable and owning is not LAUNCH_:
            raise NoLowering(f"{owning} mutates its arguments")
        for one in args[1] if target.namespace == "weft" else ():
            require(self.materialise(one).strides == one.strides, "a kernel with other strides")
        outs: Sequence[Any] = (call.fake,)
        if isinstance(call.fake, tuple | list):
            outs = fxnodes.without_unused(call.fake, call.node, target)
        outs = outs if target._schema.returns else ()
        if any(isinstance(fake, tuple | list) for fake in outs):
            raise NoLowering(f"{owning} returns lists of tensors")
        tensors: list[LazyTensor | None] = []
        for fake in outs:
            made = isinstance(fake, torch.Tensor)
            buffer = self._new_buffer(fake) if made else None
            if buffer is not None and owning is not target:
                # The copying twin of a view operator returns a contiguous tensor.
                dense = replace(buffer, strides=contiguous_strides(buffer.shape))
                self._buffers[buffer.name] = dense
                # Views of it were traced with the strides of the view, which it does not have.
                tensors.append(replace(self._in_memory(dense), strides=buffer.strides))
            else:
                tensors.append(None if buffer is None else self._in_memory(buffer))
        plain = tuple(self._plain(arg) for arg in args)
        written = tuple(one.buffer.name for one in fxnodes.written_by(owning, args))
        self._written += [name for name in written if name.startswith("in")]
        self._items.append(
            ir.Extern(
                owning,
                plain,
                tuple((name, self._plain(value)) for name, value in kwargs.items()),
                tuple(t.buffer.name if t and t.buffer else None for t in tensors),
                written,
                call.origins[-1:],
            )
        )
        if isinstance(call.fake, tuple | list) or not tensors:
            return tuple(tensors)
        return tensors[0]

    def _plain(self, value: Any) -> Any:
        """An operator argument with tensors as BufferRef."""
        if isinstance(value, LazyTensor):
            return ir.BufferRef(self.materialise(value).name)
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        if isinstance(value, Expr):
            raise NoLowering("a number computed from sizes as an operator's argument")
        return value

    # ---- memory

    def materialise(self, tensor: LazyTensor) -> ir.Buffer:
        """The buffer (or the alias into its root's buffer) that holds `tensor`."""
        if tensor.buffer is not None:
            return tensor.buffer
        root = tensor.root
        if root is None:
            self.realise(tensor)
            assert tensor.buffer is not None
            return tensor.buffer
        self.realise(root)
        base = root.buffer
        assert base is not None
        if base.strides != root.strides:
            # The root is laid out anew, so the view cannot be expressed in its memory.
            tensor.root = None
            return self.materialise(tensor)
        key = (base.name, tensor.shape, tensor.strides, tensor.offset, tensor.dtype)
        if key not in self._aliases:
            if key[1:4] == (base.shape, base.strides, ZERO):
                return base
            name = self._fresh("view")
            self._aliases[key] = replace(
                base, name=name, shape=tensor.shape, strides=tensor.strides
            )
            self._buffers[name] = self._aliases[key]
            self._items.append(ir.Alias(name, base.name, tensor.offset))
        return self._aliases[key]

    def realise(self, tensor: LazyTensor) -> None:
        if tensor.buffer is not None:
            return
        axes, where, value = self._element(tensor)
        dense = is_dense(tensor.shape, tensor.strides)
        strides = tensor.strides if dense else contiguous_strides(tensor.shape)
        buffer = ir.Buffer(self._fresh(), tensor.dtype, tensor.shape, strides, tensor.device)
        self._store(buffer, axes, where, value, tensor.origins)
        tensor.buffer = buffer

    def _store(
        self,
        buffer: ir.Buffer,
        axes: tuple[Axis, ...],
        where: list[IndexExpr],
        value: Expr,
        origins: tuple[str, ...],
    ) -> None:
        require(buffer.dtype in DTYPES, f"a kernel that stores {buffer.dtype}")
        self._buffers[buffer.name] = buffer
        position, value = offset_of(where, buffer.strides), cast(value, buffer.dtype)
        self._items.append(ir.Compute(buffer.name, axes, (), None, (value,), position, origins))

    @staticmethod
    def _element(tensor: LazyTensor) -> tuple[tuple[Axis, ...], list[IndexExpr], Expr]:
        where, axes = index_space(tensor.shape)
        return axes, where, tensor.at(where)

    def reduction(
        self,
        call: Call,
        op: str,
        axes: tuple[Axis, ...],
        reduced: tuple[Axis, ...],
        values: tuple[Expr, ...],
        dtype: torch.dtype,
    ) -> LazyTensor:
        shape = tuple(loop.extent for loop in axes)
        fake = call.fake[0] if isinstance(call.fake, tuple | list) else call.fake
        buffer = ir.Buffer(self._fresh(), dtype, shape, contiguous_strides(shape), fake.device)
        self._buffers[buffer.name] = buffer
        position = flatten([loop.at for loop in axes], shape)
        # Over dimensions of size one there is nothing to combine: the value (or position) itself.
        kind = op if reduced else None
        if not reduced:
            alone = values[-1]
            if op == "sum" and alone.dtype.is_floating_point:
                alone = apply("add", alone, constant(0, alone.dtype))  # 0 + -0.0 is 0.0
            values = (cast(alone, dtype),)
        self._items.append(
            ir.Compute(buffer.name, axes, reduced, kind, values, position, call.origins)
        )
        tensor = self._in_memory(buffer)
        tensor.origins = call.origins
        return tensor

    def scanned(
        self, call: Call, op: str, dim: int, value: Element, inner: torch.dtype
    ) -> LazyTensor:
        result = call.lazy(value)
        axes, where, _ = self._element(result)
        self.realise(result)
        node = self._items[-1]
        assert isinstance(node, ir.Compute)
        along = tuple(loop for loop in axes if loop is as_axis(where[dim]))
        values = (cast(value(where), inner),)
        self._items[-1] = replace(node, values=values, scan=op, along=along)
        return result

    def updated(
        self, call: Call, base: LazyTensor, over: Shape, target: IndexMap, value: Element, mode: str
    ) -> LazyTensor:
        copy = call.lazy(lambda where: broadcast_at(base, where))
        self.realise(copy)
        assert copy.buffer is not None
        where, axes = index_space(over, "e")
        position = offset_of(target(where), copy.buffer.strides)
        values = (cast(value(where), copy.dtype),)
        self._items.append(
            ir.Compute(
                copy.buffer.name, axes, (), None, values, position, call.origins, update=mode
            )
        )
        return copy

    def check_index(
        self, call: Call, index: LazyTensor, extent: IndexExpr, *, dim: int, wraps: bool, kind: str
    ) -> None:
        key = (index, extent, wraps)
        if key in self._checked:
            return
        self._checked.add(key)
        axes, _, value = self._element(index)
        code = checks.violation(cast(value, torch.int64), extent, wraps)
        whole = replace(call, fake=torch.empty((), dtype=torch.int64, device="meta"))
        found = self.reduction(whole, "max", (), axes, (code,), torch.int64)
        assert found.buffer is not None
        name = found.buffer.name
        self._buffers[name] = replace(found.buffer, device=index.device)
        self._items.append(
            ir.Extern(
                checks.check_index,
                (ir.BufferRef(name), extent, dim, kind),
                (),
                (),
                origins=call.origins[-1:],
                when=name,
            )
        )

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

    def _new_buffer(self, fake: torch.Tensor, name: str | None = None) -> ir.Buffer:
        if fake.layout is not torch.strided:
            raise NoLowering(f"tensor of layout {fake.layout}")
        strides = to_shape(fake.stride())
        name = name or self._fresh()
        buffer = ir.Buffer(name, fake.dtype, to_shape(fake.shape), strides, fake.device)
        self._buffers[name] = buffer
        return buffer

    def _fresh(self, kind: str = "buf") -> str:
        return f"{kind}{len(self._buffers)}"

    @staticmethod
    def _in_memory(buffer: ir.Buffer) -> LazyTensor:
        return LazyTensor(
            buffer.shape, buffer.dtype, buffer.strides, buffer=buffer, device=buffer.device
        )

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


def _in_buffer(tensor: LazyTensor) -> bool:
    """Whether reading `tensor` is a load, so that its own operators are not computed again."""
    return tensor.buffer is not None or (tensor.root is not None and tensor.root.buffer is not None)


__all__ = ["NoLowering", "lower_graph"]
