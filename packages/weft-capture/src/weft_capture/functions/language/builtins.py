"""Builtin functions and classes, module `operator`, and the methods of generators and iterators."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch

from weft_capture import polyfills
from weft_capture.breaks import Break
from weft_capture.functions.generators import CALLS, GeneratorValue
from weft_capture.functions.language.type_checks import converted, identical, indexed
from weft_capture.functions.super_methods import SuperValue
from weft_capture.functions.table import pure, rule, rule_of_each
from weft_capture.model.attributes import lookup
from weft_capture.model.constant import (
    FALSE,
    NONE,
    Constant,
    constant,
    fold,
    real_call,
)
from weft_capture.model.containers import (
    ListValue,
    RangeValue,
    SequenceValue,
    SetValue,
    SliceValue,
    TupleValue,
)
from weft_capture.model.dicts import DictValue, DictView
from weft_capture.model.exceptions import ExceptionValue, chain
from weft_capture.model.iterators import (
    CombinedIterator,
    IteratorValue,
    SequenceIterator,
    iterated,
)
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Raised, Tracer, Value, method
from weft_capture.model.proxy import Proxy
from weft_capture.model.slots import (
    BINARY,
    COMPARE,
    DIVMOD,
    UNARY,
    binary,
    by_methods,
    compare,
    contains,
    length,
    stepped,
    steps,
    unary,
)
from weft_capture.python_compat import (
    SORT_TAKES_TRUTH,
    THROW_WARNS_OF_CLASSES,
    TUPLE_ASKS_LENGTH,
    type_name,
)
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.runtime_values import TextValue
from weft_capture.tensors.symbolic_scalars import SymFloatValue
from weft_capture.tensors.tensor import SymValue, TensorValue, selected

pure(bin, chr, hex, oct, ord, bytes, complex, float.fromhex, int.from_bytes, str.maketrans)


# Size, truth and identity.


rule(len)(length)


@rule(bool, operator.truth)
def _bool(tx: Tracer, value: Value = FALSE) -> Value:
    if isinstance(value, SymValue) and value.python_type() is bool:
        return value
    if isinstance(value, TensorValue):
        return value.call_method(tx, "__bool__", [], {})
    return constant(value.nb_bool(tx))


rule(operator.not_)(lambda tx, value: constant(not value.nb_bool(tx)))
rule(operator.is_)(lambda tx, left, right: constant(identical(tx, left, right)))
rule(operator.is_not)(lambda tx, left, right: constant(not identical(tx, left, right)))
rule(callable)(lambda tx, value: constant(lookup(value.python_type(), "__call__") is not None))


@rule(super)
def _super(tx: Tracer, *of: Value) -> Value:
    if of:
        cls, owner = of
        return SuperValue(cls.as_constant(), owner)
    frame = tx.frame
    assert frame is not None
    code = frame.function.code
    if "__class__" not in frame.cells or not code.co_argcount:
        missing = "__class__ cell not found" if code.co_argcount else "no arguments"
        tx.raise_(RuntimeError, f"super(): {missing}")
    first = code.co_varnames[0]
    instance = frame.locals.get(first) or frame.cells[first].tp_getattro(tx, "cell_contents")
    cls = frame.cells["__class__"].tp_getattro(tx, "cell_contents")
    return SuperValue(cls.as_constant(), tx.force(instance))


# Numbers.

_IN_GRAPH = {int: torch.sym_int, float: torch.sym_float, max: torch.sym_max, min: torch.sym_min}


@rule_of_each(int, float)
def _number(number_type: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    if args and isinstance(args[0], symbolic_scalars.SymFloatValue):
        result = symbolic_scalars.by_python(tx, number_type, list(args))
        if result is not None or number_type is float:
            return result or args[0]
        args = (symbolic_scalars.symbol(tx, args[0]), *args[1:])
    if args and isinstance(args[0], TensorValue):
        return args[0].call_method(tx, f"__{number_type.__name__}__", [], {})
    if args and isinstance(args[0], SymValue):
        if args[0].python_type() is number_type:
            return args[0]
        whole = symbolic_scalars.by_python(tx, int, list(args)) if number_type is int else None
        return whole or tx.graph.emit("call_function", _IN_GRAPH[number_type], list(args), {})
    if len(args) != 1 or kwargs or args[0].is_constant():
        return fold(tx, number_type, list(args), kwargs)
    name = f"__{number_type.__name__}__"
    if not isinstance(args[0], UserObject):
        return args[0].call_method(tx, name, [], {})
    return converted(tx, args[0], name if hasattr(args[0].cls, name) else "__index__", number_type)


@rule(pow)
def _pow(tx: Tracer, base: Value, exponent: Value, *mod: Value) -> Value:
    return fold(tx, pow, [base, exponent, *mod], {}) if mod else binary(tx, "**", base, exponent)


@rule(round)
def _round(tx: Tracer, value: Value, *digits: Value) -> Value:
    if isinstance(value, UserObject) and value.has_special("__round__"):
        return value.special(tx, "__round__").tp_call(tx, list(digits), {})
    if isinstance(value, symbolic_scalars.SymFloatValue) and value.source is None:
        return TextValue(tx, round, [value, *digits], cls=float if digits else int)
    return fold(tx, round, [value, *digits], {})


@rule(divmod)
def _divmod(tx: Tracer, left: Value, right: Value) -> Value:
    if isinstance(left, UserObject | TensorValue) or isinstance(right, UserObject | TensorValue):
        return by_methods(tx, DIVMOD, left, right)
    if left.is_constant() and right.is_constant():
        return fold(tx, divmod, [left, right], {})
    try:
        return tx.tuple_of([binary(tx, "//", left, right), binary(tx, "%", left, right)])
    except Raised:  # with the message of `//`
        raise Break("builtin-error", "an error of divmod") from None


def _sort_key(tx: Tracer, key: Value) -> Any:
    return None if key is NONE else Proxy(tx, key)


@rule_of_each(max, min)
def _extremum(
    function: Any, tx: Tracer, /, *args: Value, key: Value = NONE, default: Value | None = None
) -> Value:
    if key is NONE and default is None and len(args) == 1 and isinstance(args[0], RangeValue):
        return fold(tx, function, [*args], {})
    assert args  # without arguments the real function raises
    items: Iterable[Value] = steps(tx, args[0], hinted=False) if len(args) < 2 else args
    left, head = iter(items), list[Value]()
    for item in left:
        head.append(item)
        if key is not NONE or not issubclass(item.python_type(), int | float):
            break  # the next item follows a call of the key or a comparison
    if key is NONE and default is None and len(head) == 1 and type(head[0]) is TensorValue:
        return _extreme_tensor(tx, function, [*head, *left])
    alike = key is NONE and len({item.python_type() for item in head}) == 1
    if alike and any(isinstance(item, SymValue) for item in head):
        # A symbolic extremum keeps the sizes dynamic, where a comparison would guard on them.
        def join(left: Value, right: Value) -> Value:
            return tx.graph.emit("call_function", _IN_GRAPH[function], [left, right], {})

        return functools.reduce(join, head)
    keywords = {} if default is None else {"default": Proxy(tx, default)}
    real = (Proxy(tx, item) for item in itertools.chain(head, left))
    return tx.literal(real_call(tx, function, real, key=_sort_key(tx, key), **keywords))


def _extreme_tensor(tx: Tracer, function: Any, items: list[Value]) -> Value:
    """Select one of several 0-dim tensors, by comparisons in the graph.

    Raises:
        Break: for other items, or where the gradient of the selected one alone would be needed.
    """
    tensors: list[Any] = [tx.force(item) for item in items]
    if all(type(tensor) is TensorValue for tensor in tensors):
        fakes = [tensor.fake for tensor in tensors]
        layouts = {(fake.dtype, fake.device, fake.dim(), fake.requires_grad) for fake in fakes}
    else:
        layouts = set()
    if layouts != {(tensors[0].fake.dtype, tensors[0].fake.device, 0, False)}:
        what = f"the {function.__name__} of tensors and other objects, or with gradients"
        raise Break("data-dependent-branch", what)
    best, *others = tensors
    for item in others:
        is_better = compare(tx, ">" if function is max else "<", item, best)
        best = tx.call_builtin(torch.where, [is_better, item, best], {})
    return selected(tx, best, tensors)


@rule(sum)
def _sum(tx: Tracer, items: Value, start: Value = Constant(0)) -> Value:  # noqa: B008 - immutable
    if isinstance(items, RangeValue) and isinstance(start, Constant):
        return fold(tx, sum, [items, start], {})
    if issubclass(start.python_type(), str | bytes | bytearray):
        raise Break("builtin-error", "sum of strings")
    numbers, left, exact = [start], stepped(tx, items), (int, float)
    while (item := next(left, None)) is not None:
        operand_types = start.python_type(), item.python_type()
        if operand_types[0] not in exact or operand_types[1] not in (*exact, bool):
            first = binary(tx, "+", _total(tx, numbers), item)
            return functools.reduce(functools.partial(binary, tx, "+"), left, first)
        numbers.append(item)
    return _total(tx, numbers)


def _total(tx: Tracer, numbers: list[Value]) -> Value:
    """Add numbers as `sum` does, which from CPython 3.12 on compensates rounding errors."""
    if all(isinstance(number, Constant) for number in numbers):
        start, *addends = (number.as_constant() for number in numbers)
        return constant(real_call(tx, sum, addends, start))
    if not _COMPENSATES or all(number.python_type() is not float for number in numbers):
        return functools.reduce(functools.partial(binary, tx, "+"), numbers)
    if (result := symbolic_scalars.by_python(tx, _added, numbers)) is not None:
        return result
    operands: list[Value] = [
        n.tensor() if isinstance(n, SymFloatValue) else constant(n.as_constant()) for n in numbers
    ]
    return symbolic_scalars.computed(
        tx, tx.graph.emit_plain("call_function", _compensated, operands, {})
    )


_COMPENSATES = sum([1e16, 1.0, -1e16]) == 1.0


def _added(start: float, *numbers: float) -> float:
    return sum(numbers, start)


def _compensated(total: Any, *numbers: Any) -> torch.Tensor:
    """Add numbers and 0-dim tensors with compensation of rounding errors (Neumaier)."""
    lost = torch.zeros((), dtype=torch.float64)
    for number in numbers:
        integral = [not torch.as_tensor(operand).is_floating_point() for operand in (total, number)]
        if all(integral):
            total = total + number
            continue
        before, addend = (torch.as_tensor(o, dtype=torch.float64) for o in (total, number))
        total = before + addend
        if not any(integral):
            larger = before.abs() >= addend.abs()
            lost = lost + torch.where(larger, before - total + addend, addend - total + before)
    return torch.where(lost.isfinite() & (lost != 0), total + lost, total)


rule(any)(lambda tx, items: constant(any(item.nb_bool(tx) for item in stepped(tx, items))))
rule(all)(lambda tx, items: constant(all(item.nb_bool(tx) for item in stepped(tx, items))))


# Containers.


rule(list)(lambda tx, items=None: ListValue([] if items is None else list(steps(tx, items))))


@rule(tuple)
def _tuple(tx: Tracer, items: Value | None = None) -> Value:
    if type(items) is TupleValue:
        return items
    return TupleValue([] if items is None else list(steps(tx, items, TUPLE_ASKS_LENGTH)))


@rule_of_each(set, frozenset)
def _set(cls: type, tx: Tracer, items: Value | None = None) -> Value:
    if cls is frozenset and isinstance(items, SetValue) and items.cls is frozenset:
        return items
    plain = getattr(items, "base", None) or items  # bypassing the methods of its class
    if isinstance(plain, SetValue):
        result = SetValue(plain.elements(), cls=cls, order=plain.order)
        result.loose |= plain.loose
        return result
    return SetValue([] if items is None else steps(tx, items, hinted=False), cls=cls)


@rule(slice)
def _slice(tx: Tracer, first: Value, stop: Value | None = None, step: Value = NONE) -> Value:
    return SliceValue(NONE, first, NONE) if stop is None else SliceValue(first, stop, step)


rule(range)(
    lambda tx, *args: RangeValue(real_call(tx, range, *(_integer(tx, arg) for arg in args)))
)


def _integer(tx: Tracer, value: Value) -> Any:
    return indexed(tx, value).as_constant()


@rule(sorted)
def _sorted(tx: Tracer, items: Value, *, key: Value = NONE, reverse: Value = FALSE) -> Value:
    every = items.elements() if isinstance(items, SetValue) and key is NONE else []
    item_types = {item.is_constant() and item.python_type() for item in every}  # all different
    items_read = every if item_types in ({str}, {int}, {bytes}) else steps(tx, items)
    sort_proxies(tx, real := [Proxy(tx, item) for item in items_read], key, reverse)
    return ListValue([proxy.value for proxy in real])


def sort_proxies(tx: Tracer, real: list[Proxy], key: Value, reverse: Value) -> None:
    """Sort a list as `list.sort` does: stable, comparing with `<`."""
    flag = reverse if SORT_TAKES_TRUTH else tx.builtin(operator.index, reverse)
    real.sort(key=_sort_key(tx, key), reverse=flag.nb_bool(tx))


# Iterators.


@rule(iter)
def _iter(tx: Tracer, items: Value, sentinel: Value | None = None) -> Value:
    if sentinel is not None:
        if lookup(items.python_type(), "__call__") is None:
            real_call(tx, iter, None, None)  # the words are other ones from CPython 3.12 on
        calls = tx.const_object(polyfills.calls).tp_call(tx, [items, sentinel], {})
        assert isinstance(calls, GeneratorValue)
        calls.cls, calls.created_by = CALLS, iter
        return calls
    return items.tp_iter(tx)


@rule(next)
def _next(tx: Tracer, iterator: Value, default: Value | None = None) -> Value:
    if not hasattr(iterator.python_type(), "__next__"):
        tx.raise_(TypeError, f"'{type_name(iterator.python_type())}' object is not an iterator")
    if default is None and isinstance(iterator, UserObject):
        return iterator.call_method(tx, "__next__", [], {})  # with the StopIteration that it raises
    item = iterator.tp_iternext(tx)
    if item is not None:
        return item
    return item_or_stop(tx, iterator, None) if default is None else default


@rule(enumerate)
def _enumerate(tx: Tracer, iterable: Value, start: Value = Constant(0)) -> Value:  # noqa: B008
    first = start.as_constant()
    real_call(tx, enumerate, (), first)  # raises for another type
    return CombinedIterator(enumerate, [iterated(tx, iterable)], (), lambda at: [first + at])


@rule_of_each(zip, itertools.compress, map, filter, itertools.starmap, itertools.filterfalse)
def _lazily(factory: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    functions = 0 if factory in (zip, itertools.compress) else 1
    keywords = {name: value.as_constant() for name, value in kwargs.items()}
    inner = [iterated(tx, arg) for arg in args[functions:]]
    iterator = CombinedIterator(factory, inner, args[:functions], keywords=keywords)
    iterator.real(tx)  # raises where the arguments are wrong
    return iterator


@rule(reversed)
def _reversed(tx: Tracer, items: Value) -> Value:
    if isinstance(items, SequenceValue) or isinstance(getattr(items, "value", None), str | bytes):
        return SequenceIterator(items, None, reversed)  # type: ignore[arg-type]
    if isinstance(items, RangeValue):
        return tx.iterator_over(RangeValue(items.range[::-1]))
    if isinstance(items, DictValue | DictView):
        return tx.dict_iterator(items, reversed)
    cls = items.python_type()
    if lookup(cls, "__reversed__") is None:
        if lookup(cls, "__getitem__") is None or lookup(cls, "__len__") is None:
            tx.raise_(TypeError, f"'{cls.__name__}' object is not reversible")
        iterator = tx.const_object(polyfills.backwards).tp_call(tx, [items, length(tx, items)], {})
        iterator.cls = reversed
        return iterator
    return items.call_method(tx, "__reversed__", [], {})


# ---- methods of generators and iterators that the captured program made


def item_or_stop(tx: Tracer, self: Value, item: Value | None) -> Value:
    """Return the item of an iterator, or raise StopIteration with its generator's return value."""
    if item is not None:
        return item
    args = [] if self.returned in (None, NONE) else [self.returned]
    raise Raised(chain(tx, ExceptionValue(StopIteration, args)))


@method(IteratorValue, "__next__")
def _next_item(tx: Tracer, self: IteratorValue) -> Value:
    if not hasattr(self.python_type(), "__next__"):
        tx.raise_(TypeError, f"'{self.cls.__name__}' object is not an iterator")
    return item_or_stop(tx, self, self.tp_iternext(tx))


def _exception_to_throw(tx: Tracer, error: Value, *rest: Value) -> Value:
    """Return the exception for `throw`, whose old form is class, value, traceback."""
    value = rest[0] if rest and rest[0] is not NONE else error
    if rest and (THROW_WARNS_OF_CLASSES or value.is_constant()):
        raise Break("warns", "throw with several arguments")
    return value.tp_call(tx, [], {}) if issubclass(value.python_type(), type) else value


method(GeneratorValue, "send")(lambda tx, self, value: item_or_stop(tx, self, self.send(tx, value)))
method(GeneratorValue, "throw")(
    lambda tx, self, error, *rest: item_or_stop(
        tx, self, self.throw(tx, _exception_to_throw(tx, error, *rest))
    )
)
method(GeneratorValue, "close")(lambda tx, self: self.close(tx))


method(IteratorValue, "__iter__")(lambda tx, self: self.tp_iter(tx))


# ---- module `operator`: each function is an operator of `model.slots`


def _two(evaluate: Any, symbol: str, tx: Tracer, left: Value, right: Value) -> Any:
    return evaluate(tx, symbol, left, right)


def _one(symbol: str, tx: Tracer, value: Value) -> Value:
    return unary(tx, symbol, value)


for _symbol, _operator in BINARY.items():
    rule(_operator.function)(functools.partial(_two, binary, _symbol))
    rule(_operator.inplace)(functools.partial(_two, binary, f"{_symbol}="))
for _symbol, _operator in COMPARE.items():
    rule(_operator.function)(functools.partial(_two, compare, _symbol))
for _symbol, (_function, _) in UNARY.items():
    rule(_function)(functools.partial(_one, _symbol))
rule(abs)(functools.partial(_one, "abs"))
rule(operator.inv)(functools.partial(_one, "~"))
rule(operator.getitem)(lambda tx, items, key: items.mp_subscript(tx, key))


@rule(operator.setitem)
def _setitem(tx: Tracer, items: Value, key: Value, item: Value) -> None:
    items.mp_ass_subscript(tx, key, item)


rule(operator.contains)(lambda tx, items, item: contains(tx, items, item))
