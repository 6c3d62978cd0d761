"""Function modes of the program: what a `TorchFunctionMode` is asked, and when.

Torch itself tells what a mode gets: a call under one is made for real on stand-ins of the
arguments, under a mode that notes function, classes and arguments and does nothing else. The
handler is then inlined like any function, with the values in the places of their stand-ins.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from weft_capture.breaks import Break
from weft_capture.rules import table
from weft_capture.rules.pytree import real_tree, tree_value
from weft_capture.values.base import Kwargs, MutableValue, Value
from weft_capture.values.constant import Constant
from weft_capture.values.containers import TupleValue
from weft_capture.values.floats import FloatValue
from weft_capture.values.tensor import TensorValue

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer

_SILENT = ("__set__", "__setitem__", "__delitem__")


class _Listener(TorchFunctionMode):
    """Notes the calls that it gets, and answers with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, *rest: Any) -> Any:
        self.calls.append((func, types, rest))
        return self


class FunctionModes(MutableValue):
    """The function modes that the program has entered, innermost last.

    `opened` has the steps at which those that are still open were entered: no graph ends inside.
    """

    __slots__ = ("modes", "opened", "tx")
    changing = ("modes", "opened")

    def __init__(self, tx: Tracer) -> None:
        super().__init__()
        self.tx = tx
        self.modes: tuple[Value, ...] = ()
        self.opened: tuple[int, ...] = ()

    def push(self, mode: Value) -> None:
        """Enter a mode."""
        self.tx.journal.touch(self)
        self.modes, self.opened = (*self.modes, mode), (*self.opened, self.tx.steps.now)

    def pop(self) -> Value:
        """Leave the innermost mode.

        Raises:
            Break: for one that was entered for real.
        """
        if not self.opened:
            raise Break("unknown-call", "leaving a mode that was entered for real")
        self.tx.journal.touch(self)
        mode, self.modes, self.opened = self.modes[-1], self.modes[:-1], self.opened[:-1]
        return mode

    def evaluate(
        self, function: Any, args: list[Value], kwargs: Kwargs,
        plainly: Callable[[list[Value], Kwargs], Value], of_python: bool = False,
    ) -> Value:  # fmt: skip
        """Ask the modes for what a function of torch gives, or do it `plainly`.

        Args:
            of_python: the function is an operator of Python's that works on tensors.

        Raises:
            Break: for a function that does not tell modes, but whose parts may.
        """
        if not self.modes:
            return plainly(args, kwargs)
        if of_python or _tells_modes(function):
            handled = self.dispatch(function, args, kwargs)
            return plainly(args, kwargs) if handled is None else handled
        if _may_tell_modes(function):
            raise Break("unknown-call", f"{function} under a function mode of the program")
        return plainly(args, kwargs)

    def dispatch(self, function: Any, args: list[Value], kwargs: Kwargs) -> Value | None:
        """Ask the modes; None where torch would ask none.

        Raises:
            Break: when modes are asked for a part of what the function does.
        """
        tx, listener = self.tx, _Listener()
        known: dict[int, tuple[Any, Value]] = {}

        def stand_in(value: Value) -> Any:
            made = _example(value)
            known.setdefault(id(made), (made, value))
            return made

        def value_of(obj: Any) -> Value:
            if isinstance(obj, torch.Tensor | _Listener) and id(obj) not in known:
                raise Break("unsupported-value", "a tensor made on the way to a function mode")
            return known[id(obj)][1] if id(obj) in known else tx.literal(obj)

        trees = [real_tree(tx, arg, None) for arg in args]
        named = {name: real_tree(tx, arg, None) for name, arg in kwargs.items()}
        with unset_fake_temporarily():
            given, words = pytree.tree_map(stand_in, (trees, named))
            try:
                with listener:
                    result = function(*given, **words)
            except Exception as error:
                raise Break("op-failed", str(error)[:300]) from None
        if not listener.calls:
            return None
        func, kinds, rest = listener.calls[0]
        silent = result is None and func.__name__ in _SILENT
        if len(listener.calls) != 1 or not (result is listener or silent):
            raise Break("unsupported-method", f"a function mode inside of {function}")
        values = [tree_value(tx, pytree.tree_map(value_of, one)) for one in rest]
        types = TupleValue([tx.const_object(kind) for kind in kinds])
        return self.ask(tx.const_object(func), types, *values)

    def ask(self, *given: Value) -> Value:
        """Call the handler of the innermost mode, which works without it."""
        modes, self.modes = self.modes, self.modes[:-1]
        try:
            result = modes[-1].call_method(self.tx, "__torch_function__", list(given), {})
        finally:
            self.modes = modes
        if isinstance(result, Constant) and result.value is NotImplemented:
            raise Break("op-failed", "a function mode that does not know a function")
        return result


def _example(value: Value) -> Any:
    if not isinstance(value, TensorValue):
        return value.hint + 0.0 if isinstance(value, FloatValue) else value.example()
    tensor = torch.empty((1,) * value.fake.dim(), dtype=value.fake.dtype)
    return tensor.as_subclass(value.python_type())


def _may_tell_modes(function: Any) -> bool:
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
    answers = getattr(table.find(function), "__qualname__", "").startswith("_always.")
    quiet = answers or "torch_function" in name or function in table.PURE
    return function in table.GRAPH or (name.startswith("torch.") and not quiet)


def _tells_modes(function: Any) -> bool:
    from weft_capture.rules.torch_rules import is_graph_function  # noqa: PLC0415 - it adds rows

    if isinstance(function, types.MethodWrapperType):
        function = function.__self__  # a descriptor, of which this is the `__get__`
    of_tensors = getattr(function, "__objclass__", None) is torch._C.TensorBase
    return of_tensors or function is torch.device or is_graph_function(function)
