"""Backward hooks of modules: torch's `BackwardHook`, around the inputs and outputs of a call.

The graph makes the same object, whose two autograd functions call the program's hooks while a later
stage, or the engine, differentiates. So hooks must only compute with the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils.hooks import BackwardHook
from weft_guards.sources import DictSource, ItemSource, ModuleSource

from weft_capture.breaks import Break
from weft_capture.effects.rehearsals import rehearsal
from weft_capture.functions.table import rule
from weft_capture.model.constant import NONE, TRUE, constant
from weft_capture.model.containers import SequenceValue, TupleValue
from weft_capture.model.functions import FunctionValue
from weft_capture.model.objects import ModuleValue
from weft_capture.model.protocol import MutableValue, Output, Tracer, Value, method
from weft_capture.tensors.tensor import TensorValue

_OF_ALL = torch.nn.modules.module._global_forward_hooks_always_called
_OF_ALL_SOURCE = ItemSource(
    DictSource(ModuleSource("torch.nn.modules.module")), "_global_forward_hooks_always_called"
)
_DETAIL = "a module's backward hooks"


@dataclass(eq=False)
class CallHooks(MutableValue):
    """The `BackwardHook` of a call of a module.

    Args:
        module, hooks, pre_hooks: as the real object gets them.
        real: the object that works on the fakes; `node` makes those that work for the graph.
        inputs: the tensors that entered the module.
    """

    cls = BackwardHook
    module: ModuleValue
    hooks: list[Value]
    pre_hooks: list[Value]
    real: BackwardHook
    node: Node
    inputs: list[Value] = field(default_factory=list)
    why: str = _DETAIL

    def graph_arg(self) -> Any:
        return self.node

    def example(self) -> Any:
        return self.real

    def reconstruct(self, out: Output) -> None:
        raise Break("autograd-state", self.why, out.tx.steps.restart_step_of(self))

    def rehearse(self, tx: Tracer, results: Sequence[Value]) -> None:
        """Call the hooks on copies of the tensors, in the place of gradients.

        Raises:
            Break: for hooks that do more than compute.
        """
        tensors = [v for v in (*self.inputs, *results) if isinstance(v, TensorValue)]
        with rehearsal(tx, _DETAIL, tensors):
            grads = _gradients(tx, results)
            for hook in self.pre_hooks:
                grads = _replaced(hook.tp_call(tx, [self.module, grads], {}), grads)
            made = _gradients(tx, self.inputs)
            for hook in self.hooks:
                made = _replaced(hook.tp_call(tx, [self.module, made, grads], {}), made)


def _gradients(tx: Tracer, tensors: Sequence[Value]) -> Value:
    return TupleValue(
        [
            tensor.call_method(tx, "clone", [], {})
            if isinstance(tensor, TensorValue) and tensor.fake.requires_grad
            else NONE
            for tensor in tensors
        ]
    )


def _replaced(result: Value, before: Value) -> Value:
    if result is NONE:
        return before
    if not isinstance(result, SequenceValue):
        raise Break("autograd-state", "the result of a module's backward hook")
    return result


@rule(BackwardHook)
def _make(tx: Tracer, module: Value, user_hooks: Value, user_pre_hooks: Value) -> Value:
    hooks, pre_hooks = (list(map(tx.force, v.unpack(tx))) for v in (user_hooks, user_pre_hooks))
    if not isinstance(module, ModuleValue) or module.source is None or tx.transforms:
        raise Break("autograd-state", f"{_DETAIL}: a module of the frame, or a transform")
    plain = [hook.obj for hook in (*hooks, *pre_hooks) if isinstance(hook, FunctionValue)]
    if len(plain) < len(hooks) + len(pre_hooks) or None in plain:
        raise Break("autograd-state", f"{_DETAIL}: other objects than functions from outside")
    count, owner = len(hooks), module.obj

    def module_hooks() -> BackwardHook:
        return BackwardHook(owner, plain[:count], plain[count:])

    tx.process_bound = _DETAIL
    node = tx.graph.node("call_function", module_hooks, (), {}, None)
    return CallHooks(module, hooks, pre_hooks, module_hooks(), node)


@method(CallHooks, "setup_input_hook")
def _enter(tx: Tracer, self: CallHooks, args: Value) -> Value:
    self.inputs = list(map(tx.force, args.unpack(tx)))
    return _through(tx, "setup_input_hook", self, self.inputs)


@method(CallHooks, "setup_output_hook")
def _leave(tx: Tracer, self: CallHooks, result: Value) -> Value:
    result = tx.force(result)
    results = (
        list(map(tx.force, result.unpack(tx))) if isinstance(result, SequenceValue) else [result]
    )
    if not (torch.is_grad_enabled() and any(map(_needs_gradient, results))):
        return result
    try:
        if not any(map(_needs_gradient, self.inputs)):
            raise Break("warns", f"{_DETAIL}, where no input of the module requires grad")
        self.rehearse(tx, results)
    except Break as reason:
        self.why = f"{_DETAIL}: {reason.detail}"
        raise
    left = _through(tx, "setup_output_hook", self, results)
    return left if isinstance(result, SequenceValue) else left.unpack(tx)[0]


def _needs_gradient(value: Value) -> bool:
    return isinstance(value, TensorValue) and value.fake.requires_grad


def _through(tx: Tracer, name: str, hooks: CallHooks, values: Sequence[Value]) -> Value:
    """Add the autograd function before or behind a module; `values` are its inputs or results."""
    tensors = [value for value in values if isinstance(value, TensorValue)]
    if not (torch.is_grad_enabled() and any(map(_needs_gradient, tensors))):
        return TupleValue(list(values))
    where = [isinstance(value, TensorValue) for value in values]

    def setup(holder: BackwardHook, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(given)
        every = tuple(next(rest) if is_tensor else None for is_tensor in where)
        through = getattr(holder, name)(every)
        return tuple(tensor for tensor in through if tensor is not None)

    setup.__name__ = setup.__qualname__ = name
    made = iter(tx.graph.emit_plain("call_function", setup, [hooks, *tensors], {}).unpack(tx))
    return TupleValue(
        [next(made) if is_tensor else v for v, is_tensor in zip(values, where, strict=True)]
    )


@rule(torch.compiler.is_compiling)
def _is_compiling(tx: Tracer) -> Value:
    """Answer no to `Module.__call__` of a module with hooks that run after an exception, too.

    It leaves them out under torch.compile.
    """
    frame = tx.frame
    if frame is None or frame.function.code is not torch.nn.Module._call_impl.__code__:
        return TRUE
    module = frame.cells["self"].contents
    assert module is not None
    own = module.tp_getattro(tx, "_forward_hooks_always_called")
    return constant(not (own.nb_bool(tx) or tx.wrap(_OF_ALL, _OF_ALL_SOURCE).nb_bool(tx)))
