"""Gradients as Python sees them: `tensor.grad` read and written, `grad_fn`, leaf or not, hooks.

A gradient that is read is an input of the graph; generated code sets a written one after the graph
(`backward` handles `backward()`).
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from weft_guards.sources import AttrSource, Source

from weft_capture.breaks import Break
from weft_capture.effects.rehearsals import check_backward, rehearsal
from weft_capture.functions.table import rule
from weft_capture.model.constant import FALSE, NONE, TRUE, constant
from weft_capture.model.containers import TupleValue
from weft_capture.model.functions import FunctionValue
from weft_capture.model.protocol import Kwargs, MutableValue, Output, Tracer, Value, method
from weft_capture.tensors.inputs import GraphInput, check_views
from weft_capture.tensors.tensor import TensorValue


def _is_leaf(tx: Tracer, tensor: TensorValue) -> bool:
    """Say whether a tensor is a leaf; no tensor guard tells for those that require grad."""
    if tensor.source is not None and tensor.fake.requires_grad:
        tx.guard(AttrSource(tensor.source, "is_leaf"), "CONST", tensor.fake.is_leaf)
    return tensor.fake.is_leaf


method(TensorValue, "get:is_leaf")(lambda tx, self: constant(_is_leaf(tx, self)))


@method(TensorValue, "get:grad_fn")
def _grad_fn(tx: Tracer, self: TensorValue) -> Value:
    if _is_leaf(tx, self):
        return NONE
    raise Break("autograd-state", "the grad_fn of a tensor")


@method(TensorValue, "get:grad")
def _grad(tx: Tracer, self: TensorValue) -> Value:
    if not _is_leaf(tx, self):
        raise Break("autograd-state", ".grad of a non-leaf tensor")
    if self.source is None or self.real is None:
        return NONE
    return tx.wrap(self.real.grad, AttrSource(self.source, "grad"))


@method(TensorValue, "set:grad")
def _set_grad(tx: Tracer, self: TensorValue, value: Value) -> None:
    """Check the gradient as torch does, on fakes; generated code sets it after the graph."""
    try:
        self.fake.grad = value.example()
    except (RuntimeError, TypeError) as error:
        raise Break("operator-error", f"setting .grad: {str(error)[:200]}") from None
    finally:
        self.fake.grad = None
    self.store(tx, "grad", value)


@method(TensorValue, "requires_grad_", "set:requires_grad")
def _requires_grad(tx: Tracer, self: TensorValue, requires_grad: Value = TRUE) -> Value:
    flag = requires_grad.nb_bool(tx)
    if flag is self.fake.requires_grad:
        return self
    if self.source is not None:
        _change_leaf(tx, self, flag)
        return self
    tx.graph.step_of_node[self.node] = tx.steps.now  # as a leaf
    return tx.graph.emit("call_method", "requires_grad_", [self, constant(flag)], {})


def _change_leaf(tx: Tracer, leaf: TensorValue, flag: bool) -> None:
    """Change `requires_grad` of an input leaf.

    The graph gets it as a leaf that requires grad if it ever did. Operations before that, or after
    it no longer does, use a detached alias. The real leaf is changed before or after the graph.
    """
    entry = tx.graph.input_at.get(leaf.node)
    plain = type(leaf) is TensorValue and leaf.owner is None
    plain &= not (tx.transforms or tx.overrides.modes)
    if entry is None or not plain or leaf.fake.is_inference() or not _is_leaf(tx, leaf):
        raise Break("autograd-state", "changing requires_grad of an existing tensor")
    tx.process_bound = "requires_grad that the program changes"
    if leaf.node.users and not flag:
        tx.graph.replace(leaf, tx.graph.emit("call_method", "detach", [leaf], {}))
        leaf.store(tx, "requires_grad", FALSE)
        return
    tx.calls.add(torch.Tensor.requires_grad_, leaf, constant(flag), early=True)
    if leaf.node.users:
        tx.graph.detach_users(leaf)
    try:
        leaf.fake.requires_grad_(flag)
    except RuntimeError as error:
        raise Break("operator-error", str(error)[:200]) from None
    tx.journal.on_rollback(lambda: leaf.fake.requires_grad_(not flag))
    tx.journal.on_rollback(functools.partial(setattr, entry, "requires_grad", entry.requires_grad))
    entry.requires_grad = flag
    check_views(tx.graph.inputs)


@rule(torch.nn.Parameter)
def _parameter(tx: Tracer, data: Value = NONE, requires_grad: Value = TRUE) -> Value:
    """Create a leaf in the graph; one that leaves the graph is created eagerly instead."""
    data = tx.builtin(torch.empty, constant(0)) if data is NONE else data
    if type(data) is not TensorValue or tx.transforms:
        raise Break("autograd-state", "torch.nn.Parameter")
    parameter = data.call_method(tx, "detach", [], {})
    assert isinstance(parameter, TensorValue)
    parameter.cls = torch.nn.Parameter
    tx.graph.step_of_node[parameter.node] = tx.steps.now
    return parameter.call_method(tx, "requires_grad_", [requires_grad], {})


@method(TensorValue, "detach_")
def _detach(tx: Tracer, self: TensorValue) -> Value:
    if not self.fake.requires_grad:
        return self
    if self.source is not None:
        raise Break("autograd-state", "detach_ of an input tensor")
    return tx.graph.emit("call_method", "detach_", [self], {})


@method(TensorValue, "retain_grad")
def _retain_grad(tx: Tracer, self: TensorValue) -> Value:
    if _is_leaf(tx, self) and self.fake.requires_grad:
        return NONE
    raise Break("autograd-state", "Tensor.retain_grad")


@rule(torch.autograd.grad)
def _gradients(
    tx: Tracer, outputs: Value, inputs: Value, grad_outputs: Value = NONE,
    retain_graph: Value = NONE, create_graph: Value = FALSE, only_inputs: Value = TRUE,
    allow_unused: Value = NONE, is_grads_batched: Value = FALSE, materialize_grads: Value = FALSE,
) -> Value:  # fmt: skip
    """Add one node, which later stages differentiate by autograd, as on the fakes.

    The history is retained, since results of the graph may need it.
    """
    if FALSE is create_graph is is_grads_batched and not tx.transforms:
        check_backward(tx, "torch.autograd.grad")
    if tx.transforms:
        raise Break("function-transform", "torch.autograd.grad under vmap")
    if only_inputs is not TRUE:
        raise Break("warns", "torch.autograd.grad with only_inputs")
    lists: list[Value] = [
        value
        if value is NONE or isinstance(value, TensorValue)
        else TupleValue(list(map(tx.force, value.unpack(tx))))
        for value in (outputs, inputs, grad_outputs)
    ]
    for entry in tx.graph.inputs:  # all of them are inputs now
        _check_graph_leaf(tx, entry)
    if any(t.source is not None and t.hooked_at >= 0 for t in tx.graph.tensors()):
        raise Break("inner-backward", "torch.autograd.grad beside a hook of an input")
    options = {"create_graph": create_graph, "retain_graph": TRUE}
    options |= {"allow_unused": allow_unused, "materialize_grads": materialize_grads}
    options["is_grads_batched"] = is_grads_batched
    with torch.autograd.set_multithreading_enabled(False):
        return tx.graph.emit("call_function", torch.autograd.grad, lists, options)


def _check_graph_leaf(tx: Tracer, entry: GraphInput) -> None:
    """Check that no history and no hooks from outside take part in the graph's backward."""
    fake, real = entry.node_example, entry.example
    if not isinstance(fake, torch.Tensor) or not fake.requires_grad:
        return
    assert isinstance(real, torch.Tensor)
    if not fake.is_leaf or real._backward_hooks is not None:
        raise Break("inner-backward", "torch.autograd.grad through the history of an input")
    tx.guard(AttrSource(entry.source, "is_leaf"), "CONST", True)
    tx.guard(AttrSource(entry.source, "_backward_hooks"), "NONE", None)


# ---- hooks


@dataclass(eq=False)
class HookHandle(MutableValue):
    """The handle of `register_hook` of a tensor of the graph; its removal is a break."""

    cls = RemovableHandle

    def reconstruct(self, out: Output) -> None:
        raise Break("autograd-state", "the handle of a tensor hook leaves the graph")


@method(TensorValue, "register_hook")
def _register_hook(tx: Tracer, self: TensorValue, hook: Value) -> Value:
    """Register the function itself in the graph, for a tensor that stays in it.

    Outside of the graph, only the engine knows the complete gradient.
    """
    hook = tx.force(hook)
    if tx.transforms or not self.fake.requires_grad:
        raise Break("autograd-state", "Tensor.register_hook in a function transform")
    if self.source is not None:
        return _hook_input(tx, torch.Tensor.register_hook, self, hook)
    function, contents = _hook_function(tx, hook)
    with rehearsal(tx, "a tensor hook", [self, *contents]):
        grad = self.call_method(tx, "clone", [], {})
        changed = hook.tp_call(tx, [grad], {})
        if changed is not NONE and not isinstance(changed, TensorValue):
            raise Break("autograd-state", "the result of a tensor hook")

    def register_hook(tensor: torch.Tensor, *contents: Any) -> Any:
        return tensor.register_hook(_with_cells(function, contents) if contents else function)

    handle = register_hook(self.fake, *(value.example() for value in contents))
    tx.journal.on_rollback(handle.remove)
    tx.journal.on_rollback(functools.partial(setattr, self, "hooked_at", self.hooked_at))
    self.hooked_at = tx.steps.now
    args = (self.node, *(value.graph_arg() for value in contents))
    tx.graph.node("call_function", register_hook, args, {}, None)
    return HookHandle()


def _hook_function(tx: Tracer, hook: Value) -> tuple[Any, list[Value]]:
    """Return a real function for a backward hook, and the contents of the cells that it lacks.

    The contents of a function of the frame are tensors and constants, arguments of the node.
    """
    if isinstance(hook, FunctionValue) and hook.obj is not None:
        return hook.obj, []
    if not isinstance(hook, FunctionValue) or hook.defaults or hook.kwdefaults:
        raise Break("autograd-state", "Tensor.register_hook of a function with defaults")
    contents = [tx.force(cell.contents or NONE) for cell in hook.cells]
    if not all(type(value) is TensorValue or value.is_constant() for value in contents):
        raise Break("autograd-state", "Tensor.register_hook of a function that closes over objects")
    empty = tuple(types.CellType() for _ in contents)
    return types.FunctionType(hook.code, hook.globals, hook.name, None, empty), contents


def _with_cells(function: Any, contents: tuple[Any, ...]) -> Any:
    cells = tuple(map(types.CellType, contents))
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells
    )


@method(TensorValue, "register_post_accumulate_grad_hook")
def _register_last_hook(tx: Tracer, self: TensorValue, hook: Value) -> Value:
    if self.source is None or not (self.fake.requires_grad and _is_leaf(tx, self)):
        raise Break("autograd-state", "a post-accumulate hook of a tensor that is no input leaf")
    return _hook_input(tx, torch.Tensor.register_post_accumulate_grad_hook, self, tx.force(hook))


@dataclass(eq=False)
class InputHook(Value):
    """The handle of a hook of a tensor from outside: the hook is registered by a deferred call."""

    cls = RemovableHandle

    source: Source | None

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        if name != "remove" or args or kwargs:
            return super().call_method(tx, name, args, kwargs)
        tx.calls.add(RemovableHandle.remove, self)
        return NONE


def _hook_input(tx: Tracer, register: Any, tensor: TensorValue, hook: Value) -> Value:
    """Register a hook for real, which the engine calls in backward passes after the graph."""
    tensor.hooked_at = tx.steps.now if tensor.hooked_at < 0 else tensor.hooked_at
    return InputHook(tx.calls.add(register, tensor, hook))
