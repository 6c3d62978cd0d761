"""Python's data model on values: the generic algorithms of operators.

Each function mirrors the CPython function that its docstring names. It calls a value's slots: the
methods of `Value` with CPython's names (`nb_binary`, `tp_richcompare`, `tp_iter`, ...), and special
methods, which are rows of a method table or functions of a class of the program.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weft_capture.breaks import Break
from weft_capture.model.attributes import is_python_code, lookup
from weft_capture.model.constant import Constant, Varying, constant, fold
from weft_capture.model.containers import Container, SequenceValue
from weft_capture.model.iterators import OVER_ITEMS
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import InstanceValue, Raised, Tracer, Value
from weft_capture.python_compat import type_name


@dataclass(frozen=True)
class Operator:
    """An operator of two operands, or a comparison.

    Args:
        symbol: as the program writes it, in messages.
        function: what evaluates it on real objects; of the in-place form in `inplace`.
        name: of the special method, without underscores.
        reflected: of the other operand's special method.
    """

    symbol: str
    function: Callable[[Any, Any], Any]
    name: str
    reflected: str
    inplace: Callable[[Any, Any], Any] | None = None


_BINARY = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
    "@": "matmul", "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
BINARY = {
    symbol: Operator(
        symbol,
        getattr(operator, f"__{name}__"),
        name,
        f"r{name}",
        getattr(operator, f"__i{name}__"),
    )
    for symbol, name in _BINARY.items()
}
DIVMOD = Operator("divmod()", divmod, "divmod", "rdivmod")
COMPARE = {
    symbol: Operator(symbol, getattr(operator, name), name, reflected)
    for symbol, name, reflected in (
        ("<", "lt", "gt"), ("<=", "le", "ge"), (">", "gt", "lt"), (">=", "ge", "le"),
        ("==", "eq", "eq"), ("!=", "ne", "ne"),
    )
}  # fmt: skip
UNARY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "-": (operator.neg, "neg"),
    "+": (operator.pos, "pos"),
    "~": (operator.invert, "invert"),
    "abs": (operator.abs, "abs"),
}
"""Symbol -> (function, name of the special method without underscores)."""


def _is_data(value: Value) -> bool:
    """Say whether an operator is evaluated on the constant that a value equals."""
    return value.is_constant() and not isinstance(value, Container)


def binary(tx: Tracer, symbol: str, left: Value, right: Value) -> Value:
    """Evaluate `left symbol right`; a symbol that ends in "=" is the in-place form.

    CPython: PyNumber_Add and its like, and binary_iop1 of Objects/abstract.c.

    Raises:
        Break: for operands that capture does not know.
        Raised: TypeError, when neither operand supports the operation.
    """
    plain = symbol.removesuffix("=")
    op, inplace = BINARY[plain], plain != symbol
    for operand in (left, right):
        result = operand.nb_binary(tx, op, left, right, inplace)
        if result is not None:
            return result
    if _is_data(left) and _is_data(right):
        # The error of the in-place function names its symbol.
        return fold(tx, op.inplace if inplace else op.function, [left, right], {})
    return by_methods(tx, op, left, right, inplace)


def by_methods(tx: Tracer, op: Operator, left: Value, right: Value, inplace: bool = False) -> Value:
    """Try the special methods of both operands (CPython: binary_op1, SLOT1BINFULL)."""
    for receiver, name, argument in _attempts(op, left, right, inplace):
        result = _attempt(tx, receiver, name, argument)
        if result is not None:
            return result
    operands = {"+": (left,), "*": (left, right)}.get(op.symbol, ())
    symbol = f"{op.symbol}=" if inplace else op.symbol
    if any(map(is_sequence, operands)):
        raise Break("builtin-error", f"{symbol} of sequences, whose error differs")
    symbol = "** or pow()" if symbol == "**" else symbol
    names = f"'{type_name(left.python_type())}' and '{type_name(right.python_type())}'"
    tx.raise_(TypeError, f"unsupported operand type(s) for {symbol}: {names}")


Attempt = tuple[Value, str, Value]
"""The operand that is asked, its special method, and the other operand."""


def _attempts(op: Operator, left: Value, right: Value, inplace: bool) -> list[Attempt]:
    """Return the calls that an operator tries, in CPython's order."""
    attempts = [(left, f"__{op.name}__", right), (right, f"__{op.reflected}__", left)]
    left_type, right_type = left.python_type(), right.python_type()
    if left_type is right_type:
        attempts.pop()
    elif left_type in right_type.__mro__:
        reflected = [getattr(cls, f"__{op.reflected}__", None) for cls in (left_type, right_type)]
        if reflected[0] != reflected[1]:
            attempts.reverse()
    elif _is_number_slot(op, left, right):
        attempts.reverse()
    if not inplace:
        return attempts
    in_place = (left, f"__i{op.name}__", right)
    if _is_overridden(left_type, f"__{op.name}__", f"__{op.reflected}__"):
        if is_sequence(left) and not _is_overridden(left_type, in_place[1]):
            raise Break("builtin-error", "an in-place operator of a sequence with number slots")
    of_program = left_type.__flags__ & _HEAP_TYPE  # it has `nb_inplace_add` for its `__iadd__`
    if _is_number_slot(op, left, right) and not (of_program and op.symbol == "+"):
        # sq_inplace_concat and sq_inplace_repeat come after the other's number slots.
        by_right = [attempt for attempt in attempts if attempt[0] is right]
        return [*by_right, in_place, *(attempt for attempt in attempts if attempt[0] is left)]
    # PyNumber_InPlaceMultiply asks the right one's sequence slots where the left one has none.
    has_slots = left_type.__flags__ & _HEAP_TYPE or hasattr(left_type, "__len__")
    if op.symbol == "*" and has_slots and is_sequence(right):
        if not _is_overridden(right_type, "__rmul__"):
            attempts = [attempt for attempt in attempts if attempt[0] is left]
    return [in_place, *attempts]


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes of the program have sequence slots


def _is_overridden(cls: type, *names: str) -> bool:
    """Say whether a class has one of these methods in Python, and so a number slot for it."""
    found = (lookup(cls, name) for name in names)
    return any(entry is not None and is_python_code(entry[1]) for entry in found)


def _is_number_slot(op: Operator, left: Value, right: Value) -> bool:
    """Say whether the right operand's number slot comes before the left one's sequence slot.

    CPython: PyNumber_Add and PyNumber_Multiply ask sq_concat and sq_repeat last.
    """
    if op.symbol not in ("+", "*") or not isinstance(right, InstanceValue | SequenceValue):
        return False
    if not is_sequence(left) or _is_overridden(left.python_type(), f"__{op.name}__"):
        return False
    right_type, reflected = right.python_type(), f"__{op.reflected}__"
    # Sequences in C have `__rmul__`, which stands for sq_repeat, but no `__radd__`.
    in_c = op.symbol == "+" and lookup(right_type, reflected) is not None
    return in_c or _is_overridden(right_type, reflected)


def is_sequence(value: Value) -> bool:
    """Say whether a value is a list, tuple, string or the like, or of a subclass."""
    plain = isinstance(without_class(value), SequenceValue)
    return plain or issubclass(value.python_type(), str | bytes | bytearray)


def _attempt(tx: Tracer, receiver: Value, name: str, argument: Value) -> Value | None:
    """Call a special method for an operator; None for NotImplemented."""
    cls, argument_type = receiver.python_type(), argument.python_type()
    if lookup(cls, name) is None or receiver.declines(name, argument):
        return None
    if cls is bytearray and "mul" in name and not hasattr(argument_type, "__index__"):
        if name == "__rmul__" and is_sequence(argument):
            return None
        text = f"can't multiply sequence by non-int of type '{type_name(argument_type)}'"
        tx.raise_(TypeError, text)  # CPython: sequence_repeat
    result = receiver.call_method(tx, name, [argument], {})
    declined = isinstance(result, Constant) and result.value is NotImplemented
    return None if declined else result


def unary(tx: Tracer, symbol: str, value: Value) -> Value:
    """Evaluate `-value`, `+value`, `~value` or `abs(value)` (CPython: PyNumber_Negative, ...)."""
    function, name = UNARY[symbol]
    result = value.nb_unary(tx, symbol, function)
    if result is not None:
        return result
    if isinstance(value, Constant):
        return fold(tx, function, [value], {})
    return value.call_method(tx, f"__{name}__", [], {})


def combined(tx: Tracer, symbol: str, start: Value, items: Value) -> Value:
    """Combine items with an operator, one after the other."""
    return functools.reduce(functools.partial(binary, tx, symbol), items.unpack(tx), start)


# ---- comparison


def compare(tx: Tracer, symbol: str, left: Value, right: Value) -> Value:
    """Evaluate `left symbol right` for the six comparisons (CPython: do_richcompare).

    Raises:
        Raised: TypeError, when an ordering is not supported.
    """
    op = COMPARE[symbol]
    for operand in (left, right):
        result = operand.tp_richcompare(tx, op, left, right)
        if result is not None:
            return result
    if _is_data(left) and _is_data(right) and left.compares_by_value:
        return fold(tx, op.function, [left, right], {})
    attempts = [(left, f"__{op.name}__", right), (right, f"__{op.reflected}__", left)]
    operand_types = left.python_type(), right.python_type()
    if operand_types[0] is not operand_types[1] and operand_types[0] in operand_types[1].__mro__:
        attempts.reverse()
    for receiver, name, argument in attempts:
        # `object.__ne__` inverts the result of the same object's `__eq__`.
        by_eq = name == "__ne__" and receiver.inherits_comparison(name)
        method_name = "__eq__" if by_eq else name
        if not receiver.inherits_comparison(method_name):
            result = _attempt(tx, receiver, method_name, argument)
            if result is not None:
                return constant(not result.nb_bool(tx)) if by_eq else result
    return _compare_bases(tx, op, left, right)


def _compare_bases(tx: Tracer, op: Operator, left: Value, right: Value) -> Value:
    """Compare the builtin parts of instances, then identities (CPython: do_richcompare)."""
    plain = [without_class(value) for value in (left, right)]
    if plain != [left, right]:
        with unsure_errors(f"an error of {op.symbol}"):  # the message names the classes
            return compare(tx, op.symbol, *plain)
    if op.symbol in ("==", "!="):
        return constant(one_object(tx, left, right) == (op.symbol == "=="))
    names = f"'{type_name(left.python_type())}' and '{type_name(right.python_type())}'"
    tx.raise_(TypeError, f"'{op.symbol}' not supported between instances of {names}")


def without_class(value: Value) -> Value:
    """Return the builtin part of an instance of a subclass of dict, list, int and the like."""
    base: Value | None = getattr(value, "base", None) if isinstance(value, InstanceValue) else None
    return value if base is None else base


def one_object(tx: Tracer, left: Value, right: Value) -> bool:
    """Say whether two values are one object; numbers and texts only where they are one value.

    That two of them are different objects is not guarded: equal ones may be one object or two.
    """
    same = left is right or left.same_object(right) or right.same_object(left)
    alike = left.python_type() is right.python_type() and not isinstance(left, Constant | Varying)
    if alike and not (same or left.source is None or right.source is None):
        tx.guard_distinct(left.source, right.source)
    return same


@contextmanager
def unsure_errors(detail: str) -> Iterator[None]:
    """Break at a TypeError of the program whose message is not the interpreter's."""
    try:
        yield
    except Raised as raised:
        if issubclass(raised.value.python_type(), TypeError):
            raise Break("builtin-error", detail) from None
        raise


def optional_attribute(tx: Tracer, value: Value, name: str) -> Value | None:
    """Read an attribute; None at an AttributeError (CPython: PyObject_GetOptionalAttr)."""
    try:
        return value.tp_getattro(tx, name)
    except Raised as raised:
        if issubclass(raised.value.python_type(), AttributeError):
            return None
        raise


# ---- containers


def contains(tx: Tracer, container: Value, item: Value) -> Value:
    """Evaluate `item in container` (CPython: PySequence_Contains)."""
    method = lookup(container.python_type(), "__contains__")
    if isinstance(container, Constant) and item.is_constant():
        return fold(tx, operator.contains, [container, item], {})
    if method is None:
        return constant(contains_by_iteration(tx, container, item))
    if method[1] is None:
        cls = container.python_type()
        tx.raise_(TypeError, f"'{cls.__name__}' object is not a container")
    return constant(container.call_method(tx, "__contains__", [item], {}).nb_bool(tx))


def contains_by_iteration(tx: Tracer, container: Value, item: Value) -> bool:
    """Look for an equal item, one by one (CPython: _PySequence_IterSearch)."""
    with unsure_errors("in on what is not iterable"):
        items = stepped(tx, container)
    return any(tx.is_equal(item, each) for each in items)


def stepped(tx: Tracer, items: Value) -> Iterator[Value]:
    """Yield the items of a value, one by one."""
    return iter(functools.partial(items.tp_iter(tx).tp_iternext, tx), None)


def length(tx: Tracer, value: Value) -> Value:
    """Evaluate `len(value)` (CPython: PyObject_Size, slot_sq_length)."""
    if isinstance(value, Constant):
        return fold(tx, len, [value], {})
    cls = value.python_type()
    method = lookup(cls, "__len__")
    if method is None:
        tx.raise_(TypeError, f"object of type '{type_name(cls)}' has no len()")
    size = value.sq_length(tx)
    if is_python_code(method[1]):
        is_int = size.python_type() is int
        if not is_int or compare(tx, "<", size, constant(0)).nb_bool(tx) or not _is_small(size):
            raise Break("builtin-error", f"a length {size.describe()}")
    return size


def _is_small(size: Value) -> bool:
    return not size.is_constant() or size.as_constant() <= _SSIZE_MAX


_SSIZE_MAX = (1 << 63) - 1


# ---- iteration, with the same calls in the same order as the interpreter's C code


_HINT = "__length_hint__"


def steps(tx: Tracer, items: Value, hinted: bool = True) -> Iterator[Value]:
    """Yield the items of a value, one by one.

    Args:
        hinted: read an object's length first, as `list` does (PyObject_LengthHint).
    """
    if not isinstance(items, UserObject) and not hasattr(items.python_type(), "__next__"):
        yield from items.unpack(tx)  # this runs no code of the program
        return
    iterator = items.tp_iter(tx)
    if hinted and isinstance(items, UserObject) and any(map(items.has_special, ("__len__", _HINT))):
        tx.builtin(operator.length_hint, items)
    elif hinted and items.python_type() in OVER_ITEMS and getattr(items, "frame", None) is not None:
        sequence = items.args[0]  # type: ignore[attr-defined]
        if lookup(sequence.python_type(), "__len__") is not None:
            tx.builtin(len, sequence)
    while (item := iterator.tp_iternext(tx)) is not None:
        yield item


def listed(tx: Tracer, items: Value) -> list[Value]:
    """Return the items as PySequence_Fast does, which calls `iter` of the iterator, too.

    Raises:
        Break: when it is not iterable: the message depends on the C function.
    """
    if not hasattr(items.python_type(), "__iter__") and not isinstance(items, UserObject):
        raise Break("builtin-error", f"{items.describe()} as a sequence")
    with unsure_errors(f"{items.describe()} as a sequence"):
        iterator = items.tp_iter(tx) if isinstance(items, UserObject) else items
    return list(steps(tx, iterator))


def leads_to(pending: list[Value], target: Value) -> bool:
    """Say whether one of these values is, or refers to, a new value, directly or indirectly."""
    seen: set[int] = set()
    for value in pending:  # breadth first: the list grows
        if value is target:
            return True
        if id(value) not in seen and value.source is None:
            seen.add(id(value))
            pending.extend(value.tp_traverse())
    return False
