"""Random numbers, clocks, unique ids and the environment: values that differ between calls.

Functions of module `random` run before the graph, in the program's order: only they read their
state. A call on a new generator while capturing checks the arguments and gives the result's type.
The environment is guarded, one variable at a time.
"""

from __future__ import annotations

import datetime
import operator
import os
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from weft_guards.sources import CallSource, ConstSource, Source

from weft_capture.breaks import Break
from weft_capture.functions.table import decline, rule, rule_of_each
from weft_capture.model.constant import NONE, constant
from weft_capture.model.containers import ListValue
from weft_capture.model.protocol import Tracer, Value, method, method_of_each
from weft_capture.tensors.runtime_values import RandomValue, RuntimeValue
from weft_capture.tensors.tensor import SymValue

_ITEMS = (int, float, bool, str, bytes)
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.mod, operator.floordiv)
_KNOWN = (int, range, type(None))


def _draw_now(generator: random.Random, name: str, args: Any, kwargs: Any) -> Any:
    result = getattr(generator, name)(*args, **kwargs)
    return args[0] if name == "shuffle" else result


def draw(
    tx: Tracer, owner: Value, name: str, args: Any, kwargs: Any, fresh: Any = random.Random
) -> Value:
    """Call a method of a generator of class `fresh` with constant arguments."""
    real = tuple(arg.data(tx) for arg in args)
    keywords = {key: value.data(tx) for key, value in kwargs.items()}
    if name in ("choice", "choices", "sample", "shuffle"):
        for items in (*real, *keywords.values()):
            item_types = {type(item) for item in items} if not isinstance(items, _KNOWN) else set()
            if len(item_types) > 1 or not item_types.issubset(_ITEMS):
                raise Break("random-state", "a random choice among mutable objects")
    row = constant(name), tx.literal(real), tx.literal(keywords)
    try:
        hint = _draw_now(fresh(0), name, real, keywords)
    except Exception as error:
        raise Break("random-state", f"random.{name}: {error}") from None
    source = tx.calls.add(_draw_now, owner, *row, early=True)
    return DRAWN.get(type(hint), runtime_value)(tx, source, hint)


def runtime_value(tx: Tracer, source: Source, hint: Any) -> Value:
    """Return the value of a random number."""
    return tx.runtime_value(source, hint)


DRAWN: dict[type, Callable[[Tracer, Source, Any], Value]] = {}
"""Type of what is drawn -> function that makes its value."""


@method_of_each(
    RandomValue, "random", "uniform", "gauss", "normalvariate", "expovariate", "randint",
    "randrange", "getrandbits", "choice", "choices", "sample",
)  # fmt: skip
def _draws(name: str, tx: Tracer, self: RandomValue, /, *args: Value, **kwargs: Value) -> Value:
    return draw(tx, self, name, args, kwargs)


@method(RandomValue, "shuffle")
def _shuffle(tx: Tracer, self: RandomValue, items: Value) -> None:
    if type(items) is not ListValue:
        raise Break("random-state", "random.shuffle of another object than a list")
    shuffled = draw(tx, self, "shuffle", [items], {})
    tx.mutate(items)
    items.items[:] = shuffled.unpack(tx)


@method(RandomValue, "seed")
def _seed(tx: Tracer, self: RandomValue, a: Value = NONE) -> None:
    if isinstance(a, SymValue):
        tx.calls.add(random.Random.seed, self, before_graph(tx, a), early=True)
    else:
        draw(tx, self, "seed", [a], {})


def before_graph(tx: Tracer, number: SymValue) -> Value:
    """Return the source of a symbolic number, which Python computes before the graph."""

    def source(node: Any) -> Source:
        if not isinstance(node, torch.fx.Node):
            return ConstSource(node)
        entry = tx.graph.input_at.get(node)
        if entry is not None and entry.source is not None:
            return entry.source
        if node.target not in _ARITHMETIC or node.kwargs:
            raise Break("data-dependent-value", "a seed that the graph computes")
        return CallSource(node.target, tuple(map(source, node.args)))

    return SymValue(number.node, number.sym, source(number.node))


@rule(random.Random)
def _generator(tx: Tracer, *seed: Value) -> Value:
    seeds = [value.as_constant() for value in seed]
    if not all(isinstance(number, int | float | str | bytes | None) for number in seeds):
        raise Break("random-state", "random.Random")
    return RandomValue(tx.calls.add(random.Random, *seed, early=True))


rule(uuid.uuid4)(lambda tx: tx.runtime_value(tx.calls.add(uuid.uuid4, early=True), uuid.uuid4()))


@rule("torch.random.manual_seed")  # by name, since it can be wrapped
def _manual_seed(tx: Tracer, seed: Value) -> Value:
    examples = [
        node.meta.get("example_value") for node in tx.graph.step_of_node if not node._erased
    ]
    if seed.python_type() is not int or not all(isinstance(e, torch.SymInt) for e in examples):
        raise Break("random-state", "torch.manual_seed after operations")
    number = before_graph(tx, seed) if isinstance(seed, SymValue) else seed
    return tx.runtime_value(
        tx.calls.add(torch.manual_seed, number, early=True), torch.default_generator
    )


@rule(torch.get_rng_state)
def _get_state(tx: Tracer) -> Value:
    """Read the state of torch's generator before the graph, which may draw only afterwards."""
    if tx.graph.mode.drawn or any(isinstance(w, _StateSet) for w in tx.watched):
        raise Break("random-state", "the state of the generator after draws")
    source = tx.calls.add(torch.get_rng_state, early=True)
    return RuntimeValue(torch.get_rng_state(), source)


@rule(torch.set_rng_state)
def _set_state(tx: Tracer, new_state: Value) -> None:
    """Set the state after the graph, which may draw only before."""
    if tx.calls.add(torch.set_rng_state, new_state).late:
        tx.watch(_StateSet(tx.steps.now, tx.graph.mode.drawn))


@dataclass(eq=False)
class _StateSet:
    """The step that set the state, and the number of draws before it."""

    step: int
    drawn: int

    def check(self, tx: Tracer, out: object) -> None:
        """Set the state eagerly if the graph draws afterwards."""
        if tx.graph.mode.drawn != self.drawn:
            raise Break("random-state", "draws after the state of the generator is set", self.step)


_CLOCKS = ("time", "perf_counter", "monotonic", "process_time")


@rule_of_each(*(getattr(time, name + unit) for name in _CLOCKS for unit in ("", "_ns")))
@rule_of_each(datetime.datetime.now, datetime.datetime.utcnow, datetime.date.today)
def _clock(function: Any, tx: Tracer, *zone: Value) -> Value:
    if zone:
        raise Break("unsupported-arguments", "a clock with a time zone")
    return tx.calls.read_clock(function)


@rule(time.sleep)
def _sleep(tx: Tracer, seconds: Value) -> None:
    number = seconds.as_constant()
    if not isinstance(number, int | float) or not number >= 0:
        raise Break("unsupported-arguments", "time.sleep")
    tx.calls.add(time.sleep, seconds)


# ---- the environment


def _name_of(environment: Value, *texts: Value) -> Any:
    names = [text.as_constant() for text in texts]
    plain = all(type(text) is str and "\0" not in text and text for text in names)
    if not plain or "=" in names[0] or getattr(environment, "obj", None) is not os.environ:
        raise Break("unsupported-arguments", "an environment other than os.environ")
    return names[0]


@rule(os._Environ.__getitem__)
def _get_variable(tx: Tracer, self: Value, name: Value) -> Value:
    environment: Any = os.environ
    key = _name_of(self, name)
    written = tx.effects.global_value(environment, key)
    if written is not None:
        return written
    current = os.environ.get(key)
    tx.guard(CallSource(os.environ.get, (ConstSource(key),)), "CONST", current)
    if current is None:
        tx.raise_(KeyError, key)
    return constant(current)


@rule(os._Environ.__setitem__)
def _set_variable(tx: Tracer, self: Value, name: Value, text: Value) -> None:
    environment: Any = os.environ
    tx.effects.store_global(environment, _name_of(self, name, text), text)


_WHOLE = (os._Environ.__iter__, os._Environ.__len__, os._Environ.__delitem__, os._Environ.copy)
decline("unsupported-arguments", "all environment variables", *_WHOLE)
