"""Decorators and functions by which user programs control capture."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from weft_core import torch_compiler_shim
from weft_core.arguments import checked, name_of
from weft_core.errors import InvalidArgument
from weft_core.inlinable import inlinable

from weft_capture import frame
from weft_capture.breaks import Break
from weft_capture.functions.table import code_rule, decline, graph, rule
from weft_capture.model.constant import NONE, TRUE, constant, fold
from weft_capture.model.protocol import Kwargs, Tracer, Value
from weft_capture.model.region_marks import mark_call
from weft_capture.policy import break_mode

F = TypeVar("F", bound=Callable[..., Any])


def graph_break() -> None:
    """End the graph here; does nothing outside of capture."""


def is_compiling() -> bool:
    """Return True inside captured code, False elsewhere."""
    return False


decline("graph-break", "", graph_break, torch_compiler_shim.GRAPH_BREAK)


rule(is_compiling, torch_compiler_shim.IS_COMPILING)(lambda tx: TRUE)


def skip_frame(msg: str = "") -> None:
    """Run the frame that calls this eagerly as a whole; does nothing outside of capture."""


@rule(skip_frame, *torch_compiler_shim.SKIP_FRAME)
def _skip(tx: Tracer, msg: Value | None = None) -> NoReturn:
    error = Break("skip-frame", "" if msg is None else str(msg.as_constant()))
    error.eager_frame = tx.frame
    raise error


class error_on_graph_break(contextlib.ContextDecorator):  # noqa: N801 - torch's name
    """Make graph breaks errors, or not, in a block or function, whatever `fullgraph` says.

    Args:
        error: True for errors.
    """

    def __init__(self, error: bool) -> None:
        self.error = error

    def __enter__(self) -> None:
        break_mode.push(self.error)

    def __exit__(self, *_: object) -> None:
        break_mode.pop()


def _enter_mode(tx: Tracer, function: Value, args: list[Value], kwargs: Kwargs) -> Value:
    error = args[0].tp_getattro(tx, "error")
    args[0].tp_setattro(tx, "before", constant(tx.fullgraph))
    _set_mode(tx, bool(error.as_constant()))
    tx.calls.add(break_mode.push, error)
    return NONE


def _set_mode(tx: Tracer, error: bool) -> None:
    tx.journal.on_rollback(functools.partial(setattr, tx, "fullgraph", tx.fullgraph))
    tx.fullgraph = error


def _leave_mode(tx: Tracer, function: Value, args: list[Value], kwargs: Kwargs) -> Value:
    _set_mode(tx, args[0].tp_getattro(tx, "before").as_constant())
    tx.calls.add(break_mode.pop)
    return NONE


inlinable(error_on_graph_break.__init__)
code_rule(error_on_graph_break.__enter__.__code__)(_enter_mode)
code_rule(error_on_graph_break.__exit__.__code__)(_leave_mode)


@rule(torch_compiler_shim.ERROR_ON_BREAK)
def _of_torch(tx: Tracer, error: Value) -> Value:
    return tx.const_object(error_on_graph_break).tp_call(tx, [error], {})


@rule(frame.run)
def _run(tx: Tracer, miss: Value, function: Value, *args: Value, **kwargs: Value) -> Value:
    """A compiled function is inlined where another calls it; a disabled one is not."""
    if miss is NONE:
        raise Break("disabled", function.describe())
    return function.tp_call(tx, list(args), kwargs)


@rule("torch._higher_order_ops.invoke_subgraph.invoke_subgraph_placeholder")
def _region(tx: Tracer, function: Value, *args: Value, **kwargs: Value) -> Value:
    """The inside of `torch.compiler.nested_compile_region` is inlined, and marked as one call."""
    limit = getattr(getattr(function, "obj", None), _LIMIT, 8)
    with mark_call(tx, function.describe(), limit):
        return function.tp_call(tx, list(args), kwargs)


_LIMIT = "__marked_compile_region_max_reuse_entries__"


@checked
def disable(
    function: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None
) -> Any:
    """Run a function, and the functions it calls, eagerly.

    Args:
        function: the function; without it a decorator is returned.
        recursive: False captures the functions it calls.
        reason: stands in the message of the graph break.
    """
    if function is None:
        return functools.partial(disable, recursive=recursive, reason=reason)
    target = function

    def disabled(*args: Any, **kwargs: Any) -> Any:
        if recursive:
            return frame.run(None, target, *args, **kwargs)
        return target(*args, **kwargs)

    frame.skip(disabled.__code__)
    functools.update_wrapper(disabled, target)
    disabled._weft_disable = reason or True  # type: ignore[attr-defined]
    if not recursive and hasattr(target, "__code__"):
        frame.skip(target.__code__)
    return disabled


@checked
def allow_in_graph(function: F) -> F:
    """Make calls of a function operations of the graph, without inlining it."""
    graph(function)
    return function


@checked
def nonstrict_trace(function: F) -> F:
    """Trace a function without executing its bytecode: `allow_in_graph` under torch's other name.

    Arguments and results may be nested lists, tuples and dicts of tensors and constants.
    """
    return allow_in_graph(function)


@checked
def disallow_in_graph(function: F) -> F:
    """Make calls of a function graph breaks."""
    decline("disabled", f"{name_of(function)} is not allowed in graphs", function)
    return function


@checked
def assume_constant_result(function: F) -> F:
    """Run a function while capturing and treat its result as a constant."""

    @rule(function)
    def now(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
        tx.process_bound = f"the result of {name_of(function)}"
        return fold(tx, function, list(args), kwargs)

    return function


@checked
def substitute_in_graph(
    original: Callable[..., Any],
    *,
    can_constant_fold_through: bool = False,
    skip_signature_check: bool = False,
) -> Callable[[F], F]:
    """Trace a Python function wherever the captured program calls `original`.

    Args:
        original: often a function written in C.
        can_constant_fold_through: call `original` while capturing where all arguments are
            constants: it has no side effects and depends on nothing else.
        skip_signature_check: allow parameters with other names or defaults than `original`'s.

    Raises:
        InvalidArgument: the signatures differ, as far as `original` has one.
    """

    @checked
    def register(replacement: F) -> F:
        if not skip_signature_check:
            _check_signatures(original, replacement)

        @rule(original)
        def substitute(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
            known = all(value.is_constant() for value in (*args, *kwargs.values()))
            if can_constant_fold_through and known:
                return fold(tx, original, list(args), kwargs)
            return tx.const_object(replacement).tp_call(tx, list(args), kwargs)

        return replacement

    return register


def _check_signatures(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    try:
        expected = inspect.signature(original)
    except (TypeError, ValueError):  # a function in C without a signature
        return
    rows = [
        [(p.name, p.kind, p.default) for p in signature.parameters.values()]
        for signature in (expected, inspect.signature(replacement))
    ]
    if rows[0] != rows[1]:
        detail = f"{name_of(replacement)} has not the parameters of {name_of(original)}{expected}; "
        detail += "skip_signature_check=True allows that."
        raise InvalidArgument("replacement", detail=detail)
