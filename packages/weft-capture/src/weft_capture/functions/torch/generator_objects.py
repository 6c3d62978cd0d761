"""`torch.Generator`: made, seeded and drawn from before the graph, in the program's order.

A draw is an input of the graph, made by the program's own call. Numbers drawn into a tensor that
the graph computes break the graph.
"""

from __future__ import annotations

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
from weft_capture.model.containers import SequenceValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Kwargs, Tracer, Value, method
from weft_capture.tensors.tensor import SymValue

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


def _varies(value: Value) -> bool:
    if isinstance(value, SequenceValue):
        return any(map(_varies, value.items))
    return isinstance(value, SymValue)


def _draw(function: Any, arguments: Any, options: Any, generator: torch.Generator) -> torch.Tensor:
    drawn: torch.Tensor = function(*arguments, **options, generator=generator)
    return drawn


_MAKERS = (torch.rand, torch.randn, torch.randint, torch.randperm)
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
    if any(map(_varies, args)) or any(map(_varies, options.values())):
        raise Break("random-state", "numbers of a generator, of a size that varies")
    try:
        arguments = [arg.data(tx) for arg in args]
        settings = {name: value.data(tx) for name, value in options.items()}
    except NotConstant as error:
        raise Break("random-state", f"numbers of a generator for {error}") from None
    with unset_fake_temporarily():
        hint = _draw(function, arguments, settings, torch.Generator())
    if hint.requires_grad or hint.device != _CPU:
        raise Break("random-state", "numbers of a generator, as a leaf or on another device")
    row = constant(function), tx.literal(tuple(arguments)), tx.literal(settings)
    return tx.graph.tensor_input(hint, tx.calls.add(_draw, *row, generator, early=True))
