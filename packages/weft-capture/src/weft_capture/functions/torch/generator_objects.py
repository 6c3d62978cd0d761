"""`torch.Generator`: made, seeded and drawn from before the graph, in the program's order.

A draw is an input of the graph, made by the program's own call. A tensor that is filled gets its
numbers from such an input.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from weft_guards.sources import AttrSource, CallSource, ConstSource, Source

from weft_capture.breaks import Break, NotConstant
from weft_capture.functions.table import find, rule, rule_of_each
from weft_capture.functions.torch.randomness import before_graph
from weft_capture.functions.wrap import EXACT
from weft_capture.model.constant import NONE, constant
from weft_capture.model.containers import SequenceValue, TupleValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Kwargs, Tracer, Value, method, method_of_each
from weft_capture.tensors.tensor import SymValue, TensorValue

_CPU = torch.device("cpu")


@dataclass(eq=False)
class GeneratorObject(Value):
    """A generator of numbers on the CPU."""

    source: Source
    cls = torch.Generator

    def getattr_fallback(self, tx: Tracer, name: str) -> Value:
        return constant(_CPU) if name == "device" else super().getattr_fallback(tx, name)


_DEFAULT = ConstSource(torch.default_generator)


def _wrap(tx: Tracer, obj: torch.Generator, source: Source) -> Value:
    tx.guard(source, "TYPE", torch.Generator)
    tx.guard_constant(AttrSource(source, "device"), obj.device)
    # The graph itself draws from the default generator.
    own = obj is not torch.default_generator
    tx.guard(CallSource(operator.is_not, (source, _DEFAULT)), "CONST", own)
    if own and obj.device == _CPU:
        return GeneratorObject(source)
    return UserObject(type(obj), obj, source)


EXACT[torch.Generator] = _wrap


@rule(torch.Generator)
def _make(tx: Tracer, device: Value = NONE) -> Value:
    if device is not NONE and torch.device(device.as_constant()) != _CPU:
        raise Break("random-state", "a generator on another device than the CPU")
    return GeneratorObject(tx.calls.add(torch.Generator, early=True))


@method(GeneratorObject, "manual_seed")
def _seed(tx: Tracer, self: GeneratorObject, seed: Value) -> Value:
    number = before_graph(tx, seed) if isinstance(seed, SymValue) else seed
    if number is seed and type(seed.as_constant()) is not int:
        raise Break("random-state", "a seed that is no int")
    tx.calls.add(torch.Generator.manual_seed, self, number, early=True)
    return self


@method(GeneratorObject, "initial_seed")
def _initial_seed(tx: Tracer, self: GeneratorObject) -> Value:
    return tx.runtime_value(tx.calls.add(torch.Generator.initial_seed, self, early=True), 0)


def _early(tx: Tracer, value: Value) -> tuple[Value, Any]:
    """Return a value as it is before the graph, with its data here."""
    if isinstance(value, SequenceValue):
        pairs = [_early(tx, tx.force(item)) for item in value.items]
        return TupleValue([item for item, _ in pairs]), tuple(number for _, number in pairs)
    if not isinstance(value, SymValue):
        return value, value.data(tx)
    pregraph = tx.pregraph_value(value)
    if pregraph is None:
        raise Break("random-state", "numbers of a generator, of a size that the graph computes")
    return SymValue(value.node, value.sym, pregraph[0]), pregraph[1]


def _drawn(
    tx: Tracer, draw: Any, args: list[Value], options: Kwargs, size: list[Value], generator: Value
) -> TensorValue:
    """Call `draw(args, options, generator)` before the graph; returns its result, of this size.

    Raises:
        Break: where the arguments are known only in the graph.
    """
    try:
        early, arguments = _early(tx, TupleValue(args))
        settings = {name: value.data(tx) for name, value in options.items()}
    except NotConstant as error:
        raise Break("random-state", f"numbers of a generator for {error}") from None
    with unset_fake_temporarily():
        hint = draw(arguments, settings, torch.Generator())
    if hint.requires_grad or hint.device != _CPU:
        raise Break("random-state", "numbers of a generator, as a leaf or on another device")
    source = tx.calls.add(draw, early, tx.literal(settings), generator, early=True)
    if any(isinstance(number, SymValue) for number in size):
        fake = torch.empty([number.example() for number in size], dtype=hint.dtype)
        return tx.graph.input_like(fake, hint, source)
    return tx.graph.tensor_input(hint, source)


def _of_function(
    function: Any, arguments: Any, options: Any, generator: torch.Generator
) -> torch.Tensor:
    drawn: torch.Tensor = function(*arguments, **options, generator=generator)
    return drawn


_MAKERS = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)
_otherwise: dict[Any, Any] = {function: find(function) for function in _MAKERS}


@rule_of_each(*_MAKERS)
def _drawing(function: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    generator = kwargs.get("generator", NONE)
    if not isinstance(generator, GeneratorObject):
        handler = _otherwise[function]
        if handler is not None:
            return tx.apply(handler, list(args), kwargs)
        return tx.graph.emit("call_function", function, list(args), kwargs)
    options: Kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    last = args[-1] if args else NONE
    size = list(map(tx.force, last.items)) if isinstance(last, SequenceValue) else list(args)
    draw = functools.partial(_of_function, function)
    return _drawn(tx, draw, list(args), options, size, generator)


def _of_method(
    name: str, dtype: torch.dtype, arguments: Any, options: Any, generator: torch.Generator
) -> torch.Tensor:
    layout, rest = arguments
    strided = len(layout) > 1
    filled = (torch.empty_strided if strided else torch.empty)(*layout, dtype=dtype)
    return getattr(filled, name)(*rest, **options, generator=generator)  # type: ignore[no-any-return]


@method_of_each(
    TensorValue,
    *("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
)
def _filling(name: str, tx: Tracer, self: TensorValue, /, *args: Value, **kwargs: Value) -> Value:
    """Draw into a new tensor of the same layout before the graph, which copies it."""
    generator = kwargs.get("generator", NONE)
    if not isinstance(generator, GeneratorObject):
        return tx.graph.emit("call_method", name, [self, *args], kwargs)
    options: Kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
    props = ("size",) if self.fake.is_contiguous() else ("size", "stride")
    layout = [TupleValue(self.call_method(tx, prop, [], {}).unpack(tx)) for prop in props]
    draw = functools.partial(_of_method, name, self.fake.dtype)
    arguments: list[Value] = [TupleValue([*layout]), TupleValue([*args])]
    drawn = _drawn(tx, draw, arguments, options, list(layout[0].items), generator)
    return self.call_method(tx, "copy_", [drawn], {})
