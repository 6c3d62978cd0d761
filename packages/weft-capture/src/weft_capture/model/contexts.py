"""torch's context managers that set a mode in C: autocast, inference mode, attention kernels.

While capturing, the mode is set, so that fake tensors behave as in eager execution, and the change
is a node of the graph. At a break inside the block, generated code creates the context manager and
enters it; the resume function finds its `__exit__` on the stack. The Python of `no_grad` and the
like is inlined instead: the grad mode is set after each graph.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch.fx import Node
from weft_guards.sources import CallSource, InstanceAttrSource, Source

from weft_capture.breaks import Break
from weft_capture.model.constant import FALSE, NONE
from weft_capture.model.protocol import (
    Kwargs,
    MethodOf,
    MutableValue,
    Output,
    Tracer,
    Value,
    method,
)


@dataclass(eq=False)
class ContextValue(MutableValue):
    """A context manager of torch. As it is here, its block has no effect on captured code.

    `real` is not None inside the block, `token` is the graph node that entered it. An input context
    manager is not entered itself; a break creates a new one.
    """

    changing = ("real", "source", "token")

    cls: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: Source | None = None
    real: Any = None
    token: Any = None

    def __post_init__(self) -> None:
        self.origin = self.source

    def python_type(self) -> type:
        return self.cls if isinstance(self.cls, type) else object

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        return decorate(tx, self, *args)

    def enter(self, tx: Tracer) -> Value:
        """Enter the block; returns the result of `__enter__`."""
        return NONE

    def leave(self, tx: Tracer) -> Value:
        """Leave the block; returns the result of `__exit__`."""
        return FALSE

    def check_entered(self) -> None:
        """Break at the end of a block whose beginning capture has not seen."""
        if self.real is None:
            raise Break("context-manager", "leaving a block that was entered before the capture")

    def reconstruct(self, out: Output) -> None:
        entered = self.real is not None
        out.call(functools.partial(_make_context, self.cls, self.args, self.kwargs, entered), ())


method(ContextValue, "__enter__")(lambda tx, self: self.enter(tx))
method(ContextValue, "__exit__")(lambda tx, self, *error: self.leave(tx))
method(ContextValue, "_recreate_cm", "clone")(
    lambda tx, self: type(self)(self.cls, self.args, self.kwargs)
)


class NullContext(ContextValue):
    """A context manager without effect on captured code, such as a profiler range."""

    def reconstruct(self, out: Output) -> None:
        out.call(DecoratingNullContext, [])


class AutocastContext(ContextValue):
    """torch.autocast."""

    state: ClassVar[dict[str, str]] = {
        "device_type": "device",
        "dtype": "fast_dtype",
        "enabled": "_enabled",
        "cache_enabled": "_cache_enabled",
    }
    """The arguments to create an input object again, and the attributes that hold them."""
    before: ClassVar[dict[str, str]] = {
        "dtype": "prev_fastdtype",
        "enabled": "prev",
        "cache_enabled": "prev_cache_enabled",
    }
    """The same, for the state that the exit of an entered object restores."""
    tp_call = Value.tp_call
    obj: Any = None

    @classmethod
    def of(cls, tx: Tracer, obj: Any, source: Source) -> Self:
        """Return the value of an object from outside."""
        context_class: Any = torch.autocast if cls is AutocastContext else torch.inference_mode
        context = cls(context_class, (), _constants(tx, obj, source, cls.state), source)
        context.obj = obj
        return context

    def enter(self, tx: Tracer) -> Value:
        if self.real is not None:
            raise Break("context-manager", "a context manager that is entered twice")
        tx.journal.touch(self)
        self.source = None
        self.enter_real(tx)
        tx.journal.on_rollback(lambda: _leave(tx, self.real))
        self.token = self.enter_node(tx)
        return self if type(self) is AutocastContext else NONE

    def leave(self, tx: Tracer) -> Value:
        if self.real is None and self.source is not None:
            return self.leave_outer(tx, self.obj, self.source)
        self.check_entered()
        _leave(tx, self.real)
        tx.journal.on_rollback(lambda: self.enter_real(tx))
        self.leave_node(tx)
        tx.journal.touch(self)
        self.real, self.source = None, self.origin
        return FALSE if type(self) is AutocastContext else NONE

    def leave_outer(self, tx: Tracer, obj: Any, source: Source) -> Value:
        """Leave a block that was entered before the capture, such as after a break inside it.

        A deferred call leaves it. The rest of the graph runs in a block with the state before it.
        """
        if not vars(obj).keys() >= set(self.before.values()):
            raise Break("context-manager", "leaving a block that was never entered")
        options = _constants(tx, obj, source, self.before)
        block = type(self)(self.cls, (obj.device,), options)
        block.enter(tx)
        tx.left_blocks.append(block)
        tx.journal.on_rollback(tx.left_blocks.pop)
        tx.calls.add(self.cls.__exit__, self, NONE, NONE, NONE)
        return FALSE

    def enter_real(self, tx: Tracer) -> None:
        """Set the mode by a new context manager, as not all can be entered twice."""
        self.real = self.cls(*self.args, **self.kwargs)
        self.real.__enter__()
        tx.open_contexts.append(self.real)

    def enter_node(self, tx: Tracer) -> Node | None:
        """Add the node that enters the block."""
        real = self.real
        state = (real.device, real.fast_dtype, real._enabled, real._cache_enabled)
        enter = torch.amp.autocast_mode._enter_autocast
        return tx.graph.node("call_function", enter, state, {}, None)

    def leave_node(self, tx: Tracer) -> None:
        """Add the node that leaves it."""
        leave = torch.amp.autocast_mode._exit_autocast
        tx.graph.node("call_function", leave, (self.token,), {}, None)


def _constants(tx: Tracer, obj: Any, source: Source, names: dict[str, str]) -> dict[str, Any]:
    """Read attributes that are constants, as arguments."""
    values = {
        argument: tx.wrap(getattr(obj, name), InstanceAttrSource(source, name))
        for argument, name in names.items()
    }
    return {argument: value.as_constant() for argument, value in values.items()}


class InferenceContext(AutocastContext):
    """torch.inference_mode: the whole graph runs in it, or none (`GraphBuilder.inference`)."""

    state: ClassVar[dict[str, str]] = {"mode": "mode"}

    def enter_node(self, tx: Tracer) -> None:
        """The graph itself notices."""

    leave_node = enter_node

    def leave_outer(self, tx: Tracer, obj: Any, source: Source) -> Value:
        """Break: a graph is in inference mode as a whole, or not at all."""
        raise Break("context-manager", "leaving inference mode that was entered before the capture")

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        return decorate_with_clones(tx, self, *args)


def decorate_with_clones(tx: Tracer, context: Value, function: Value) -> Value:
    """Return a function that runs in clones of `context`, as torch's decorating contexts do."""
    wrapper = tx.const_object(torch.utils._contextlib.context_decorator)
    return wrapper.tp_call(tx, [MethodOf(context, "clone"), function], {})


def decorate(tx: Tracer, context: Value, function: Value) -> Value:
    """Return a function that runs in `context`, as `contextlib.ContextDecorator` does."""
    wrapper = tx.const_object(contextlib.ContextDecorator.__call__)
    return wrapper.tp_call(tx, [context, function], {})


class AttentionContext(AutocastContext):
    """torch.nn.attention.sdpa_kernel, handled in the same way."""

    tp_call = ContextValue.tp_call

    def enter_node(self, tx: Tracer) -> Node:
        backends, set_priority = self.args
        args = [int(backend) for backend in backends], set_priority
        return tx.graph.node("call_function", enter_attention, args, {}, None)

    def leave_node(self, tx: Tracer) -> None:
        tx.graph.node("call_function", leave_attention, (self.token,), {}, None)


def enter_attention(backends: list[int], set_priority: bool) -> Any:
    """Select attention kernels; returns the argument of `leave_attention`."""
    from torch.nn import attention  # noqa: PLC0415 - only programs that use it have loaded it

    context = attention.sdpa_kernel([attention.SDPBackend(b) for b in backends], set_priority)
    context.__enter__()
    return context


def leave_attention(context: Any) -> None:
    """Restore the selection of attention kernels."""
    context.__exit__(None, None, None)


def _leave(tx: Tracer, real: Any) -> None:
    if real in tx.open_contexts:
        tx.open_contexts.remove(real)
        real.__exit__(None, None, None)


class DecoratingNullContext(contextlib.nullcontext[Any], contextlib.ContextDecorator):
    """A null context that can decorate a function."""


class HooksDisabled(ContextValue):
    """torch.autograd.graph.disable_saved_tensors_hooks, which has no effect inside a graph.

    Code for which it has an effect breaks the graph, and enters the block eagerly.
    """

    def python_type(self) -> type:
        return contextlib._GeneratorContextManager

    def enter(self, tx: Tracer) -> Value:
        tx.guard(CallSource(no_saved_tensors_hooks, ()), "CONST", tx.no_saved_tensors_hooks)
        if not tx.no_saved_tensors_hooks or self.real:
            raise Break("context-manager", "disabling saved-tensor hooks that are active")
        tx.journal.touch(self)
        self.real = True
        return NONE

    def leave(self, tx: Tracer) -> Value:
        self.check_entered()
        tx.journal.touch(self)
        self.real = None
        return FALSE


def no_saved_tensors_hooks() -> bool:
    """Say whether saved-tensor hooks may be disabled: none are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _make_context(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], entered: bool) -> Any:
    """Create a context manager again, and enter it if the captured program is inside."""
    context = cls(*args, **kwargs)
    if entered:
        context.__enter__()
    return context
