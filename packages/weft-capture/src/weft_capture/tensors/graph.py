"""The fx graph under construction: inputs, nodes, and their fake tensors.

Every operation enters the graph through `emit`. It runs on fake tensors first, which checks it and
gives the result's shape, then it becomes a node. A rollback of a step removes its nodes.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx import Graph, GraphModule, Node
from weft_core import fake
from weft_core.adapters import for_fakes
from weft_core.errors import Unsupported
from weft_core.jagged import is_ragged_size
from weft_core.symnodes import SymbolTable
from weft_core.tensor_subclass import is_wrapper_subclass
from weft_core.tensor_versions import version_of
from weft_core.tracing import ASSERT
from weft_core.warnings_capture import suppress_warnings
from weft_guards.dimension_marks import Kind
from weft_guards.sources import Source, TensorProperty

from weft_capture import config
from weft_capture.breaks import Break, NeedsSymbols
from weft_capture.model.constant import is_constant_object
from weft_capture.model.containers import sequence_of
from weft_capture.model.dicts import DictValue
from weft_capture.model.protocol import Kwargs, Tracer, Value
from weft_capture.tensors import scalar_operands, subclass
from weft_capture.tensors.inputs import (
    GraphInput,
    check_views,
    check_writes,
    guard_strided,
    input_name,
    note_layouts,
    note_writes,
    refuse_reshaping,
    restore,
    states,
)
from weft_capture.tensors.subclass import RaggedSize, WrapperValue
from weft_capture.tensors.tensor import SymValue, TensorValue, check_operator, memory_of

_CODES = {
    "RecursionError": "recursion",
    "DataDependentOutputException": "data-dependent-value",
    "GuardOnDataDependentSymNode": "data-dependent-value",
    "DynamicOutputShapeException": "dynamic-output-shape",
    "UnsupportedOperatorException": "no-fake-kernel",
}
_NO_KERNEL = "no fake impl registered"  # torch's error for a custom operator without one
_OF_DATA = ("data-dependent-value", "dynamic-output-shape")
_NO_DATA = "but its data is not allocated"  # the error of fake tensors when they are read
_AUTOCAST = torch.amp.autocast_mode
_MODES = (torch._C._set_grad_enabled, _AUTOCAST._enter_autocast, _AUTOCAST._exit_autocast)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class GraphBuilder:
    """Builds the graph of one traced frame."""

    def __init__(self, tx: Tracer, symbolic: bool) -> None:
        self.tx = tx
        self.graph = Graph()
        self.root = torch.nn.Module()  # has the submodules of the graph
        self.shape_env = fake.make_shape_env() if symbolic else None
        self.mode = fake.fake_mode(self.shape_env)
        self.inputs: list[GraphInput] = []
        self.symbols: dict[object, Node] = {}
        self._by_fake: dict[int, TensorValue] = {}
        self._last_input = self.graph._root
        self.op_count = 0
        self.inference = torch.is_inference_mode_enabled()
        self.region: int | None = None  # the current region of activation checkpointing
        self.step_of_node: dict[Node, int] = {}  # the step that made each node
        self.input_at: dict[Node, GraphInput] = {}
        self.floats: dict[Source, Any] = {}  # floats, and sizes that Python computes
        self.has_wrappers = False
        self.reading = False  # whether numbers and sizes are read from tensors in any case
        self.collectives = 0  # number of collectives that write to tensors
        self.passed: set[Any] = set()  # autograd nodes that backward passes have freed
        self.ended: dict[TensorValue, Any] = {}  # see `functions.torch.backward.leaving`
        self.first_write = sys.maxsize  # a step; no operation before it writes in place
        self.written: list[tuple[int, set[object]]] = []  # steps, and the memory that they wrote to
        self._assumed: set[object] = set()  # conditions on numbers out of tensors, in the graph

    # ---- inputs

    def tensor_input(
        self,
        tensor: torch.Tensor,
        source: Source,
        dynamic_dims: tuple[int, ...] = (),
        free_strides: tuple[int, ...] = (),
        inner: dict[str, Any] | None = None,
    ) -> TensorValue:
        """Return the value of a tensor from outside, a new placeholder of the graph.

        The dimensions `dynamic_dims` and the strides of `free_strides` get symbols; `inner` are the
        fake inner tensors of a wrapper subclass.
        """
        if torch._is_functional_tensor(tensor) or torch._is_zerotensor(tensor):
            raise Break("unsupported-tensor", "a functional or zero tensor")
        with temporarily_clear_interpreter_stack():  # an input belongs to no level of functorch
            marks = self.tx.policy.marks(source, tensor) if self.tx.policy and dynamic_dims else {}
            unbacked = [dim for dim, mark in marks.items() if mark.kind is Kind.UNBACKED]
            try:
                fake_tensor = fake.to_fake(
                    self.mode, tensor, dynamic_dims, source.expr(), unbacked, inner, free_strides
                )
            except RuntimeError as error:  # a view that autograd no longer follows
                raise Break("autograd-state", str(error)[:200]) from None
        for dim in dynamic_dims:
            if dim in marks and marks[dim].admits(tensor.shape[dim]):
                fake.limit(fake_tensor.shape[dim], marks[dim].min, marks[dim].max)
        amounts = [("size", dim, fake_tensor.size(dim), tensor.size(dim)) for dim in dynamic_dims]
        amounts += [("stride", d, fake_tensor.stride(d), tensor.stride(d)) for d in free_strides]
        for prop, dim, amount, now in amounts:
            if isinstance(amount, torch.SymInt) and amount.node.expr not in self.symbols:
                property_source = TensorProperty(source, prop, dim)
                self.symbols[amount.node.expr] = self._placeholder(property_source, amount, now)
        self.has_wrappers = self.has_wrappers or inner is not None
        return self.input_like(
            fake_tensor, tensor, source, TensorValue if inner is None else WrapperValue
        )

    def input_like(
        self,
        fake_tensor: torch.Tensor,
        tensor: torch.Tensor,
        source: Source,
        value_class: type[TensorValue] = TensorValue,
    ) -> TensorValue:
        """Return the value of a tensor from outside whose fake is there, a new placeholder."""
        node = self._placeholder(source, fake_tensor, tensor)
        value = value_class(node, fake_tensor, source, type(tensor), tensor)
        self.tx.steps.saw_tensor()
        self._by_fake[id(fake_tensor)] = value
        return value

    def symint_input(self, number: int, source: Source) -> Value | None:
        """Return the value of an int that varies from call to call; None when it must be static."""
        assert self.shape_env is not None
        symbol = fake.new_symint(self.shape_env, number, source.expr(), duck=False)
        if not isinstance(symbol, torch.SymInt):
            return None
        mark = self.tx.policy and self.tx.policy.marks(source, number).get(0)
        if mark:
            fake.limit(symbol, mark.min, mark.max)
        node = self._placeholder(source, symbol, number)
        self.symbols[symbol.node.expr] = node
        return SymValue(node, symbol, source)

    def _placeholder(self, source: Source, example: object, real: object) -> Node:
        """Add a placeholder after the existing ones, before all operations."""
        graph, name = self.graph, input_name(source)
        with graph.inserting_after(self._last_input):
            node = graph.placeholder(name)
        # Where two sources have one name, fx renames the second node but not its target.
        node.target = node.name
        node.meta["example_value"] = example
        node.meta["source_name"] = source.expr()
        self._last_input = node
        history = getattr(example, "grad_fn", None)
        entry = GraphInput(node, source, real, example, version_of(example), history)
        self.input_at[node] = entry
        self.inputs.append(entry)
        check_views(self.inputs)
        check_writes(self.inputs)
        return node

    # ---- operations

    def emit(self, op: str, target: Any, args: list[Value], kwargs: Kwargs) -> Value:
        """Add an operation and return its result.

        Args:
            op: `call_function` or `call_method`.
            target: the function, or the method's name.
            args: for a method, the object first.

        Raises:
            Break: when the operation cannot run on fake tensors, or a graph cannot hold its result.
        """
        function = getattr(torch.Tensor, target, None) if op == "call_method" else target
        of_python = getattr(target, "__module__", None) in ("_operator", "builtins")
        if of_python:
            check_operator(target)
        plainly = functools.partial(self._emit, op, target)
        return self.tx.overrides.evaluate(function, args, kwargs, plainly, of_python)

    def _emit(self, op: str, target: Any, args: list[Value], kwargs: Kwargs) -> Value:
        if scalar_operands.concern(args, kwargs):
            if self.has_wrappers:
                subclass.check_call(self.tx, target, [*args, *kwargs.values()], varying=True)
            return scalar_operands.emit(self.tx, op, target, args, kwargs)
        return self.emit_plain(op, target, args, kwargs)

    def emit_plain(self, op: str, target: Any, args: list[Value], kwargs: Kwargs) -> Value:
        """Add an operation; floats among its arguments are constants."""
        if self.has_wrappers:
            subclass.check_call(self.tx, target, [*args, *kwargs.values()])
        node_args = tuple(arg.graph_arg() for arg in args)
        node_kwargs = {name: value.graph_arg() for name, value in kwargs.items()}
        result = self._run(op, target, args, kwargs)
        assumed = [expr for expr in self._newly_assumed() if target is not ASSERT]
        if assumed and not self.reads_data():
            raise Break("data-dependent-value", f"whether {assumed[0]}")
        # Conditions come before the operation, which would decide them, and their checks after it.
        conditions = self._conditions(assumed)
        if _is_plain(result) and result is not None:
            value = self.tx.literal(result)
        else:
            value = self.result(self.node(op, target, node_args, node_kwargs, result), result)
        conditions |= self._conditions([expr for expr in assumed if expr not in conditions])
        for expr in assumed:
            if expr in conditions:
                text = f"this graph is for inputs with {expr}"
                self.node("call_function", ASSERT, (conditions[expr], text), {}, None)
            elif result is not None and len(expr.free_symbols) > 1:
                # Conditions on sizes inside of the operation; ranges need no check.
                raise Break("data-dependent-value", f"whether {expr} holds cannot be checked")
        return value

    def _newly_assumed(self) -> list[Any]:
        """Return what the last operation assumed of numbers out of tensors."""
        env = self.shape_env
        asserts = env.deferred_runtime_asserts.values() if env is not None else ()
        new = {a.expr: None for group in asserts for a in group if a.expr not in self._assumed}
        self._assumed.update(new)
        return list(new)

    def _conditions(self, assumed: list[Any]) -> dict[Any, Any]:
        """Build nodes for conditions, as far as there are nodes for their symbols."""
        if not assumed:
            return {}
        last = next(iter(reversed(self.graph.nodes)))
        table = SymbolTable(self.graph, "example_value", raw=True)
        for node in self.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor):
                table.bind_sizes(value, node)
            elif isinstance(value, _SYMBOLIC) and not is_ragged_size(value):
                table.bind(value, node)
        built = {}
        for expr in assumed:
            with suppress(Unsupported):
                built[expr] = table.build(expr)
        while last.next.op != "root":
            last = last.next
            self._own(last)
        return built

    def node(self, op: str, target: Any, args: Any, kwargs: Any, example: object) -> Node:
        """Add a node without running it."""
        if target is not torch._C._set_grad_enabled:
            self.tx.calls.check_clock()
        self._check_inference(target)
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta |= {"example_value": example, "draws": self.mode.drawn}
        self._own(node)
        return node

    def _check_inference(self, target: Any) -> None:
        """Break unless all operations of the graph run in one inference mode."""
        now, before = torch.is_inference_mode_enabled(), self.inference
        if now is self.inference or target in _MODES:
            return
        if any(node.op != "placeholder" and node.target not in _MODES for node in self.graph.nodes):
            raise Break("context-manager", "inference mode covers only a part of the graph")
        self.tx.journal.on_rollback(lambda: setattr(self, "inference", before))
        self.inference = now

    def _own(self, node: Node) -> None:
        node.meta["stack_trace"] = self.tx.stack_text()
        if self.region is not None:
            node.meta["recompute"] = self.region
        self.op_count += 1
        self.step_of_node[node] = self.tx.steps.now
        if self.mode.writes and self.first_write == sys.maxsize and self.writes():
            self.first_write = self.tx.steps.now
        self.tx.journal.on_rollback(lambda: self.discard(node))

    def discard(self, node: Node) -> None:
        """Remove a node that has no users."""
        if node._erased:
            return
        example_id = id(node.meta.get("example_value"))
        if example_id in self._by_fake and self._by_fake[example_id].node is node:
            del self._by_fake[example_id]  # unless the node wrote to another node's tensor
        self.op_count -= 1
        self.graph.erase_node(node)

    def _run(self, op: str, target: Any, args: list[Value], kwargs: Kwargs) -> Any:
        fake_args = [arg.example() for arg in args]
        fake_kwargs = {name: value.example() for name, value in kwargs.items()}
        refuse_reshaping(target, args, kwargs)
        guard_strided(self.tx, target, fake_args, fake_kwargs)
        _quiet_fake_errors()
        before = states([*fake_args, *fake_kwargs.values()], target)
        self.mode.is_checked = True
        function = for_fakes(target) if callable(target) else getattr(fake_args.pop(0), target)
        try:
            with suppress_warnings() as warned:
                result = function(*fake_args, **fake_kwargs)
        except Break:
            raise
        except Exception as error:
            code = _CODES.get(type(error).__name__, "operator-error")
            code = "no-fake-kernel" if _NO_KERNEL in str(error) else code
            if _NO_DATA in str(error):
                code, error = "data-dependent-value", ValueError("it reads a tensor's values")
            if code in _OF_DATA and self.shape_env is None and self.reads_data():
                raise NeedsSymbols from None
            name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            raise Break(code, f"{name}: {str(error)[:300]}") from error
        finally:
            self.mode.is_checked = False
        if warned and "torch.jit." not in warned[0]:  # which torch gives once itself
            raise Break("warns", warned[0][:300])
        if self.shape_env is not None and self.shape_env.pending_fresh_unbacked_symbols:
            self.shape_env.pending_fresh_unbacked_symbols.clear()
            if not self.reads_data():
                raise Break("dynamic-output-shape", str(target))
        after = states([fake for fake, *_ in before], target)
        if changed := {memory_of(old[0]) for old, new in zip(before, after) if old != new}:
            self.written.append((self.tx.steps.now, changed))
            self.tx.journal.on_rollback(self.written.pop)
            self.tx.journal.on_rollback(note_layouts(self.inputs, before))
            self.tx.journal.on_rollback(note_writes(self.inputs, self.tx.steps.now))
            self.tx.journal.on_rollback(functools.partial(restore, before))
            check_writes(self.inputs)
        return result

    def device_types(self) -> set[str]:
        """Return the types of the devices of all tensors so far."""
        return {value.fake.device.type for value in self._by_fake.values()}

    def reads_data(self) -> bool:
        """Say whether numbers and sizes out of tensors are captured."""
        return self.reading or config.settings.capture_scalar_outputs

    def result(self, node: Node, result: Any) -> Value:
        """Turn the fake result of a node into values; items of containers become getitem nodes."""
        if isinstance(result, torch.Tensor):
            existing = self._by_fake.get(id(result))
            if existing is not None:
                return existing
            if is_wrapper_subclass(type(result)):
                if not subclass.is_whole(result):
                    raise Break("tensor-subclass", f"an empty {type(result).__name__}")
                self.has_wrappers = True
                value: TensorValue = WrapperValue(node, result, cls=type(result))
            else:
                value = TensorValue(node, result)
            self.tx.steps.saw_tensor()
            self._by_fake[id(result)] = value
            return value
        if isinstance(result, _SYMBOLIC):
            return self.symbolic(node, result)
        if isinstance(result, tuple | list):
            items = [self._part(node, index, item) for index, item in enumerate(result)]
            return sequence_of(type(result), items)
        if isinstance(result, dict):
            return DictValue(
                [(self.tx.literal(k), self._part(node, k, v)) for k, v in result.items()]
            )
        if _is_plain(result):
            return self.tx.literal(result)
        raise Break("graph-value", f"{node.target} returns {type(result).__name__}")

    def symbolic(self, node: Node, result: Any) -> Value:
        """Wrap a symbolic number; one that turned out static is a constant."""
        if is_ragged_size(result):
            raise Break("tensor-subclass", "a ragged size that an operation returns")
        static = _known_int(result)
        return SymValue(node, result) if static is None else self.tx.literal(static)

    def _part(self, node: Node, key: Any, item: Any) -> Value:
        if _is_plain(item):
            return self.tx.literal(item)
        item_node = self.node("call_function", operator.getitem, (node, key), {}, item)
        return self.result(item_node, item)

    def inside(self, tensor: TensorValue, name: str) -> Value:
        """Return an inner tensor of a wrapper subclass."""
        inner = getattr(tensor.fake, name)
        existing = self._by_fake.get(id(inner))
        if existing is not None:
            return existing
        node = self.node("call_function", getattr, (tensor.node, name), {}, inner)
        return self.result(node, inner)

    def replace(self, tensor: TensorValue, other: Value) -> None:
        """Return the value of a new tensor that the graph computes."""
        assert isinstance(other, TensorValue)
        old = tensor.node, tensor.fake

        def undo() -> None:
            self._by_fake.pop(id(other.fake), None)
            tensor.node, tensor.fake = old

        self.tx.journal.on_rollback(undo)
        tensor.node, tensor.fake = other.node, other.fake
        self._by_fake[id(other.fake)] = tensor

    def detach_users(self, tensor: TensorValue) -> None:
        """Make the users of an input so far use a detached alias of it."""
        users, fake = list(tensor.node.users), tensor.fake.detach()
        alias = self.node("call_method", "detach", (tensor.node,), {}, fake)
        self._last_input.append(alias)
        for user in users:
            user.replace_input_with(tensor.node, alias)
            undo = functools.partial(user.replace_input_with, alias, tensor.node)
            self.tx.journal.on_rollback(undo)

    def size(self, tensor: TensorValue, dim: int) -> Value:
        """Return one size of a tensor, a constant or a symbolic int."""
        size: Any = tensor.fake.shape[dim]
        static = _known_int(size)
        if static is not None:
            return self.tx.literal(static)
        node = None if (ragged := is_ragged_size(size)) else self.symbols.get(size.node.expr)
        if node is None:
            node = self.node(
                "call_function", torch.ops.aten.sym_size.int, (tensor.node, dim), {}, size
            )
        if ragged:
            return RaggedSize(tensor, dim, node, size)
        entry = self.input_at.get(node)
        return SymValue(node, size, entry.source if entry else None)

    def submodule(self, module: GraphModule) -> Node:
        """Add a node that is a graph of its own."""
        name = f"branch_{len(self.root._modules)}"
        self.root.add_module(name, module)
        return self.node("get_attr", name, (), {}, None)

    def value_of(self, tensor: torch.Tensor) -> TensorValue | None:
        """Return the value of a fake tensor."""
        return self._by_fake.get(id(tensor))

    def tensors(self) -> Iterable[TensorValue]:
        """Return the tensors of the graph."""
        return self._by_fake.values()

    def writes(self) -> int:
        """Count the writes in place to inputs so far."""
        return sum(version_of(entry.node_example) - entry.version for entry in self.inputs)

    def input_memory(self) -> set[object]:
        """Return the memory of the inputs."""
        return {memory_of(entry.node_example) for entry in self.inputs}

    # ---- the finished graph

    def finish(self, outputs: list[Node]) -> tuple[GraphModule, list[GraphInput]]:
        """Close the graph; inputs that nothing uses are dropped, but for symbolic sizes."""
        self.graph.output(tuple(outputs))
        used = []
        for entry in self.inputs:
            if entry.node.users or isinstance(entry.node_example, torch.SymInt):
                used.append(entry)
            else:
                self.graph.erase_node(entry.node)
            if entry.layout is not None:  # a backend traces the graph from the start
                entry.node.meta["example_value"] = fake.fresh_fake(entry.node_example, entry.layout)
        return GraphModule(self.root, self.graph), used


@functools.cache
def _quiet_fake_errors() -> None:
    """Keep torch from logging an operation's error, which becomes a break."""
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(
        lambda record: record.levelno < logging.ERROR
    )


def _known_int(number: Any) -> Any:
    """Return the int that a number is, or that a symbolic one turned out to be; else None."""
    if isinstance(number, torch.SymInt):
        return number.node.maybe_as_int()
    return number if type(number) is int else None


def _is_plain(result: Any) -> bool:
    """Say whether a result holds neither tensors nor symbolic numbers nor unknown objects."""
    if isinstance(result, tuple | list):
        return all(_is_plain(item) for item in result)
    return is_constant_object(result)
