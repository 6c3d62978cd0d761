"""Numbers that differ between calls: learning rates, results of `.item()`, ints of libraries.

A `SymFloatValue` is a Python float to the program and a 0-dim float64 tensor to the graph. One that
is an input has a source, from which generated code computes it; arithmetic with constants keeps it
in Python (`CallSource(operator.mul, ...)`), bit for bit as in eager, until a tensor operation needs
it. A comparison guards the outcome, not the number. A float that was read from a tensor has no
source: its arithmetic becomes nodes of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from weft_guards.sources import CallSource, ConstSource, DictSource, ItemSource, Source

from weft_capture.breaks import Break, NeedsSymbols
from weft_capture.library_traits import scalar_library
from weft_capture.model.constant import (
    VARYING_TYPES,
    Constant,
    Varying,
    constant,
    fits_graph,
    plain_scalar,
    real_call,
)
from weft_capture.model.protocol import Operator, Output, Tracer, Value
from weft_capture.tensors.runtime_values import RuntimeValue, TextValue, is_runtime, origins
from weft_capture.tensors.tensor import SymValue, TensorValue

PregraphValue = tuple[Source, Any]
"""Where a number comes from, and the number at this capture."""


def scalar_tensor(number: float) -> torch.Tensor:
    """Return the graph's form of a float (or an int): a 0-dim tensor of float64 (int64)."""
    plain = plain_scalar(number)
    dtype = torch.float64 if isinstance(plain, float) else torch.int64
    return torch.scalar_tensor(plain, dtype=dtype)


def may_vary(number: object) -> bool:
    """Say whether a number from outside becomes a `SymFloatValue` once it has changed."""
    library = scalar_library(number)
    return type(number) is float or (library is not None and library.fits_tensor(number))


def is_whole(number: object) -> bool:
    """Say whether a number is an int, of a library perhaps."""
    return isinstance(plain_scalar(number), int)


@dataclass(eq=False)
class SymFloatValue(Varying):
    """A float known only when the program runs.

    Args:
        source: where it comes from; None for one computed by the graph.
        hint: its value at this capture, where it has a source.
        computed: the 0-dim float64 tensor that holds it, where it has none.

    `before` is a source that gives the same number before the graph runs, for a guard on what a
    comparison says, and the number at this capture; None for what only the graph knows.
    """

    is_scalar: ClassVar[bool] = True

    tx: Tracer
    source: Source | None
    hint: float = 0.0
    computed: TensorValue | None = None

    def __post_init__(self) -> None:
        self.before: PregraphValue | None = (
            None if self.source is None else (self.source, self.hint)
        )

    def tensor(self) -> TensorValue:
        """Return the 0-dim float64 tensor of the graph that holds the number."""
        if self.computed is None:
            assert self.source is not None
            if any(origin.late for origin in origins(self.source)) or type(self.hint) is bool:
                return self.as_constant()  # type: ignore[no-any-return]
            source = CallSource(scalar_tensor, (self.source,))
            with unset_fake_temporarily():
                example = scalar_tensor(self.hint)
            self.computed = self.tx.graph.tensor_input(example, source, ())
        return self.computed

    def python_type(self) -> type:
        return type(self.hint)

    def size(self) -> Value:
        """Return an int of a library as operations take a size, another number as a constant."""
        integral = scalar_library(self.hint) and is_whole(self.hint) and self.source is not None
        return (integral and by_python(self.tx, int, [self])) or constant(self.as_constant())

    def getattr_fallback(self, tx: Tracer, name: str) -> Value:
        library = scalar_library(self.hint)
        fixed = library is not None and name in library.attributes
        return tx.literal(getattr(self.hint, name)) if fixed else super().getattr_fallback(tx, name)

    def graph_arg(self) -> Any:
        return self.size().graph_arg()

    def example(self) -> Any:
        return self.size().example()

    def describe(self) -> str:
        return "a float that varies" if self.source is not None else "a float out of a tensor"

    def as_constant(self) -> Any:
        """Fix the number to its present value with a guard, and return it."""
        if self.source is None:
            raise Break("data-dependent-value", "a number read from a tensor is needed here")
        self.tx.guard_constant(self.source, self.hint)
        return self.hint

    def nb_binary(
        self, tx: Tracer, op: Operator, left: Value, right: Value, inplace: bool
    ) -> Value | None:
        if op.symbol in _UNSUPPORTED or not applies(left, right):
            return None
        return binary(tx, op.function, left, right)

    def nb_unary(self, tx: Tracer, symbol: str, function: Callable[[Any], Any]) -> Value | None:
        return unary(tx, function, self)

    def nb_bool(self, tx: Tracer) -> bool:
        if is_runtime(self):
            raise Break("data-dependent-branch", f"a {self.python_type().__name__} of each call")
        return compare(tx, operator.ne, self, constant(0.0)).nb_bool(tx)

    def reconstruct(self, out: Output) -> None:
        library = scalar_library(self.hint)
        out.call(library.of_tensor if library else torch.Tensor.item, [self.tensor()])


_UNSUPPORTED = ("&", "|", "^", "<<", ">>", "@")
"""Operators that no float has; the error names the symbol of the in-place form."""


SymFloatValue.methods = {"get:real": lambda tx, self: self}


def _is_operand(value: Value) -> bool:
    if isinstance(value, Constant):
        return type(value.value) in (int, bool) or may_vary(value.value)
    return isinstance(value, SymFloatValue) or (isinstance(value, SymValue) and value.is_data())


def with_size(left: Value, right: Value) -> bool:
    """Say whether these are a symbolic float and a symbolic size."""
    mixed = {type(left), type(right)} == {SymFloatValue, SymValue}
    return mixed and not any(isinstance(o, SymValue) and o.is_data() for o in (left, right))


def applies(left: Value, right: Value) -> bool:
    """Say whether these are two floats of which at least one is symbolic."""
    varies = isinstance(left, SymFloatValue) or isinstance(right, SymFloatValue)
    return with_size(left, right) or (varies and _is_operand(left) and _is_operand(right))


def compare_varying(
    tx: Tracer, function: Callable[[Any, Any], bool], left: Value, right: Value
) -> Value | None:
    """Compare floats, or results of deferred calls; None for other values."""
    runtime = isinstance(left, RuntimeValue) or isinstance(right, RuntimeValue)
    comparable = (RuntimeValue, SymFloatValue, Constant)
    deferred = runtime and isinstance(left, comparable) and isinstance(right, comparable)
    return compare(tx, function, left, right) if deferred or applies(left, right) else None


def _origin(value: Value) -> Source | None:
    return ConstSource(value.value) if isinstance(value, Constant) else value.source


def _hint(value: Value) -> Any:
    return value.value if isinstance(value, Constant) else value.hint  # type: ignore[attr-defined]


def binary(tx: Tracer, function: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
    """Evaluate an arithmetic operator on two floats, at least one of them symbolic."""
    sources = _origin(left), _origin(right)
    sized = with_size(left, right)
    result = by_python(tx, function, [left, right]) if sized or None not in sources else None
    if result is not None:
        return result
    if sized and _kind(left, right) is int:  # the graph's tensor is a float
        return constant(real_call(tx, function, left.as_constant(), right.as_constant()))
    zero = function is operator.truediv and sized and getattr(right, "sym", 1) == 0
    if sized and function in _ARITHMETIC[:4] and not zero:
        product = tx.graph.emit_plain("call_function", function, operands(left, right), {})
        return computed(tx, product)
    runtime = is_runtime(left) or is_runtime(right)
    if function not in _ARITHMETIC or not (runtime or None in sources):
        if None in sources and tx.graph.reads_data():
            return tx.graph.emit("call_function", function, symbols(tx, [left, right]), {})
        return constant(real_call(tx, function, left.as_constant(), right.as_constant()))
    if isinstance(left, SymValue) or isinstance(right, SymValue):
        return tx.graph.emit("call_function", function, symbols(tx, [left, right]), {})
    if None in sources:
        product = tx.graph.emit_plain("call_function", function, operands(left, right), {})
        return computed(tx, product, _before(tx, function, left, right))
    of_library = any(scalar_library(_hint(number)) for number in (left, right))
    checks = function is operator.truediv and not of_library
    if checks and compare(tx, operator.eq, right, constant(0)).nb_bool(tx):
        tx.raise_(ZeroDivisionError, "float division by zero")
    number = function(_hint(left), _hint(right))
    if type(number) is not _kind(left, right) or function is operator.pow:
        return constant(function(left.as_constant(), right.as_constant()))
    return sym_float(tx, CallSource(function, sources), number)  # type: ignore[arg-type]


def _kind(left: Value, right: Value) -> type:
    types = {left.python_type(), right.python_type()} - {bool}
    return float if float in types or not types else int


def sym_float(tx: Tracer, source: Source, number: float) -> SymFloatValue:
    """Return the float of a source; the same value each time, so that it is one input."""
    existing = tx.graph.floats.get(source)
    if (library := scalar_library(number)) and isinstance(source, CallSource):
        tx.guard(CallSource(library.is_quiet, ()), "CONST", True)
        if not library.is_quiet():
            raise Break(library.break_code, "floating point errors that are raised")
    if existing is None:
        existing = tx.graph.floats[source] = SymFloatValue(tx, source, number)
    return existing


_SAFE = (operator.neg, operator.pos, operator.abs, abs)
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
_WHOLE = (operator.floordiv, operator.mod, operator.neg)


def pregraph_value(tx: Tracer, value: Any) -> PregraphValue | None:
    """Return a source of a number or text that is readable before the graph, and its value now.

    `value` may also be a node of a symbolic number, or a number among its arguments.
    """
    operand = getattr(value, "node", value)
    if isinstance(value, SymFloatValue):
        return value.before
    if isinstance(value, RuntimeValue):
        return None if value.source is None else (value.source, value.hint)
    if isinstance(value, TextValue):
        return None if value.snapshot.tensors else _before(tx, value.function, *value.args)
    if isinstance(operand, Constant | int | float):
        number = getattr(operand, "value", operand)
        return ConstSource(number), number
    value_type = value.python_type() if isinstance(value, Value) else None
    if value_type in (tuple, slice, range) and value.is_constant():
        literal = value.as_constant()
        return ConstSource(literal), literal
    if value_type in (tuple, torch.Size) and value.items:
        return _before(tx, _packed, *map(tx.force, value.items))
    entry = tx.graph.input_at.get(operand) if isinstance(operand, Node) else None
    if entry is not None and type(entry.example) is int:
        return entry.source, entry.example
    if getattr(operand, "target", None) in (*_ARITHMETIC, *_WHOLE):
        return _before(tx, operand.target, *operand.args)
    size = operand.meta.get("example_value") if isinstance(operand, Node) else None
    return _of_sizes(tx, size.node.expr) if isinstance(size, torch.SymInt) else None


def _of_sizes(tx: Tracer, expr: Any) -> PregraphValue | None:
    """Return the size of a computed tensor, as far as it is whole arithmetic of inputs' sizes."""
    if expr.is_Integer:
        return ConstSource(int(expr)), int(expr)
    if expr.is_Symbol:
        node = tx.graph.symbols.get(expr)
        entry = None if node is None else tx.graph.input_at.get(node)
        return (entry.source, entry.example) if entry and type(entry.example) is int else None
    function = _SIZES.get(type(expr).__name__)
    parts = [_of_sizes(tx, arg) for arg in expr.args] if function else []
    known = [part for part in parts if part is not None]
    if function is None or len(known) < len(parts):
        return None
    source, number = known[0]
    for other, operand in known[1:]:
        source, number = CallSource(function, (source, other)), function(number, operand)
    return source, number


_SIZES: dict[str, Any] = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv}


def _packed(*items: Any) -> tuple[Any, ...]:
    return items


def by_python(tx: Tracer, function: Callable[..., Any], values: list[Value]) -> Value | None:
    """Evaluate a function of numbers in Python, before the graph; None where that is impossible.

    Where it would raise, or return another type, a guard fails.
    """
    evaluated = _before(tx, function, *values)
    if evaluated is None or any(origins(evaluated[0])):
        return None
    source, number = evaluated
    if type(number) is bool or getattr(number, "dtype", None) == "bool":
        tx.guard_constant(source, number)
        return constant(number)
    if number is NotImplemented:
        return constant(number)
    if type(number) in VARYING_TYPES and not may_vary(number):
        tx.guard(source, "TYPE", type(number))
        return RuntimeValue(number, source)
    if not may_vary(number) and type(number) is not int:
        return None
    if type(number) is int and not tx.symbolic:
        raise NeedsSymbols
    if function not in _ARITHMETIC[:3]:
        tx.guard(source, "TYPE", type(number))
    if may_vary(number):
        return sym_float(tx, source, number)
    result: Value | None = tx.graph.floats.get(source)
    if result is None and fits_graph(number):
        result = tx.graph.symint_input(number, source)
    if result is None:  # 0 and 1 are constants, too
        tx.guard_constant(source, number)
        return constant(number)
    tx.graph.floats[source] = result
    return result


def _before(tx: Tracer, function: Callable[..., Any], *operands: Any) -> PregraphValue | None:
    """Return the result of a function of numbers that are all known before the graph."""
    evaluated: list[PregraphValue] = []
    for operand in operands:
        pregraph = pregraph_value(tx, operand)
        if pregraph is None:
            return None
        evaluated.append(pregraph)
    try:
        number = function(*(hint for _, hint in evaluated))
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return CallSource(function, tuple(source for source, _ in evaluated)), number


def computed(
    tx: Tracer, value: Value, before: PregraphValue | None = None, example: float = 0.0
) -> Value:
    """Return the float, of the type of `example`, that a 0-dim tensor of the graph will hold."""
    assert isinstance(value, TensorValue)
    if value.fake.requires_grad:
        value = tx.graph.emit_plain("call_method", "detach", [value], {})
        assert isinstance(value, TensorValue)
    if value.fake.dtype is not torch.float64:
        value = tx.graph.emit_plain("call_method", "to", [value, constant(torch.float64)], {})
        assert isinstance(value, TensorValue)
    result = SymFloatValue(tx, None, example, value)
    result.before = before
    return result


def symbol(tx: Tracer, value: Value) -> Value:
    """Return a float that was read from a tensor as a symbolic number; others unchanged.

    Raises:
        Break: when such numbers are not captured.
    """
    if not isinstance(value, SymFloatValue) or value.source is not None:
        return value
    if not tx.graph.reads_data():
        value.as_constant()
    return tx.graph.emit_plain("call_method", "item", [value.tensor()], {})


def symbols(tx: Tracer, values: list[Value]) -> list[Value]:
    """Do so with each of several numbers."""
    return [symbol(tx, value) for value in values]


def operands(*values: Value) -> list[Value]:
    """Replace symbolic floats by tensors."""
    return [value.tensor() if isinstance(value, SymFloatValue) else value for value in values]


def unary(tx: Tracer, function: Callable[[Any], Any], value: SymFloatValue) -> Value:
    """Evaluate `-value` and the like, also functions of module `math`."""
    if value.source is None:
        in_graph = getattr(torch, function.__name__, None)
        if in_graph is None:
            return constant(real_call(tx, function, value.as_constant()))
        return computed(tx, tx.graph.emit_plain("call_function", in_graph, operands(value), {}))
    if is_runtime(value) and function not in _SAFE:
        return constant(real_call(tx, function, value.as_constant()))
    return sym_float(tx, CallSource(function, (value.source,)), real_call(tx, function, value.hint))


def compare(tx: Tracer, function: Callable[[Any, Any], bool], left: Value, right: Value) -> Value:
    """Evaluate a comparison and guard its outcome; a symbol where a tensor's number decides it.

    Raises:
        Break: when a side was read out of a tensor, and such numbers are not captured.
    """
    result = by_python(tx, function, [left, right])
    if result is not None:
        return result
    sources = _origin(left), _origin(right)
    if None in sources:
        if tx.graph.reads_data():
            return tx.graph.emit("call_function", function, symbols(tx, [left, right]), {})
        raise Break("data-dependent-branch", "a comparison of a number read from a tensor")
    try:
        outcome = function(_hint(left), _hint(right))
    except TypeError as error:
        raise Break("builtin-error", str(error)) from None
    source = CallSource(function, sources)  # type: ignore[arg-type]
    if any(origins(source)):
        return sym_float(tx, source, outcome)
    tx.guard_constant(source, outcome)
    return constant(outcome)


# ---- which floats from outside vary


def varies(tx: Tracer, datum: object, source: Source, always: bool = False) -> bool:
    """Say whether what a source gives has changed between calls (an object as its id)."""
    if tx.policy is None or isinstance(source, ConstSource):
        return False
    return bool(tx.policy.data_is_dynamic(source, datum, varies=always))


def vary(tx: Tracer, number: Any, source: Source) -> Value | None:
    """Return the value of data that may change from call to call; None for a constant.

    Learning rates vary from the start, since schedulers change them at every step; others once
    they have changed.
    """
    scalar = may_vary(number)
    if not scalar and type(number) not in VARYING_TYPES:
        return None
    group = _is_param_group(source.base)
    learning_rate = group and isinstance(source, ItemSource) and source.key == "lr"
    if not varies(tx, number, source, learning_rate):
        return None
    tx.guard(source, "TYPE", type(number))
    return sym_float(tx, source, number) if scalar else RuntimeValue(number, source)


def _is_param_group(source: Any) -> bool:
    groups = source.base if isinstance(source, ItemSource) else None
    return (
        isinstance(groups, ItemSource)
        and groups.key == "param_groups"
        and isinstance(groups.base, DictSource)
    )
