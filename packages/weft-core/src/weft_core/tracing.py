"""Trace a program over fake tensors into a functional aten graph; read `AtenTracer` first.

Two things cooperate. C++ functionalisation (`torch._to_functional_tensor`) wraps the inputs above
autograd and turns every mutation into a pure op. Below it one small dispatch mode, `AtenRecorder`,
sees only pure core ops: it applies decompositions and writes an fx node for each.
Autograd may run inside a trace, which is how a joint forward and backward graph is made.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from weft_core._layouts import restride_as, tensors_of, unshare, unusual_results
from weft_core.adapters import AdapterMode
from weft_core.collectives import REGATHER
from weft_core.errors import Unsupported
from weft_core.launches import launches_recorded
from weft_core.node_effects import drop_dead_nodes
from weft_core.reshaping import RESHAPE_ITSELF, take_reshaped
from weft_core.symnodes import SymbolTable, SymValue
from weft_core.transform_levels import preserve_transform_levels
from weft_core.warnings_capture import suppress_warnings

aten = torch.ops.aten
Decompositions = Mapping[Any, Callable[..., Any]]

# Ops that return their argument's value unchanged; in a functional graph they are no node at all.
_TRANSPARENT = {
    aten.detach.default,
    aten.alias.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}
IN_FORWARD = "in_forward"
"""Mark of a node that the forward computes, although only gradients depend on it."""
ASSERT = aten._assert_scalar.default
"""The check of a condition on numbers that are known when the graph runs; has no result."""
_SETTLED = (
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
    aten._assert_tensor_metadata.default,
)  # checks whose outcome tracing itself knows
_SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_SPREADS = re.compile(r"(Max|Min|Median|Nanmedian)Backward\d").match
_COMPOSITE = "CompositeImplicitAutograd"


class AtenRecorder(TorchDispatchMode):
    """Dispatch mode that writes the core ops it sees into `graph`.

    A tensor's node is found by the tensor's identity: each node keeps the fake tensor it stands
    for in ``meta["val"]``, so the id cannot be reused while the trace lives.

    Args:
        decompositions: op overload -> Python function of the same arguments, applied recursively.
        fake_mode: mode of the tensors that are traced; real tensors met become constants.

    `tie(zeros, node)` gives what stands for zeros that an autograd node makes of nothing.
    """

    def __init__(self, decompositions: Decompositions, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.literals: set[str] = set()
        self.symbols = SymbolTable(self.graph)
        self._decompositions = decompositions
        self._fake_mode = fake_mode
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []
        self._handlers: dict[Any, Callable[..., Any]] = {}
        self._zeros: set[int] = set()
        self.tie: Callable[[torch.Tensor, Any], torch.Tensor] = lambda zeros, node: zeros
        self._sources: list[tuple[int, fx.Node]] = []
        self._source: fx.Node | None = None
        self._end = 0  # of the forward, as a number of autograd's sequence
        self._differentiated: fx.Node | None = None
        self._last_input: fx.Node | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler on the first dispatch

    @classmethod
    def is_infra_mode(cls) -> bool:
        """This mode is machinery: user code should not notice it."""
        return True

    # -- where nodes come from ---------------------------------------------------------------

    def enter_source(self, node: fx.Node | None) -> None:
        """Say that what is recorded from now on implements `node` of the traced module."""
        self._source = node
        self._end = torch._C._autograd._get_sequence_nr()
        if node is not None:
            self._sources.append((self._end, node))

    def _provenance(self) -> tuple[fx.Node | None, bool]:
        running = torch._C._current_autograd_node()
        if running is None:
            return self._source, False
        # Sequence numbers grow with the forward; the last source begun before it made this node.
        number = running._sequence_nr()
        place = bisect.bisect_right(self._sources, number, key=lambda entry: entry[0]) - 1
        if self._source is None and number >= self._end:  # a backward that differentiates itself
            return self._differentiated, True
        self._differentiated = self._sources[place][1] if place >= 0 else None
        return self._differentiated, True

    def _new_node(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(func, args, kwargs)
        source, in_backward = self._provenance()
        if source is not None:
            node.meta["from_node"] = source.name
            kept = ("stack_trace", "recompute", IN_FORWARD, REGATHER)
            node.meta.update({name: source.meta[name] for name in kept if name in source.meta})
        if in_backward:
            node.meta["in_backward"] = True
        return node

    # -- values and nodes --------------------------------------------------------------------

    def placeholder(self, name: str, value: Any) -> fx.Node:
        """Add an input, after the inputs so far, for `value` (fake tensor, SymInt or int)."""
        with self.graph.inserting_after(self._last_input):  # None: before everything
            self._last_input = node = self.graph.placeholder(name)
        self.bind(node, value)
        return node

    def bind(self, node: fx.Node, value: Any) -> None:
        """Record that `node` yields `value`; elements of a sequence get `getitem` nodes."""
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            if self._fake_mode.shape_env is not None:
                self.symbols.bind_sizes(value, node)
        elif isinstance(value, SymValue):
            self.symbols.bind(value, node)
        elif isinstance(value, (tuple, list)):
            for i, element in enumerate(value):
                if isinstance(element, (torch.Tensor, SymValue, tuple, list)):
                    item = self._new_node(operator.getitem, (node, i), {})
                    self.bind(item, element)

    def keep(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the call of `func` that gave `result`."""
        self.bind(self._new_node(func, self.node_of(args), self.node_of(kwargs)), result)

    def alias(self, value: torch.Tensor, original: torch.Tensor) -> None:
        """Let `value` mean the node of `original` from now on."""
        self._nodes[id(value)] = self.node_of(original)
        self._alive.append(value)

    def node_of(self, value: Any) -> Any:
        """The graph's argument for `value`: nodes in place of tensors and symbolic numbers."""
        if isinstance(value, torch.Tensor):
            node = self._nodes.get(id(value))
            return node if node is not None else self._constant(value)
        if isinstance(value, (list, tuple)):
            items = [self.node_of(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {name: self.node_of(item) for name, item in value.items()}
        if isinstance(value, SymValue):
            return self.symbols.node_of(value)
        return value

    def _constant(self, value: torch.Tensor) -> fx.Node:
        if isinstance(value, FakeTensor):
            raise RuntimeError(f"a fake tensor from outside the trace reached it: {value}")
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.get_attr(name)
        node.meta["val"] = fake = self._fake_mode.from_tensor(value)
        self._nodes[id(value)] = self._nodes[id(fake)] = node
        return node

    # -- dispatch ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._choose_handler(func)
        out = handler(func, args, kwargs or {})
        if self._zeros and args and id(args[0]) in self._zeros and func.is_view:
            self._zeros.update(map(id, out if isinstance(out, tuple | list) else (out,)))
        return out

    def _choose_handler(self, func: Any) -> Callable[..., Any]:
        if not isinstance(func, OpOverload) or func.namespace == "prim":
            return lambda func, args, kwargs: func(*args, **kwargs)
        if func is aten._efficientzerotensor.default:
            return self._record_zeros
        if special := self._special_handler(func):
            return special
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            return self._decompose_composite
        return self._record

    def _special_handler(self, func: OpOverload) -> Callable[..., Any] | None:
        """What records an op of which more is to be said than its call."""
        if func is ASSERT:
            return self._record_check
        if func is aten.unfold_backward.default:
            return self._record_windows
        if func is aten._conj.default:
            return self._record_conjugate
        if func in _SCALINGS:
            return self._record_product
        if func in self._decompositions:
            return self._decompose
        if func in _TRANSPARENT:
            return self._pass_through
        if func is aten.bernoulli.p:
            return self._record_bernoulli
        if func is aten.size.default:
            return _concrete_sizes
        return self._record_in_place if _writes_itself(func) else None

    def _decompose(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_of(args, kwargs)
        known = unusual_results(func, args, kwargs, tensors)
        with self:
            out = restride_as(self._decompositions[func](*args, **kwargs), known)
            out = unshare(func, out, tensors)
        return self._record(func, args, kwargs) if out is NotImplemented else out

    def _decompose_composite(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return func.decompose(*args, **kwargs)

    def _pass_through(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.alias(out, args[0])
        if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            self.literals.add(str(self.node_of(out).target))  # torch.tensor(...) in the program
        return out

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        leaves = out if isinstance(out, (tuple, list)) else (out,)
        kinds = (torch.Tensor, SymValue, tuple, list)
        acts = func._schema.is_mutable or not (func._schema.returns or func in _SETTLED)
        if any(isinstance(leaf, kinds) for leaf in leaves) or acts:
            self.keep(func, args, kwargs, out)
        return out

    def _record_bernoulli(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Mostly a `bernoulli_`, which draws in the order of memory; the pure twin, in plain order.
        order, _ = compute_elementwise_output_logical_to_physical_perm(args[0])
        if order == sorted(order):
            return self._record(func, args, kwargs)
        with self:
            drawn = func(args[0].permute(order), *args[1:], **kwargs)
            return drawn.permute([order.index(dim) for dim in range(len(order))])

    def _record_windows(self, func: Any, args: Any, kwargs: Any) -> Any:
        running = torch._C._current_autograd_node()
        if running is None or not running.name().startswith("Unfold"):
            raise Unsupported(
                "windows-written",
                "the program writes through `unfold`, and functionalisation would clear the rest",
                "write through slices",
            )
        record = self._decompose if func in self._decompositions else self._record
        return record(func, args, kwargs)

    def _record_conjugate(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], torch.Tensor):
            return self._record(func, args, kwargs)
        with self:  # a number of the program, which autograd has as a tensor
            return torch.scalar_tensor(args[0].conjugate(), dtype=torch.complex128)

    def _record_zeros(self, _: Any, args: Any, kwargs: Any) -> Any:
        with self:
            zeros = torch.zeros(*args, **kwargs)  # which have memory
            out = self.tie(zeros, torch._C._current_autograd_node())
        self._zeros.add(id(out))
        return out

    def _record_product(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A product or quotient, where those of gradients are not what they look like.

        With torch's zero tensors, which `sgn` gives, they are zero. The gradient of `max()` is
        spread over its places by a mask, which leaves zeros beside them; traced, it is multiplied.
        """
        one, other = args
        if id(one) in self._zeros or (func is aten.mul.Tensor and id(other) in self._zeros):
            like = func(*args, **kwargs)
            kind = {"dtype": like.dtype, "device": like.device}
            return self._record_zeros(None, (like.shape,), kind)
        masks = getattr(one, "dtype", None) is torch.bool and one.device.type == "cpu"
        running = torch._C._current_autograd_node() if masks else None
        if running is not None and _SPREADS(running.name()):
            with self:
                return torch.where(one, other, 0)
        record = self._decompose if func in self._decompositions else self._record
        return record(func, args, kwargs)

    def _record_check(self, func: Any, args: Any, kwargs: Any) -> Any:
        condition, text = args
        if isinstance(condition, SymValue):
            # As it was made: what holds by now may do so because something relied on this check.
            node = self.symbols.build(condition.node._expr)
            self._new_node(func, (node, text), kwargs).meta["val"] = None
        return func(*args, **kwargs)

    def _record_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Only a decomposition that writes a tensor without views gets here (functionalisation is
        # above this mode). Record the pure twin, and let the tensor mean the new node.
        pure = getattr(getattr(aten, _base_name(func)[:-1], None), func._overloadname, None)
        if pure is None:
            raise NotImplementedError(f"a decomposition uses {func}, which has no pure variant")
        out = func(*args, **kwargs)
        self.keep(pure, args, kwargs, out)
        return out


def _writes_itself(func: OpOverload) -> bool:
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
    return func._schema.is_mutable and _base_name(func).endswith("_") and not composite


def _base_name(func: OpOverload) -> str:
    return func._schema.name.split("::")[1]


def _concrete_sizes(func: Any, args: Any, kwargs: Any) -> list[int]:
    """Sizes for a C++ function that cannot take symbols: they are specialised, with a guard."""
    return [int(size) for size in args[0].shape]


class AtenTracer:
    """One trace: wrap the inputs, run the program inside `active`, then call `finish`.

    ::

        tracer = AtenTracer(mode, decompositions)
        with tracer.active():
            x = tracer.input(fake_x)
            y = tracer.value(program(x))        # a pure fake tensor, with its node recorded
        graph_module = tracer.finish([y])

    Args:
        fake_mode: the mode of all fake inputs.
        decompositions: op overload -> Python function.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, decompositions: Decompositions | None = None
    ) -> None:
        self.recorder = AtenRecorder(decompositions or {}, fake_mode)
        self.input_count = 0
        self._fake_mode = fake_mode
        fake_mode.epoch += 1  # an earlier trace's symbols for numbers out of tensors are not ours

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Record everything torch runs inside; grad mode and autocast come out as they were."""
        cache = torch.is_autocast_cache_enabled()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.callback(torch.set_autocast_cache_enabled, cache)
            stack.enter_context(preserve_transform_levels())
            # A cast cached by weight would outlive the trace; CSE finds repeated casts anyway.
            torch.set_autocast_cache_enabled(False)
            stack.enter_context(self._fake_mode)
            stack.enter_context(self.recorder)
            stack.enter_context(AdapterMode())
            stack.enter_context(launches_recorded())
            torch._enable_functionalization(reapply_views=True)
            stack.callback(torch._disable_functionalization)
            stack.enter_context(suppress_warnings())
            yield

    def input(self, value: Any, name: str | None = None) -> Any:
        """Add a placeholder for `value` and return what the program should see in its place."""
        self.input_count += 1
        self.recorder.placeholder(name or f"arg{self.input_count - 1}_1", value)
        return self.wrap(value)

    def wrap(self, value: Any) -> Any:
        """The program's view of a traced or constant value; a leaf where `value` needs grad."""
        if not isinstance(value, torch.Tensor) or torch._is_functional_tensor(value):
            return value
        wrapped = self.functional(value)
        return wrapped.requires_grad_() if value.requires_grad else wrapped

    def functional(self, value: torch.Tensor) -> torch.Tensor:
        """A functional tensor over a fake one, without its history."""
        return torch._to_functional_tensor(value)

    def value(self, result: Any) -> Any:
        """The pure fake tensor behind a program's result, mutations included; others unchanged."""
        if isinstance(result, torch.Tensor) and torch._is_functional_tensor(result):
            torch._sync(result)  # type: ignore[attr-defined, no-untyped-call]
            return torch._from_functional_tensor(result)
        return result

    def interpret(self, gm: fx.GraphModule, args: Sequence[Any]) -> Any:
        """Run `gm` node by node on program values, keeping the origin of each recorded op."""
        env: dict[fx.Node, Any] = {}
        inputs = iter(args)
        for node in gm.graph.nodes:
            self.recorder.enter_source(node)
            if node.op == "placeholder":
                env[node] = next(inputs)
                continue
            node_args, node_kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            if node.op == "output":
                self.recorder.enter_source(None)
                return node_args[0]
            if node.target in RESHAPE_ITSELF and all(node_args[0] is not one for one in args):
                env[node] = take_reshaped(env, node, node_args, node_kwargs)
            else:
                env[node] = self._run(gm, node, node_args, node_kwargs)
        raise ValueError("the graph module has no output node")

    def _run(self, gm: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_function":
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            floats = any(isinstance(value, torch.SymFloat) for value in (result, *args))
            if floats and isinstance(result, SymValue):  # its expression may round otherwise
                self.recorder.keep(node.target, args, kwargs, result)
            return result
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]
        found = operator.attrgetter(str(node.target))(gm)
        return self.wrap(found) if node.op == "get_attr" else found(*args, **kwargs)

    def finish(self, outputs: Sequence[Any]) -> fx.GraphModule:
        """Close the graph with `outputs` (pure fake tensors, symbolic numbers, constants, None)."""
        graph = self.recorder.graph
        graph.output(tuple(map(self.recorder.node_of, outputs)))
        drop_dead_nodes(graph)
        # Lazy: most graphs are compiled by somebody else and never run as Python.
        return _LazyGraphModule(self.recorder.constants, graph)


def trace_aten(
    fn: Callable[..., Any],
    fake_args: Sequence[Any],
    *,
    decompositions: Decompositions | None = None,
) -> fx.GraphModule:
    """Trace `fn` on fake arguments into a graph of core aten overloads.

    Args:
        fn: a function or an fx.GraphModule of positional arguments.
        fake_args: fake tensors of one mode, SymInts or plain values; placeholders in this order.
        decompositions: op overload -> Python function; applied recursively.

    Returns:
        A module whose nodes have ``meta["val"]`` and, where known, ``stack_trace`` and
        ``from_node``; its output is the flat tuple of the program's results. Mutated inputs are
        written back by trailing `copy_` nodes.
    """
    mode = next(arg.fake_mode for arg in fake_args if isinstance(arg, FakeTensor))
    tracer = AtenTracer(mode, decompositions)
    with tracer.active():
        inputs = [tracer.input(arg) for arg in fake_args]
        if isinstance(fn, fx.GraphModule):
            results = tracer.interpret(fn, inputs)
        else:
            results = fn(*inputs)
        outputs = [tracer.value(leaf) for leaf in pytree.tree_leaves(results, lambda x: x is None)]
        finals = [tracer.value(value) for value in inputs]
    pairs = zip(fake_args, finals, strict=True)
    write_back(tracer.recorder, [(old, new) for old, new in pairs if old is not new])
    return tracer.finish(outputs)


def write_back(recorder: AtenRecorder, changed: Sequence[tuple[Any, Any]]) -> None:
    """Record ``input.copy_(final value)`` for each (input, final value) pair."""
    for old, new in changed:
        destination = recorder.node_of(old)
        node = recorder.graph.call_function(
            aten.copy_.default, (destination, recorder.node_of(new))
        )
        node.meta["val"] = old
