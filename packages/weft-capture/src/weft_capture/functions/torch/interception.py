"""Handlers of the program for torch's functions: `__torch_function__` of classes, function modes.

Torch itself determines the arguments of a handler: the call is made on placeholder tensors, under a
mode that only records function, classes and arguments. Then the handler is inlined like any
function, with the values instead of the placeholders.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import overrides
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext, _device_constructors
from weft_guards.sources import Source

from weft_capture.breaks import Break
from weft_capture.functions import table
from weft_capture.functions.table import code_rule, hashes_silently, is_graph_function, rule
from weft_capture.functions.torch.pytree import real_tree, tree_value
from weft_capture.model import attributes
from weft_capture.model.constant import FALSE, FRAME_CLASSES, NONE, Constant, constant
from weft_capture.model.containers import ListValue, SequenceValue, TupleValue
from weft_capture.model.contexts import NullContext
from weft_capture.model.dicts import DictValue, LazyValue
from weft_capture.model.functions import FunctionValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import (
    Kwargs,
    MutableValue,
    Output,
    Tracer,
    Value,
    identity_key,
    method,
)
from weft_capture.tensors.modes import around, mode_source
from weft_capture.tensors.symbolic_scalars import SymFloatValue
from weft_capture.tensors.tensor import READERS, TensorValue

_HANDLER = "__torch_function__"
_SILENT = ("__set__", "__setitem__", "__delitem__")

_STATE = """
    grad _grad grad_fn _base retains_grad _backward_hooks _post_accumulate_grad_hooks output_nr
    _version _cdata name volatile _is_view register_hook retain_grad requires_grad_ detach_ t_
    transpose_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_ resize_ resize_as_ set_ rename_
    resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_ apply_ map_ map2_
"""
_OF_THE_OBJECT = frozenset(_STATE.split())
"""Attributes and methods that concern the object, not only the shared memory."""


_METACLASSES = (type(torch.Tensor), type(torch.nn.Parameter), type(torch.nn.Buffer))
_WITHOUT_DATA = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def has_handler(cls: type) -> bool:
    """Say whether a tensor class only adds a `__torch_function__`."""
    if not issubclass(cls, torch.Tensor) or cls is torch.Tensor or cls in FRAME_CLASSES:
        return False
    plain = type(cls) in _METACLASSES and not issubclass(cls, _WITHOUT_DATA)
    handler, dispatch = (attributes.lookup(cls, n) for n in (_HANDLER, "__torch_dispatch__"))
    assert handler is not None and dispatch is not None
    handles = handler[1] is not torch._C._disabled_torch_function_impl
    return plain and handles and dispatch[1] is vars(torch.Tensor)["__torch_dispatch__"]


class OverridingTensor(UserObject):
    """A tensor of a class with a handler; `base` is a plain tensor on the same memory."""

    def __init__(
        self, cls: type, base: Value, obj: Any = None, source: Source | None = None
    ) -> None:
        super().__init__(cls, obj, source, base)
        self.plain().owner = self

    def plain(self) -> TensorValue:
        """Return the plain tensor."""
        return cast("TensorValue", self.base)

    def tp_hash(self) -> object:
        return identity_key(self, self.obj)

    def graph_arg(self) -> Any:
        raise Break("torch-function", f"a {self.cls.__name__} inside a nested argument")

    def nb_bool(self, tx: Tracer) -> bool:
        raise Break("data-dependent-branch", "truth of a tensor")

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        mro_entry = attributes.lookup(self.cls, name)
        custom = self.has_special("__getattribute__")
        if (
            custom
            or name not in READERS
            or mro_entry is None
            or mro_entry[0] is not torch._C.TensorBase
        ):
            return super().tp_getattro(tx, name)
        result = tx.overrides.dispatch(getattr, [self, constant(name)], {})
        if result is not None:
            return result
        if name in _OF_THE_OBJECT or (name == "is_leaf" and self.plain().fake.requires_grad):
            raise Break("torch-function", f"attribute {name} of a {self.cls.__name__}")
        return self.plain().tp_getattro(tx, name)

    def mp_subscript(self, tx: Tracer, key: Value) -> Value:
        return self.call_method(tx, "__getitem__", [key], {})

    def base_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        def plainly(args: list[Value], kwargs: Kwargs) -> Value:
            return args[0].call_method(tx, name, args[1:], kwargs)

        return tx.overrides.evaluate(getattr(torch.Tensor, name), [self, *args], kwargs, plainly)


def retyped(tx: Tracer, cls: Any, tensor: Value, detached: bool = False) -> Value:
    """Return a tensor of a class on the memory of another.

    Raises:
        Break: for a class that does more than handle functions.
    """
    base = _plain(tx, tensor)
    if not isinstance(base, TensorValue) or not (cls is torch.Tensor or has_handler(cls)):
        raise Break("tensor-subclass", f"making a {cls.__qualname__}")
    check_no_finalizer(cls)
    alias = torch.ops.aten.detach.default if detached else torch.ops.aten.alias.default
    result = tx.graph.emit_plain("call_function", alias, [base], {})
    return result if cls is torch.Tensor else OverridingTensor(cls, result)


def check_no_finalizer(cls: Any) -> None:
    """Break for a class whose instances have a `__del__`."""
    if attributes.lookup(cls, "__del__") is not None:
        raise Break("finalizer", f"making a {cls.__qualname__}, which has a __del__")


def _is_overriding(value: Value, depth: int = 0) -> bool:
    if isinstance(value, LazyValue):
        return (
            has_handler(type(value.obj)) if value.forced is None else _is_overriding(value.forced)
        )
    if type(value) is ListValue and value.is_untouched():
        return any(has_handler(type(item)) for item in value.real)
    if type(value) is TupleValue or type(value) is ListValue:
        return depth < 8 and any(_is_overriding(item, depth + 1) for item in value.items)
    return isinstance(value, OverridingTensor)


def _plain(tx: Tracer, value: Value) -> Value:
    """Return a value with plain tensors instead of those with handlers."""
    if not _is_overriding(value):
        return value
    value = tx.force(value)
    if isinstance(value, SequenceValue):
        return value.with_items([_plain(tx, item) for item in value.items])
    return cast("OverridingTensor", value).plain()


class _Listener(TorchFunctionMode):
    """Records calls, and returns itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, *rest: Any) -> Any:
        self.calls.append((func, types, rest))
        return self


class Overrides(MutableValue):
    """The active handlers.

    `stack` has the function modes, innermost last, of which `outer` were entered before the frame;
    `level` is 1 where the handlers of classes are disabled, 2 where modes are, too; `opened` has
    the steps of open blocks that change any of this: no graph ends inside them.
    """

    changing = ("level", "opened", "stack")

    def __init__(self, tx: Tracer) -> None:
        super().__init__()
        self.tx = tx
        self.stack: tuple[Value, ...] = ()
        self.outer = 0
        off = int(not torch._C._is_torch_function_enabled())
        self.level = around.level if around.modes else off
        self.opened: tuple[int, ...] = ()

    def enter_outer(self, modes: tuple[Any, ...]) -> None:
        """Wrap the modes that are active at the call of the frame."""
        self.stack = tuple(self.tx.wrap(mode, mode_source(i)) for i, mode in enumerate(modes))
        self.outer = len(modes)

    @property
    def modes(self) -> tuple[Value, ...]:
        """The function modes, unless all of them only select a device."""
        devices = all(mode.python_type() is DeviceContext for mode in self.stack)
        return () if devices else self.stack

    def open(self, level: int, stack: tuple[Value, ...]) -> None:
        """Enter a block with other handlers."""
        if not torch._C._is_torch_function_enabled():  # which of the levels is not guarded
            raise Break("torch-function", "a function mode while torch functions are disabled")
        self.tx.journal.touch(self)
        self.level, self.stack, self.opened = level, stack, (*self.opened, self.tx.steps.now)

    def close(self, level: int, stack: tuple[Value, ...]) -> None:
        """Leave a block.

        Raises:
            Break: for one that did not begin in this capture.
        """
        if not self.opened or len(stack) < self.outer:
            raise Break("context-manager", "leaving a mode that was entered before the capture")
        self.tx.journal.touch(self)
        self.level, self.stack, self.opened = level, stack, self.opened[:-1]

    def device_block(self, device: Value, name: str) -> Value:
        """Enter (`name` is `__enter__`) or leave `with torch.device(...)`."""
        if name == "__exit__":
            self.close(self.level, self.stack[:-1])
            return FALSE
        mode = self.tx.const_object(DeviceContext).tp_call(self.tx, [device], {})
        self.open(self.level, (*self.stack, mode))
        return device

    def concern(self, args: list[Value], kwargs: Kwargs) -> bool:
        """Say whether a handler applies to a call of a torch function."""
        if self.level == 0 and not self.stack:
            return self.overriding(args, kwargs)
        return bool(self.stack) and self.level < 2

    def overriding(self, args: list[Value], kwargs: Kwargs) -> bool:
        """Say whether any argument has a handler."""
        return any(map(_is_overriding, (*args, *kwargs.values())))

    def evaluate(
        self, function: Any, args: list[Value], kwargs: Kwargs,
        plainly: Callable[[list[Value], Kwargs], Value], of_python: bool = False,
    ) -> Value:  # fmt: skip
        """Evaluate a torch function by the handlers, or `plainly` without.

        Args:
            of_python: the function is an operator of Python's that works on tensors.

        Raises:
            Break: for a function that calls no handler, but whose inner functions may.
        """
        overriding = self.overriding(args, kwargs)
        if not (overriding or self.modes):
            if self.stack and self.level < 2:
                kwargs = on_device(self.tx, self.stack[-1], function, kwargs)
            return plainly(args, kwargs)
        if of_python or _tells_handlers(function):
            handled = self.dispatch(function, args, kwargs)
            if handled is not None:
                return handled
            level, self.level = self.level, 2  # handlers do not see the operations of its rule
            try:
                return self._on_memory(function, args, kwargs, plainly)
            finally:
                self.level = level
        if self.concern(args, kwargs) and _may_tell_handlers(function):
            raise Break("torch-function", f"{function} under handlers of the program")
        return plainly(args, kwargs)

    def _on_memory(
        self, function: Any, args: list[Value], kwargs: Kwargs,
        plainly: Callable[[list[Value], Kwargs], Value],
    ) -> Value:  # fmt: skip
        """Evaluate a function with plain tensors instead of those with handlers."""
        arguments = [_plain(self.tx, arg) for arg in args]
        keywords = {name: _plain(self.tx, value) for name, value in kwargs.items()}
        changed = [arg for arg in args if not any(arg is other for other in arguments)]
        name = getattr(function, "__name__", "")
        if (changed and name in _OF_THE_OBJECT) or keywords.get("out") is not kwargs.get("out"):
            raise Break("torch-function", f"{name} on the object of a tensor subclass")
        result = plainly(arguments, keywords)
        return (isinstance(result, TensorValue) and result.owner) or result

    def dispatch(self, function: Any, args: list[Value], kwargs: Kwargs) -> Value | None:
        """Call the handlers of a call; None where torch would call none.

        Raises:
            Break: when inner functions of the function call handlers.
        """
        if not self.concern(args, kwargs):
            return None
        tx, listener = self.tx, _Listener()
        by_id: dict[int, tuple[Any, Value]] = {}

        def placeholder(value: Value) -> Any:
            example = _example(value)
            by_id.setdefault(id(example), (example, value))
            return example

        def value_of(obj: Any) -> Value:
            if isinstance(obj, torch.Tensor | _Listener) and id(obj) not in by_id:
                raise Break("torch-function", "a tensor created before a handler is called")
            return by_id[id(obj)][1] if id(obj) in by_id else tx.literal(obj)

        trees = [real_tree(tx, arg, None) for arg in args]
        keyword_trees = {name: real_tree(tx, arg, None) for name, arg in kwargs.items()}
        classes_off = (
            torch._C.DisableTorchFunctionSubclass if self.level else contextlib.nullcontext
        )
        with unset_fake_temporarily(), classes_off():
            arguments, keywords = pytree.tree_map(placeholder, (trees, keyword_trees))
            try:
                with listener:
                    result = function(*arguments, **keywords)
            except Exception as error:
                raise Break("operator-error", str(error)[:300]) from None
        if not listener.calls:
            return None
        func, classes, rest = listener.calls[0]
        silent = result is None and func.__name__ in _SILENT
        if len(listener.calls) != 1 or not (result is listener or silent):
            raise Break("torch-function", f"handlers of inner functions of {function}")
        values = [tree_value(tx, pytree.tree_map(value_of, tree)) for tree in rest]
        return self.call_handlers(tx.const_object(func), classes, values)

    def call_handlers(self, func: Value, classes: list[type], rest: list[Value]) -> Value:
        """Call the handler of the innermost mode, else those of classes, as torch does."""
        tx, stack = self.tx, self.stack
        arguments = [func, TupleValue([tx.const_object(cls) for cls in classes]), *rest]
        if stack:
            self.stack = stack[:-1]
            try:
                result = stack[-1].call_method(tx, _HANDLER, arguments, {})
            finally:
                self.stack = stack
            if _declined(result):
                raise Break("operator-error", "a function mode that returns NotImplemented")
            return result
        for cls in classes:
            mro_entry = attributes.lookup(cls, _HANDLER)
            if mro_entry is None or not isinstance(mro_entry[1], classmethod | staticmethod):
                raise Break("torch-function", "a __torch_function__ that is not a classmethod")
            result = tx.const_object(cls).tp_getattro(tx, _HANDLER).tp_call(tx, arguments, {})
            if not _declined(result):
                return result
        raise Break("operator-error", f"no handler for {func.describe()}")


def on_device(tx: Tracer, mode: Value, function: Any, kwargs: Kwargs) -> Kwargs:
    """Return the arguments that a device mode passes to a function."""
    silent = hashes_silently(function)
    if not silent or function not in _device_constructors():
        return kwargs
    if tx.force(kwargs.get("device", NONE)) is not NONE:
        return kwargs
    return {**kwargs, "device": tx.force(mode.tp_getattro(tx, "device"))}


def _example(value: Value) -> Any:
    if not isinstance(value, TensorValue | OverridingTensor):
        return value.hint + 0.0 if isinstance(value, SymFloatValue) else value.example()
    if isinstance(value, TensorValue) and type(value) is not TensorValue:
        raise Break("torch-function", f"a {value.describe()} under handlers of the program")
    fake, cls = value.example(), value.python_type()
    check_no_finalizer(cls)
    return torch.empty((1,) * fake.dim(), dtype=fake.dtype).as_subclass(cls)


def _declined(result: Value) -> bool:
    return isinstance(result, Constant) and result.value is NotImplemented


def _may_tell_handlers(function: Any) -> bool:
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
    answers = getattr(table.find(function), "__qualname__", "").startswith("_always.")
    asks = "torchfunction" in name.replace("_", "").lower() or name.endswith("function_stack_at")
    of_torch = name.startswith("torch.") and not (answers or asks or table.is_pure(function))
    return of_torch or table.find_row(function) is table.Treatment.GRAPH


def _tells_handlers(function: Any) -> bool:
    if isinstance(function, types.MethodWrapperType):
        function = function.__self__  # a descriptor's bound `__get__`
    of_tensors = getattr(function, "__objclass__", None) is torch._C.TensorBase
    return of_tensors or function is torch.device or is_graph_function(function)


# ---- functions of torch about handlers, which classes with handlers and function modes call


method(TensorValue, "as_subclass")(lambda tx, self, cls: retyped(tx, cls.as_constant(), self))


@rule(torch.Tensor._make_subclass)
def _make_subclass(tx: Tracer, cls: Value, data: Value, require_grad: Value = FALSE) -> Value:
    if require_grad.nb_bool(tx):
        raise Break("tensor-subclass", "a new leaf of a tensor subclass")
    return retyped(tx, cls.as_constant(), data, detached=True)


rule(torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic)(
    lambda tx, *args: constant(tx.overrides.concern(list(args), {}))
)
rule(torch._C._has_torch_function, overrides.has_torch_function)(
    lambda tx, args: constant(tx.overrides.concern(args.unpack(tx), {}))
)
rule(torch._C._is_torch_function_mode_enabled)(
    lambda tx: constant(bool(tx.overrides.stack) and tx.overrides.level < 2)
)
rule(overrides.get_default_nowrap_functions)(
    lambda tx: tx.literal(set(overrides.get_default_nowrap_functions()))
)


@rule(overrides.handle_torch_function)
def _handle(
    tx: Tracer, public_api: Value, relevant_args: Value, *args: Value, **kwargs: Value
) -> Value:
    arguments = [tx.force(arg) for arg in relevant_args.unpack(tx)]
    owners = overrides._get_overloaded_args(arguments, lambda value: value.python_type())
    keywords = DictValue([(constant(name), value) for name, value in kwargs.items()])
    classes = [owner.python_type() for owner in owners]
    return tx.overrides.call_handlers(public_api, classes, [tx.tuple_of(args), keywords])


@rule(torch._C._disabled_torch_function_impl)
def _disabled(tx: Tracer, func: Value, types: Value, args: Value, kwargs: Value = NONE) -> Value:
    before, stack = tx.overrides.level, tx.overrides.stack
    keywords = {} if kwargs is NONE else tx.keyword_arguments(kwargs)
    tx.overrides.open(max(1, before), stack)
    try:
        return func.tp_call(tx, args.unpack(tx), keywords)
    finally:
        tx.overrides.close(before, stack)


class HandlersOff(NullContext):
    """DisableTorchFunctionSubclass (level 1) and DisableTorchFunction (level 2)."""

    def enter(self, tx: Tracer) -> Value:
        self.real = tx.overrides.level
        tx.overrides.open(max(_LEVELS[self.cls], self.real), tx.overrides.stack)
        return NONE

    def leave(self, tx: Tracer) -> Value:
        tx.overrides.close(self.real, tx.overrides.stack)
        return FALSE

    def reconstruct(self, out: Output) -> None:
        out.call(self.cls, [])


_LEVELS: dict[Any, int] = {
    torch._C.DisableTorchFunctionSubclass: 1,
    torch._C.DisableTorchFunction: 2,
}
for _kind in _LEVELS:
    rule(_kind)(lambda tx, context_class=_kind: HandlersOff(context_class))


@rule(torch._C._push_on_torch_function_stack)
def _push(tx: Tracer, mode: Value) -> None:
    if not isinstance(mode, UserObject) or issubclass(mode.cls, DeviceContext):
        raise Break("context-manager", "entering a function mode of torch")
    tx.overrides.open(tx.overrides.level, (*tx.overrides.stack, mode))


@rule(torch._C._pop_torch_function_stack)
def _pop(tx: Tracer) -> Value:
    stack = tx.overrides.stack
    tx.overrides.close(tx.overrides.level, stack[:-1])
    return stack[-1]


rule(torch._C._len_torch_function_stack)(lambda tx: constant(len(tx.overrides.stack)))


@rule(torch._C._get_function_stack_at)
def _mode_at(tx: Tracer, index: Value) -> Value:
    mode: Value = tx.overrides.stack[index.as_constant()]
    return mode


def _handle_on_device(
    tx: Tracer, function: FunctionValue, args: list[Value], kwargs: Kwargs
) -> Value:
    mode, func, _, arguments, *rest = args
    keywords = tx.keyword_arguments(rest[0]) if rest and rest[0] is not NONE else {}
    keywords = on_device(tx, mode, getattr(func, "obj", None), keywords)
    return func.tp_call(tx, arguments.unpack(tx), keywords)


code_rule(DeviceContext.__torch_function__.__code__)(_handle_on_device)
