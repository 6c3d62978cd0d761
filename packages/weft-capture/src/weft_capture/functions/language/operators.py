"""Operators on every kind of value: the entry points of the opcodes and of module `operator`.

Tensors and symbolic numbers become graph nodes, constants are computed now, containers are combined
here, and everything else goes through the special methods of its class as in CPython
(Objects/abstract.c: the left operand's method first, the right one's first if it is of a subclass).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from weft_guards.sources import CallSource, ConstSource, is_literal

from weft_capture.breaks import Break
from weft_capture.functions.language.dicts import as_real, call_set, set_of, sought
from weft_capture.functions.language.identity import identical, one_object
from weft_capture.functions.language.text import percent_text
from weft_capture.functions.table import rule
from weft_capture.model.attributes import lookup
from weft_capture.model.constant import Constant, constant, fold, real_call
from weft_capture.model.containers import (
    ListValue,
    RangeValue,
    SequenceValue,
    SetValue,
    SizeValue,
    TupleValue,
)
from weft_capture.model.dicts import DictValue, DictView
from weft_capture.model.functions import FunctionValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Proxy, Raised, Tracer, Value, key_in
from weft_capture.python_compat import type_name
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.runtime_values import RuntimeValue, TextValue, join_texts
from weft_capture.tensors.tensor import SymValue, TensorValue

_NAMES = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
    "@": "matmul", "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
BINARY: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    symbol: (getattr(operator, f"__{name}__"), name) for symbol, name in _NAMES.items()
}
"""Symbol -> (function, name of the special method without underscores)."""

INPLACE: dict[str, Callable[[Any, Any], Any]] = {
    symbol: getattr(operator, f"__i{name}__") for symbol, name in _NAMES.items()
}

COMPARE: dict[str, tuple[Callable[[Any, Any], Any], str, str]] = {
    "<": (operator.lt, "lt", "gt"),
    "<=": (operator.le, "le", "ge"),
    ">": (operator.gt, "gt", "lt"),
    ">=": (operator.ge, "ge", "le"),
    "==": (operator.eq, "eq", "eq"),
    "!=": (operator.ne, "ne", "ne"),
}
"""Symbol -> (function, special method, the other operand's special method)."""

UNARY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "-": (operator.neg, "neg"),
    "+": (operator.pos, "pos"),
    "~": (operator.invert, "invert"),
}

_GRAPH = (TensorValue, SymValue)


def _is_number(value: Value) -> bool:
    return isinstance(value, _GRAPH) or (
        isinstance(value, Constant) and isinstance(value.value, (int, float, complex))
    )


def _as_ints(left: Value, right: Value) -> tuple[Value, Value]:
    """Return bools beside a symbolic number as the ints that they are: sympy refuses them."""
    if not any(isinstance(v, SymValue) and v.python_type() is not bool for v in (left, right)):
        return left, right
    return _as_int(left), _as_int(right)


def _as_int(value: Value) -> Value:
    is_bool = isinstance(value, Constant | SymValue) and value.python_type() is bool
    return constant(int(value.as_constant())) if is_bool else value


def _in_graph(left: Value, right: Value) -> bool:
    if isinstance(left, TensorValue) or isinstance(right, TensorValue):
        return True
    symbolic = isinstance(left, SymValue) or isinstance(right, SymValue)
    return symbolic and _is_number(left) and _is_number(right)


def binary(tx: Tracer, symbol: str, left: Value, right: Value) -> Value:
    """Evaluate `left symbol right`; a symbol that ends in "=" is the in-place form.

    Raises:
        Break: for operands that capture does not know.
        Raised: TypeError, when neither operand supports the operation.
    """
    plain = symbol.removesuffix("=")
    function = BINARY[plain][0]
    inplace = plain != symbol
    exact = INPLACE[plain] if inplace else function  # whose errors name the symbol
    if plain == "%" and isinstance(left, Constant) and isinstance(left.value, str):
        return percent_text(tx, left.value, right)
    left, right = _as_ints(left.as_float(tx, right), right.as_float(tx, left))
    if symbolic_scalars.applies(left, right):
        return symbolic_scalars.binary(tx, function, left, right)
    if _in_graph(left, right):
        if not _keeps_class(left, right):
            return by_methods(tx, symbol, left, right)
        # A number on the left makes `+=` an ordinary addition.
        target = INPLACE[plain] if inplace and isinstance(left, TensorValue) else function
        return tx.graph.emit("call_function", target, [left, right], {})
    if isinstance(left, (Constant, RangeValue)) and isinstance(right, (Constant, RangeValue)):
        return fold(tx, exact, [left, right], {})
    combined = _combine(tx, plain, left, right, inplace)
    if combined is not None:
        return combined
    if left.is_constant() and right.is_constant():
        return fold(tx, exact, [left, right], {})
    return by_methods(tx, symbol, left, right)


def combined(tx: Tracer, symbol: str, start: Value, items: Value) -> Value:
    """Combine items with an operator, one after the other."""
    return functools.reduce(functools.partial(binary, tx, symbol), items.unpack(tx), start)


def _keeps_class(left: Value, right: Value) -> bool:
    """False when the other operand is an object that may take over a tensor's operator."""
    return all(
        _is_number(value)
        or isinstance(value, symbolic_scalars.SymFloatValue)
        or value.is_constant()
        for value in (left, right)
    )


def _combine(tx: Tracer, symbol: str, left: Value, right: Value, inplace: bool) -> Value | None:
    """Concatenation, repetition and set algebra of containers; None where it does not apply."""
    if symbol == "+":
        texts = left.python_type() is right.python_type() is str
        if texts and any(isinstance(one, TextValue | RuntimeValue) for one in (left, right)):
            return join_texts(tx, [left, right])
        return _concatenate(tx, left, right, inplace)
    if symbol == "*":
        for items, count in ((left, right), (right, left)):
            if isinstance(items, SequenceValue) and isinstance(count, (Constant, SymValue)):
                if not hasattr(count.python_type(), "__index__"):
                    return fold(tx, operator.mul, [left, right], {})
                return _repeat(tx, items, count, inplace)
    if symbol in "&|-^" and _is_set(left):
        if isinstance(left, DictView) or _is_set(right):
            return _set_algebra(tx, symbol, left, right, inplace)
    if symbol == "|" and isinstance(left, DictValue) and isinstance(right, DictValue):
        return _merge(tx, left, right, inplace)
    return None


def _concatenate(tx: Tracer, left: Value, right: Value, inplace: bool) -> Value | None:
    if isinstance(left, ListValue) and inplace:
        left.call_method(tx, "extend", [right], {})
        return left
    if not isinstance(left, SequenceValue) or not isinstance(right, SequenceValue):
        return None
    if type(left.items) is not type(right.items):
        return None
    if type(left) is type(right) is TupleValue and not (left.items and right.items):
        return left if left.items else right
    items = [*left.items, *right.items]
    if isinstance(left, ListValue) or (
        isinstance(left, SizeValue) and all(_is_number(item) for item in right.items)
    ):
        return left.with_items(items)
    return TupleValue(items)


def _merge(tx: Tracer, left: DictValue, right: DictValue, inplace: bool) -> Value:
    left, right = (getattr(one, "inner", one) for one in (left, right))
    if left.cls is not right.cls and not inplace:
        raise Break("unsupported-arguments", "a union of dicts of different classes")
    target = left if inplace else left.copy()
    if inplace:
        tx.mutate(left)
    for key, value in right.entries.values():
        target.put(key, value)
    return target


def _repeat(tx: Tracer, items: Value, count: Value, inplace: bool) -> Value:
    assert isinstance(items, SequenceValue)
    times = operator.index(count.as_constant())
    if times == 1 and type(items) is TupleValue:
        return items
    if inplace and isinstance(items, ListValue):
        tx.mutate(items)
        items.items *= times
        return items
    return items.with_items(list(items.items) * times)


def _set_algebra(tx: Tracer, symbol: str, left: Value, right: Value, inplace: bool) -> Value:
    if isinstance(left, SetValue) and isinstance(right, SetValue):
        prefix = "i" if inplace and left.cls is set else ""
        return call_set(tx, left, f"__{prefix}{_NAMES[symbol]}__", right)
    items = [side.unpack(tx) for side in (left, right)]
    keys = [[item.tp_hash() for item in side] for side in items]
    known = dict(zip(keys[1] + keys[0], items[1] + items[0], strict=True))
    real = map(as_real, (left, right), keys)
    return set_of(real_call(tx, BINARY[symbol][0], *real), known)


def _is_set(value: Value) -> bool:
    return isinstance(value, SetValue) or (isinstance(value, DictView) and value.kind != "values")


def by_methods(tx: Tracer, symbol: str, left: Value, right: Value) -> Value:
    """Try the special methods of both operands in CPython's order."""
    plain = symbol.removesuffix("=")
    name = "divmod" if plain == "divmod()" else BINARY[plain][1]
    attempts = [(left, f"__{name}__", right), (right, f"__r{name}__", left)]
    kinds = left.python_type(), right.python_type()
    if kinds[0] is kinds[1]:
        attempts.pop()
    elif kinds[0] in kinds[1].__mro__:
        reflected = [getattr(kind, f"__r{name}__", None) for kind in kinds]
        if reflected[0] != reflected[1]:
            attempts.reverse()
    if plain != symbol:
        attempts.insert(0, (left, f"__i{name}__", right))
    result = _attempt(tx, attempts)
    if result is None:
        sides = {"+": (left,), "*": (left, right)}.get(plain, ())
        if any(map(_is_sequence, sides)):
            raise Break("builtin-error", f"{symbol} of sequences, whose errors differ")
        names = f"'{type_name(kinds[0])}' and '{type_name(kinds[1])}'"
        symbol = "** or pow()" if symbol == "**" else symbol
        tx.raise_(TypeError, f"unsupported operand type(s) for {symbol}: {names}")
    return result


def _is_sequence(value: Value) -> bool:
    plain = isinstance(_without_class(value), SequenceValue)
    return plain or issubclass(value.python_type(), str | bytes | bytearray)


def _is_foreign(receiver: Value, special: str, argument: Value) -> bool:
    """Say whether a builtin type's operator surely returns NotImplemented for this operand."""
    if isinstance(receiver, TensorValue):
        kind = argument.python_type()
        return isinstance(argument, UserObject) and not hasattr(kind, "__torch_function__")
    if isinstance(receiver, DictValue) and special in ("__or__", "__ror__"):
        return not issubclass(argument.python_type(), dict)
    if special in ("__mul__", "__imul__", "__rmul__") and _is_sequence(receiver):
        return not hasattr(argument.python_type(), "__index__")
    if not _is_plain(receiver) or isinstance(receiver.as_constant(), str | bytes):
        return False
    base = getattr(argument, "base", None)
    return not argument.is_constant() and (base is None or isinstance(base, TensorValue))


def _attempt(tx: Tracer, attempts: list[tuple[Value, str, Value]]) -> Value | None:
    for receiver, method, argument in attempts:
        known = lookup(receiver.python_type(), method)
        if known is None or _is_foreign(receiver, method, argument):
            continue
        result = receiver.call_method(tx, method, [argument], {})
        if not (isinstance(result, Constant) and result.value is NotImplemented):
            return result
    return None


def unary(tx: Tracer, symbol: str, value: Value) -> Value:
    """Evaluate `-value`, `+value` or `~value`."""
    function, name = UNARY[symbol]
    if isinstance(value, symbolic_scalars.SymFloatValue):
        return symbolic_scalars.unary(tx, function, value)
    if symbol == "~" and isinstance(value, SymValue):  # torch.SymInt has no `~`
        return binary(tx, "-", unary(tx, "-", value), constant(1))
    if isinstance(value, _GRAPH):
        return tx.graph.emit("call_function", function, [value], {})
    if isinstance(value, Constant):
        return fold(tx, function, [value], {})
    return value.call_method(tx, f"__{name}__", [], {})


def compare(tx: Tracer, symbol: str, left: Value, right: Value) -> Value:
    """Evaluate `left symbol right` for the six comparisons.

    Raises:
        Raised: TypeError, when an ordering is not supported.
    """
    if symbolic_scalars.compares(left, right):
        return symbolic_scalars.compare(tx, COMPARE[symbol][0], left, right)
    return _compare(tx, symbol, left, right)


def _compare(tx: Tracer, symbol: str, left: Value, right: Value) -> Value:
    function = COMPARE[symbol][0]
    left, right = _as_ints(left, right)
    if _in_graph(left, right) and _keeps_class(left, right):
        none = any(isinstance(v, Constant) and v.value is None for v in (left, right))
        if none and symbol in ("==", "!="):
            return constant(symbol == "!=")
        return tx.graph.emit("call_function", function, [left, right], {})
    if isinstance(left, Constant) and isinstance(right, Constant):
        return fold(tx, function, [left, right], {})
    dicts = isinstance(left, DictValue) and isinstance(right, DictValue)
    if dicts or (isinstance(left, SequenceValue) and isinstance(right, SequenceValue)):
        return _compare_real(tx, function, left, right)
    views = [one for one in (left, right) if isinstance(one, DictView) and one.kind == "items"]
    if len(views) == 2:
        return tx.literal(function(*(_with_proxies(tx, one.owner).items() for one in views)))
    if _is_set(left) and _is_set(right):
        keys = ({item.tp_hash() for item in side.unpack(tx)} for side in (left, right))
        return constant(function(*keys))
    by_value = not isinstance(left, FunctionValue) and left.is_constant()
    if by_value and right.is_constant():
        return fold(tx, function, [left, right], {})
    return _compare_by_methods(tx, symbol, left, right)


def _compare_by_methods(tx: Tracer, symbol: str, left: Value, right: Value) -> Value:
    _, name, mirrored = COMPARE[symbol]
    attempts = [(left, f"__{name}__", right), (right, f"__{mirrored}__", left)]
    kinds = left.python_type(), right.python_type()
    if kinds[0] is not kinds[1] and kinds[0] in kinds[1].__mro__:
        attempts.reverse()
    for receiver, method, argument in attempts:
        # `object.__ne__` turns round what the same object's `__eq__` says.
        by_eq = method == "__ne__" and _is_default(receiver, method)
        asked = "__eq__" if by_eq else method
        if not _is_default(receiver, asked):
            result = _attempt(tx, [(receiver, asked, argument)])
            if result is not None:
                return constant(not result.nb_bool(tx)) if by_eq else result
    plain = [_without_class(value) for value in (left, right)]
    if plain != [left, right]:
        try:
            return compare(tx, symbol, *plain)
        except Raised as raised:
            if issubclass(raised.value.python_type(), TypeError):  # it names the classes
                raise Break("builtin-error", f"an error of {symbol}") from None
            raise
    if symbol in ("==", "!="):
        return constant(one_object(tx, left, right) == (symbol == "=="))
    names = f"'{type_name(kinds[0])}' and '{type_name(kinds[1])}'"
    tx.raise_(TypeError, f"'{symbol}' not supported between instances of {names}")


def _without_class(value: Value) -> Value:
    """Return the builtin part of an instance of a subclass of dict, list, int and the like."""
    if isinstance(value, UserObject) and value.base is not None:
        return value.base
    return value


def _is_default(value: Value, method: str) -> bool:
    """Say whether a comparison is the one every object inherits, or that of a known container."""
    kind = value.python_type()
    known = isinstance(value, SequenceValue | SetValue | DictView | DictValue | SymValue)
    return known or _is_plain(value) or getattr(kind, method, None) is getattr(object, method, None)


def _is_plain(value: Value) -> bool:
    """Say whether this is a constant of a builtin class, whose operators know builtin classes."""
    return isinstance(value, Constant) and type(value.value).__module__ == "builtins"


def equal(tx: Tracer, left: Value, right: Value) -> bool:
    """Evaluate `left is right or left == right` as a Python bool, as containers do."""
    if one_object(tx, left, right) or compare(tx, "==", left, right).nb_bool(tx):
        return True
    hint = getattr(left, "hint", None)
    return hint != hint and identical(tx, left, right)  # NaN


def _compare_real(tx: Tracer, function: Any, left: Any, right: Any) -> Value:
    """Compare two containers as the interpreter does, item by item."""
    sizes = [len(side.unpack(tx)) for side in (left, right)]
    made = [_with_proxies(tx, side) for side in (left, right)]
    result = real_call(tx, function, *made)
    if sizes != [len(side.unpack(tx)) for side in (left, right)]:
        raise Break("container-mutation", "a container that changes while it is compared")
    return tx.literal(result)


def _with_proxies(tx: Tracer, value: Any) -> Any:
    def proxy(item: Value) -> Proxy:
        return Proxy(tx, item)

    if isinstance(value, DictValue):
        return value.build(proxy, key=lambda key: key.tp_hash())
    return value.build(proxy)


def contains(tx: Tracer, container: Value, item: Value) -> Value:
    """Evaluate `item in container`."""
    if isinstance(container, DictValue):
        return constant(container.find(tx, item) is not None)
    if isinstance(container, SetValue):
        return constant(sought(item) in container.entries)
    if isinstance(container, DictView) and container.kind == "keys":
        return constant(key_in(dict, item) in container.owner.entries)
    if isinstance(container, Constant | RangeValue) and item.is_constant():
        return fold(tx, operator.contains, [container, item], {})
    if isinstance(container, TensorValue):
        raise Break("data-dependent-value", "in on a tensor")
    method = lookup(container.python_type(), "__contains__")
    builtin = isinstance(container, (SequenceValue, RangeValue, DictView))
    if method is not None and not builtin:
        if method[1] is None:
            kind = container.python_type()
            tx.raise_(TypeError, f"'{kind.__name__}' object is not a container")
        return constant(container.call_method(tx, "__contains__", [item], {}).nb_bool(tx))
    if isinstance(item, SymValue) and isinstance(container, SequenceValue):
        found = _among_constants(tx, container, item)
        if found is not None:
            return constant(found)
    try:
        items = stepped(tx, container)
    except Raised as raised:
        if issubclass(raised.value.python_type(), TypeError):  # (CPython: _PySequence_IterSearch)
            raise Break("builtin-error", "in on what is not iterable") from None
        raise
    return constant(any(equal(tx, item, each) for each in items))


def _among_constants(tx: Tracer, container: SequenceValue, item: SymValue) -> bool | None:
    """Ask with one guard whether a number that varies is among literals; None for anything else."""
    entry, items = tx.graph.input_at.get(item.node), [tx.force(one) for one in container.items]
    known = tuple(one.value for one in items if isinstance(one, Constant) and is_literal(one.value))
    if entry is None or item.source is None or len(known) != len(items):
        return None
    found = entry.example in known
    tx.guard(CallSource(operator.contains, (ConstSource(known), item.source)), "CONST", found)
    return found


def stepped(tx: Tracer, items: Value) -> Iterator[Value]:
    """Yield what a value gives, one by one."""
    return iter(functools.partial(items.tp_iter(tx).tp_iternext, tx), None)


# ---- module operator: the operators as functions


def _two(evaluate: Any, symbol: str, tx: Tracer, left: Value, right: Value) -> Any:
    return evaluate(tx, symbol, left, right)


def _one(symbol: str, tx: Tracer, value: Value) -> Value:
    return unary(tx, symbol, value)


for _symbol in BINARY:
    rule(BINARY[_symbol][0])(functools.partial(_two, binary, _symbol))
    rule(INPLACE[_symbol])(functools.partial(_two, binary, f"{_symbol}="))
for _symbol in COMPARE:
    rule(COMPARE[_symbol][0])(functools.partial(_two, compare, _symbol))
for _symbol in UNARY:
    rule(UNARY[_symbol][0])(functools.partial(_one, _symbol))
rule(operator.inv)(functools.partial(_one, "~"))


@rule(operator.getitem)
def _getitem(tx: Tracer, items: Value, key: Value) -> Value:
    return items.mp_subscript(tx, key)


@rule(operator.setitem)
def _setitem(tx: Tracer, items: Value, key: Value, item: Value) -> None:
    items.mp_ass_subscript(tx, key, item)


@rule(operator.contains)
def _contains(tx: Tracer, items: Value, item: Value) -> Value:
    return contains(tx, items, item)
