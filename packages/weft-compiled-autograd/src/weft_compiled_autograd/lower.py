"""From a tape to a graph that a compiler can take: run the tape once on fake tensors.

Engine ops leave behind the aten ops they are made of. The user's Python (hooks, autograd.Functions)
is not run: it becomes a call in the graph, with a result assumed to look like what it replaces.
Without such calls the graph is pure, and its caller assigns new gradients; with them, `set_grad`
calls stand in the graph, in order, since a hook may look at `.grad`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from weft_core.fake import fake_mode, make_shape_env, new_symint, to_fake

from weft_compiled_autograd import accumulation, hooks, report, saved_tensor_hooks
from weft_compiled_autograd.aot import BackwardInliner
from weft_compiled_autograd.errors import NotCapturable
from weft_compiled_autograd.interpret import TapeStep, needed_after
from weft_compiled_autograd.ownership import copy_shared_gradients
from weft_compiled_autograd.tape import ORIGIN, PLACEHOLDERS, EngineOp, Tape
from weft_compiled_autograd.trace import Trace, Unknown

Maybe = torch.Tensor | None


@dataclass
class Lowered:
    """A traced backward.

    Args:
        module: called with inputs, sizes, scalars, hooks, packed_data; returns the gradients that
            the engine asked for, then the new gradients of `assigned`.
        results: how many gradients the engine asked for.
        assigned: indices into `inputs` of the variables whose first gradient is an output.
        fakes: the fake inputs, None where it is sparse, and `symbols` the values of the dynamic
            sizes.
        mode: the fake mode of all `meta["val"]`.
    """

    module: GraphModule
    results: int
    assigned: list[int]
    fakes: list[Maybe]
    symbols: list[Any]
    mode: Any


class TapeLowering:
    """Runs one tape on fake tensors. Use `lower`."""

    def __init__(self, tape: Tape, contexts: dict[int, Any], shape_env: Any) -> None:
        self.tape = tape
        self.contexts = contexts
        self.mode = fake_mode(shape_env)
        self.trace = Trace(self.mode)
        self.values: dict[Node, Any] = {}
        self.assigned: dict[int, torch.Tensor] = {}
        self.inliner = BackwardInliner(self.trace)

    def twin(self, like: Maybe, node: Node) -> Maybe:
        """A new fake tensor as a hook on `like` returns it, with `node` standing for it."""
        if like is None:
            return None
        return self.fresh((like.shape, like.stride()), like.dtype, like.device, node)

    def fresh(self, layout: Any, dtype: Any, device: Any, node: Node) -> torch.Tensor:
        """A new fake tensor that no op of the graph made: `node` does."""
        with torch.utils._python_dispatch._disable_current_modes(), self.mode:
            value = torch.empty_strided(*layout, dtype=dtype, device=device)
        self.trace.bind(node, value)
        return value

    # -- running the tape --------------------------------------------------------------------------

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Sequence[int],
        dynamic: Sequence[Any],
        symbolic: Container[int],
    ) -> Lowered:
        """Trace; `dynamic` lists for each input its symbolic dimensions, `symbolic` the sizes."""
        graph = self.trace.graph
        places = {name: graph.placeholder(name) for name in PLACEHOLDERS}
        env = self.mode.shape_env
        # requires_grad is kept: some backward functions decide by it what to compute.
        fakes = [
            to_fake(self.mode, tensor, dims, f"inputs[{index}]")
            if tensor.layout is torch.strided
            else None
            for index, (tensor, dims) in enumerate(zip(inputs, dynamic, strict=True))
        ]
        symbols: list[Any] = [
            new_symint(env, size, f"sizes[{index}]") if env and index in symbolic else size
            for index, size in enumerate(sizes)
        ]
        found: dict[str, list[Any]] = {"inputs": list(fakes), "sizes": symbols}
        for name, values in found.items():
            for index, value in enumerate(values):
                if value is None:
                    values[index] = Unknown(self.trace.item(places[name], index))
                elif not isinstance(value, int):
                    self.trace.bind(self.trace.item(places[name], index), value)
        outputs: Any = ()
        with torch.no_grad(), self.mode, self.trace:
            for node in self.tape.graph.nodes:
                if node.op == "placeholder":
                    self.values[node] = found.get(node.target, places[node.target])
                elif node.op == "output":
                    outputs = self.resolve(node.args[0])
                else:
                    self.values[node] = self._step(node)
        return self._finish(fakes, symbols, list(outputs))

    def resolve(self, arguments: Any) -> Any:
        """Replace tape nodes by their values."""
        return map_arg(arguments, self.values.__getitem__)

    def _step(self, node: Node) -> Any:
        self.trace.origin = node.meta.get(ORIGIN)
        handler: Callable[..., Any] = _HANDLERS.get(node.target, _inline)
        if any(isinstance(self.values[used], Unknown) for used in node.all_input_nodes):
            handler = _getitem if handler is _getitem else _as_it_is
        elif isinstance(node.target, EngineOp):
            handler = _engine_op
        return handler(self, node, *self.resolve(node.args))

    def _finish(self, fakes: list[Any], symbols: list[Any], outputs: list[Any]) -> Lowered:
        nodes = self.trace.node_of([*outputs, *self.assigned.values()])
        graph = self.trace.graph
        graph.output(tuple(nodes))
        copy_shared_gradients(graph, nodes[len(outputs) :], self.mode)
        graph.eliminate_dead_code(_is_impure)
        module = GraphModule(torch.nn.Module(), graph, "CompiledAutograd")
        return Lowered(module, len(outputs), list(self.assigned), fakes, symbols, self.mode)

    # -- gradients ---------------------------------------------------------------------------------

    def first_gradient(self, node: Node, variable: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Give a new gradient the variable's layout and hand it over."""
        strides = accumulation.gradient_strides(variable, new)
        if strides is not None:
            fitted = torch.empty_strided(new.shape, strides, dtype=new.dtype, device=new.device)
            new = fitted.copy_(new)
        if self.tape.effects:
            self.trace.call(accumulation.set_grad, (variable, new))
        else:
            self.assigned[_input_index(node.args[0])] = new
        return new


def _input_index(node: Any) -> int:
    """The index of the input that a tape node takes out of `inputs`."""
    if node.target is not operator.getitem or node.args[0].target != "inputs":
        raise NotCapturable("the gradient of a tensor that is no input of the backward")
    return int(node.args[1])


def _is_impure(node: Node) -> bool:
    return node.is_impure() or node.op == "placeholder" or is_effect(node)


# -- one handler per kind of tape call: (lowering, node, *values) -> value -------------------------


def _inline(low: TapeLowering, node: Node, *args: Any) -> Any:
    """Run Python code of this package, or an aten factory, under the trace."""
    return node.target(*args, **low.resolve(node.kwargs))  # type: ignore[operator]


def _as_it_is(low: TapeLowering, node: Node, *args: Any) -> Unknown:
    """Leave a step of the tape as it is: a call in the graph."""
    needed = tuple(low.values[used] for used in node.all_input_nodes)
    return Unknown(low.trace.call(TapeStep(node), needed))


def _getitem(low: TapeLowering, node: Node, container: Any, index: int) -> Any:
    if isinstance(container, Unknown):
        return Unknown(low.trace.item(container.node, index))
    return low.trace.item(container, index) if isinstance(container, Node) else container[index]


def _engine_op(low: TapeLowering, node: Node, grads: list[Maybe], *args: Any) -> Any:
    op = node.target
    assert isinstance(op, EngineOp)
    if op.traceable:
        try:
            return op(grads, *args)
        except Exception as problem:
            report.report_once(f"{op}: {report.first_line(problem)}", report.IN_PART)
    return _as_it_is(low, node)


def _accumulate_grad(
    low: TapeLowering, node: Node, variable: torch.Tensor, old: Maybe, new: Maybe, post_hooks: bool
) -> Maybe:
    if new is None:
        return old
    if old is None:
        return low.first_gradient(node, variable, new)
    return old.add_(new)


def _call_hook(low: TapeLowering, node: Node, hook: Node, *values: Any) -> Any:
    hook_type = node.kwargs["hook_type"]
    if hook_type == "unpack_hook":
        return _unpack(low, node, hook, *values)
    if hook_type != "post_acc_grad_hook":
        values = tuple(map(_dense, values))
    result = low.trace.call(hooks.call_hook, (hook, *values), hook_type=hook_type)
    if hook_type == "post_acc_grad_hook":
        return None
    if hook_type == "tensor_pre_hook":
        return low.twin(values[0], result)
    return tuple(low.twin(old, low.trace.item(result, i)) for i, old in enumerate(values[0]))


def _unpack(low: TapeLowering, node: Node, hook: Node, data: Node) -> torch.Tensor:
    size, strides, dtype, device, requires_grad = low.tape.unpacked[node]
    result = low.trace.call(hooks.call_hook, (hook, data), hook_type="unpack_hook")
    fitted = low.trace.call(
        saved_tensor_hooks.restore_layout, (result, size, strides, dtype, device)
    )
    with torch.utils._python_dispatch._disable_current_modes():
        return low.fresh((size, strides), dtype, device, fitted).requires_grad_(requires_grad)


def _dense(value: Any) -> Any:
    """Copy gradients that are expanded views: what replaces them could not have their strides."""
    if isinstance(value, tuple):
        return tuple(map(_dense, value))
    if value is None or accumulation.dense_strides(value) is not None:
        return value
    return value.clone(memory_format=torch.contiguous_format)


def _call_cpp_hook(low: TapeLowering, node: Node, hook: int, grad: Maybe) -> Maybe:
    grad = _dense(grad)
    return low.twin(grad, low.trace.call(hooks.call_cpp_hook, (hook, grad)))


def _call_backward(
    low: TapeLowering, node: Node, context: Any, saved: Any, metadata: Any, symints: Any, grads: Any
) -> Any:
    # What was None while recording is passed as None; what turned out to be None is not known to
    # be wanted as zeros or as None.
    recorded: Any = node.args[4]
    if any(grad is None and was is not None for grad, was in zip(grads, recorded, strict=True)):
        raise NotCapturable("an undefined gradient reaches an autograd.Function", replayable=False)
    real = low.contexts.get(node.meta["hook_index"])
    inlined = low.inliner.inline(real, saved, symints, grads)
    if inlined is not None:
        return inlined
    rest = tuple(low.values[used] for used in needed_after(low.tape, node))
    position = list(low.tape.graph.nodes).index(node)
    args = (context, saved, metadata, symints, grads, position, rest)
    result = low.trace.call(hooks.call_backward_dense, args)
    out: list[Maybe] = []
    for position, meta in enumerate(metadata):
        if meta is None:
            out.append(None)
            continue
        _, device, dtype, size = meta
        strides = make_contiguous_strides_for(tuple(size))
        item = low.trace.item(result, position)
        out.append(low.fresh((tuple(size), strides), dtype, device, item))
    return out


USER_CODE: frozenset[Any] = frozenset({hooks.call_hook, hooks.call_backward_dense})

EFFECTS: frozenset[Any] = USER_CODE | {
    hooks.call_cpp_hook,
    saved_tensor_hooks.restore_layout,
    accumulation.set_grad,
    accumulation.set_grad_copy,
}


def is_effect(node: Node) -> bool:
    """Whether a node of a captured graph is a call of Python, and no op."""
    return node.target in EFFECTS or isinstance(node.target, TapeStep)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    operator.getitem: _getitem,
    accumulation.accumulate_grad: _accumulate_grad,
    hooks.call_hook: _call_hook,
    hooks.call_cpp_hook: _call_cpp_hook,
    hooks.call_backward: _call_backward,
}


def lower(
    tape: Tape,
    contexts: dict[int, Any],
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    dynamic: Sequence[Sequence[int]],
    symbolic: Collection[int],
) -> Lowered:
    """Trace a tape for given inputs.

    Args:
        tape: what the engine recorded.
        contexts: the autograd.Function contexts by hook index.
        inputs: the real inputs; only their layout is read.
        sizes: the values of the dynamic sizes.
        dynamic: for each input the dimensions to keep symbolic.
        symbolic: which of the sizes to keep symbolic.

    Raises:
        NotCapturable: when something on the tape has no graph form.
    """
    env = make_shape_env() if symbolic or any(dynamic) else None
    try:
        return TapeLowering(tape, contexts, env).run(inputs, sizes, dynamic, symbolic)
    except NotCapturable:
        raise
    except Exception as problem:  # what torch's fake tensors cannot do
        raise NotCapturable(f"tracing failed: {report.first_line(problem)}") from problem
