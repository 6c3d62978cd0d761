"""The table of callables: how capture treats a call of a known callable."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from weft_capture.breaks import Break
from weft_capture.model.attributes import C_DESCRIPTORS
from weft_capture.model.constant import NONE, SCALARS, fold, real_call
from weft_capture.model.protocol import H, Handler, InstanceValue, Kwargs, Raised, Tracer, Value
from weft_capture.torch_compat import check_torch, fits

F = torch.nn.functional

_NATIVE = (
    torch._C._VariableFunctions,
    torch._C._nn,
    *(getattr(torch._C, name) for name in ("_fft", "_linalg", "_special")),  # not in the stubs
)
"""Namespaces of C functions that compute on tensors."""

_PYTHON_MODULES = frozenset(("torch.nn.functional", "torch.functional"))
"""Python functions of these modules become nodes; AOT traces through them later."""

_INLINED: frozenset[object] = frozenset(
    (F.multi_head_attention_forward, torch.nn.functional._canonical_mask)
)
"""Exceptions: functions whose Python does more than call operators."""


def hashes_silently(obj: object) -> bool:
    """Say whether an object is hashable without running code of the program."""
    cls = type(obj)
    if cls.__module__ == "torch._ops":
        return True
    if not isinstance(cls.__hash__, types.WrapperDescriptorType):
        return False
    try:
        hash(obj)
    except TypeError:  # functions of ctypes, for example
        return False
    return True


@functools.cache
def _native_functions() -> frozenset[object]:
    functions = set()
    for namespace in _NATIVE:
        for name in dir(namespace):
            function = getattr(namespace, name)
            if callable(function) and not name.startswith("__"):
                functions.add(function)
    return frozenset(functions)


def is_graph_function(function: Any) -> bool:
    """Say whether calling `function` becomes one node of the graph."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if hashes_silently(function) and function in _native_functions():
        return True
    if not isinstance(function, types.FunctionType) or function in _INLINED:
        return False
    if function.__module__ == "torch._tensor":
        return function.__name__[0] != "_" and vars(torch.Tensor).get(function.__name__) is function
    # `boolean_dispatch` makes max_pool2d and its kind: nested functions.
    dispatches = function.__qualname__.startswith("boolean_dispatch.")
    of_torch = dispatches or function.__globals__.get("__name__") in _PYTHON_MODULES
    return of_torch and not function.__name__.startswith(("_", "has_torch_function"))


class Treatment(enum.Enum):
    """What capture does with a call of a known callable that has no handler."""

    PURE = enum.auto()
    """Run it while capturing; every argument must be constant."""
    PURE_OR_TRACED = enum.auto()
    """Run it while capturing, or trace its Python where an argument is not constant or called."""
    GRAPH = enum.auto()
    """Make it a node of the graph."""


Row = Treatment | Handler
ROWS: dict[object, Row] = {}
"""Callable -> treatment or handler(tx, *args, **kwargs).

Functions of modules that are imported late are here by name, functions that the program makes anew
each time by their code: handler(tx, function, args, kwargs), None where it does not apply.
"""

_FAMILIES = """
    functions.language.builtins functions.language.text functions.language.sequences
    functions.language.dict_functions functions.torch.tensors functions.torch.gradients
    functions.torch.autograd_functions functions.torch.transforms functions.torch.pytree
    libraries.optimizers functions.torch.calls functions.torch.interception
    functions.language.stdlib functions.language.context_functions
    functions.language.polyfilled functions.language.type_checks functions.language.namespaces
    functions.language.messages functions.torch.randomness libraries.numpy libraries.numpy_random
    libraries.numpy_sorting libraries.tensor_makers functions.torch.control_flow
    functions.torch.settings libraries.attention
    functions.torch.backward libraries.rnn libraries.triton libraries.distributed
    libraries.fully_shard libraries.nested functions.torch.generator_objects
    functions.torch.module_hooks functions.torch.checked
"""


def rule(*callables: object) -> Callable[[H], H]:
    """Make the decorated handler the rule of `callables`."""

    def add(handler: H) -> H:
        ROWS.update(dict.fromkeys(callables, handler))
        return handler

    return add


def rule_of_each(*callables: object) -> Callable[[H], H]:
    """Make the decorated handler, which gets the callable first, the rule of each of them."""

    def add(handler: H) -> H:
        for function in callables:
            rule(function)(functools.partial(handler, function))
        return handler

    return add


def _treat(row: Row, *callables: object) -> None:
    ROWS.update(dict.fromkeys(callables, row))


code_rule = rule
pure = functools.partial(_treat, Treatment.PURE)
pure_or_traced = functools.partial(_treat, Treatment.PURE_OR_TRACED)
graph = functools.partial(_treat, Treatment.GRAPH)
"""Give callables such a row; graph nodes beyond those that `is_graph_function` recognises."""


def decline(code: str, detail: str, *callables: object) -> None:
    """Make calls of these a break."""

    @rule(*callables)
    def refuse(tx: Tracer, *args: Value, **kwargs: Value) -> NoReturn:
        raise Break(code, detail)


@functools.cache
def load() -> None:
    """Import all modules of rules, which fill the table.

    A module that does not fit this torch is skipped: its callables then break the graph.
    """
    check_torch()
    for family in _FAMILIES.split():
        with fits(f"capture's rules in {family} are"):
            importlib.import_module(f"weft_capture.{family}")


_LIBRARIES = ("torch", "contextlib", "functools", "weft_core", "weft_capture", "weft")


def find_row(obj: object) -> Row | None:
    """Return the row of a callable, or None."""
    row = ROWS.get(obj) if hashes_silently(obj) else None
    if row is None and isinstance(obj, types.FunctionType | type):
        original = obj.__dict__.get("_torchdynamo_orig_callable")
        if original is not None and (obj.__module__ or "").startswith("torch.optim"):
            return _caller(original)
        if isinstance(obj, types.FunctionType):  # `functools.wraps` may have copied its name
            package = str(obj.__globals__.get("__name__")).partition(".")[0]
            if package not in _LIBRARIES:
                return None
        return ROWS.get(f"{obj.__module__}.{obj.__qualname__}")
    return row


def find(obj: object) -> Handler | None:
    """Return the handler of a callable, or of functions of a code, or None."""
    row = find_row(obj)
    return None if isinstance(row, Treatment) else row


@functools.cache
def _caller(original: Any) -> Handler:
    """Return a handler that calls the function that Dynamo has wrapped."""
    return lambda tx, *args, **kwargs: tx.const_object(original).tp_call(tx, list(args), kwargs)


def is_leaf(function: object) -> bool:
    """Say whether a Python function has a row or is a graph node, and so must not be inlined."""
    return find_row(function) is not None or is_graph_function(function)


def is_pure(obj: Any) -> bool:
    """Say whether a callable is run while capturing when its arguments are constant."""
    return find_row(obj) in (Treatment.PURE, Treatment.PURE_OR_TRACED)


def call_rule(tx: Tracer, obj: Any, args: list[Value], kwargs: Kwargs) -> Value:
    """Call a real callable that is not inlined.

    In this order: its row; a method of its first argument; a node of the graph; a method of a
    constant.

    Raises:
        Break: with code c-function, when none of these applies.
    """
    return tx.overrides.evaluate(obj, args, kwargs, functools.partial(_call_rule, tx, obj))


def _call_rule(tx: Tracer, obj: Any, args: list[Value], kwargs: Kwargs) -> Value:
    obj = _first_loaded(obj)
    row = find_row(obj)
    if row is None:
        result = _call_as_method(tx, obj, args, kwargs)
        if result is not None:
            return result
        pure_method = Treatment.PURE if _is_constants_method(obj) else None
        row = Treatment.GRAPH if is_graph_function(obj) else pure_method
    if row is None:
        raise Break("c-function", _name(obj))
    if not isinstance(row, Treatment):
        return apply(tx, row, args, kwargs, obj)
    if row is Treatment.GRAPH:
        return _add_node(tx, obj, args, kwargs)
    if row is Treatment.PURE:
        return fold(tx, obj, args, kwargs)
    with contextlib.suppress(Break):
        if not any(map(_is_callback, (*args, *kwargs.values()))):
            return fold(tx, obj, args, kwargs)
    return tx.trace_body(obj, args, kwargs)


def _add_node(tx: Tracer, obj: Any, args: list[Value], kwargs: Kwargs) -> Value:
    """Make a call a node; trace a function of Python that warns, for the warning's position."""
    if isinstance(obj, types.FunctionType) and _calls_replaced(tx, obj):
        return tx.trace_body(obj, args, kwargs)
    frozen = {at: arg.frozen(tx) for at, arg in enumerate(args) if isinstance(arg, InstanceValue)}
    target = _with_objects(obj, frozen) if any(frozen.values()) else obj
    args = [arg for at, arg in enumerate(args) if frozen.get(at) is None]
    try:
        return tx.graph.emit("call_function", target, args, kwargs)
    except Break as error:
        if error.code != "warns" or not isinstance(obj, types.FunctionType):
            raise
    return tx.trace_body(obj, args, kwargs)


_OWN = {name: obj for name, obj in vars(torch).items() if callable(obj)}


def _calls_replaced(tx: Tracer, function: types.FunctionType) -> bool:
    """Note the functions of torch that one of torch's calls; say whether one was replaced."""
    names = [name for name in function.__code__.co_names if name in _OWN]
    now = {name: vars(torch).get(name) for name in names}
    tx.library.update({("torch", name): obj for name, obj in now.items()})
    return any(now[name] is not _OWN[name] for name in names)


def _with_objects(function: Any, objects: dict[int, Any]) -> Callable[..., Any]:
    """Return a function for a node, which gets objects that no graph can hold at positions."""

    def call(*args: Any, **kwargs: Any) -> Any:
        every = list(args)
        for at, obj in objects.items():
            if obj is not None:
                every.insert(at, obj)
        return function(*every, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _call_as_method(tx: Tracer, obj: Any, args: list[Value], kwargs: Kwargs) -> Value | None:
    """Call a method of the first argument or of a class; None for other callables."""
    name = getattr(obj, "__name__", "")
    if type(obj) is types.MethodWrapperType and name == "__get__" and len(args) == 1:
        described: Any = obj.__self__
        return args[0].tp_getattro(tx, described.__name__)
    if args and type(obj) is types.FunctionType and vars(torch.Tensor).get(name) is obj:
        return args[0].call_method(tx, name, args[1:], kwargs)
    if isinstance(obj, C_DESCRIPTORS) and args and issubclass(args[0].python_type(), _owner(obj)):
        return args[0].call_base_method(tx, _owner(obj), obj.__name__, args[1:], kwargs)
    if isinstance(obj, types.BuiltinFunctionType) and isinstance(obj.__self__, type):
        for_class = _rule_for_class(obj.__self__, name)
        if for_class is not None:
            return apply(tx, for_class, [tx.const_object(obj.__self__), *args], kwargs)
    return None


def _rule_for_class(cls: type, name: str) -> Handler | None:
    """Return the rule of a C method bound to a class, from the class or its metaclass."""
    return find(inspect.getattr_static(cls, name, None)) or find(getattr(type(cls), name, None))


def _first_loaded(obj: Any) -> Any:
    """Return the first copy of a C function whose module was loaded twice."""
    if not isinstance(obj, types.BuiltinFunctionType) or type(obj.__self__) is not types.ModuleType:
        return obj
    first = sys.modules.get(obj.__module__ or "")
    reloaded = obj.__module__ in sys.stdlib_module_names and first is not obj.__self__
    loaded = getattr(first, obj.__name__, None) if reloaded else None
    return loaded if type(loaded) is type(obj) else obj


def apply(tx: Tracer, handler: Handler, args: list[Value], kwargs: Kwargs, of: Any = None) -> Value:
    """Call the handler of a callable, with the callable's own errors for wrong arguments."""
    frame, in_c = tx.frame, _in_c(of)
    try:
        _signature(handler).bind(tx, *args, **kwargs)
        if in_c:
            _check_real(of, len(args), tuple(kwargs))
    except TypeError as error:
        if in_c:
            raise_real(tx, of, args, kwargs)
        raise Break("unsupported-arguments", f"arguments that do not fit: {error}") from None
    try:
        result = handler(tx, *args, **kwargs)
    except (Raised, TypeError, ValueError, AttributeError, AssertionError) as error:
        exception = error.value if isinstance(error, Raised) else None
        if not in_c or (exception and getattr(exception, "stated_in", None) is not frame):
            raise
        raise_real(tx, of, args, kwargs)
        if exception and getattr(of, "__module__", None) in _UNSURE and of not in _SURE:
            raise Break("builtin-error", f"an error of {_name(of)}") from None
        raise
    return NONE if result is None else result


_signature = functools.cache(inspect.signature)


def _in_c(real: Any) -> bool:
    """Say whether this is a function or method in C of the language itself."""
    if isinstance(real, types.FunctionType) or real is None or real is print:
        return False
    return getattr(real, "__module__", None) in (None, "_operator", *_UNSURE)


@functools.cache
def _check_real(real: Any, count: int, names: tuple[str, ...]) -> None:
    """Raise TypeError where a function of C does not take such arguments."""
    with contextlib.suppress(ValueError):  # some have no signature
        inspect.signature(real).bind(*range(count), **dict.fromkeys(names))


_UNSURE = ("builtins", "itertools", "math")
_SURE = (
    len, iter, next, list, tuple, set, frozenset, sorted, any, all, zip, map, enumerate, divmod
)  # fmt: skip
_PLAIN = (
    *SCALARS, list, tuple, dict, set, frozenset, range, slice,
    collections.deque, collections.OrderedDict, collections.defaultdict,
)  # fmt: skip


def raise_real(tx: Tracer, real: Any, args: list[Value], kwargs: Kwargs) -> None:
    """Raise what `real` raises, where capture knows its arguments."""
    with contextlib.suppress(Break):
        arguments = [arg.data(tx) for arg in args]
        keywords = {name: value.data(tx) for name, value in kwargs.items()}
        if all(type(argument) in _PLAIN for argument in (*arguments, *keywords.values())):
            real_call(tx, real, *arguments, **keywords)


def _owner(obj: Any) -> type:
    owner: type = obj.__objclass__ if hasattr(obj, "__objclass__") else type(obj.__self__)
    return owner


def _is_constants_method(obj: Any) -> bool:
    """Say whether this is a method of a constant, such as ", ".join, as a bound builtin."""
    return isinstance(obj, types.BuiltinMethodType | types.MethodWrapperType) and isinstance(
        obj.__self__, (str, bytes, int, float, frozenset, tuple, range, slice)
    )


def _is_callback(value: Value) -> bool:
    return any("__call__" in vars(base) for base in value.python_type().__mro__)


def _name(obj: Any) -> str:
    module = getattr(obj, "__module__", None)
    name = getattr(obj, "__qualname__", None) or repr(obj)
    return f"{module}.{name}" if module and module != "builtins" else name
