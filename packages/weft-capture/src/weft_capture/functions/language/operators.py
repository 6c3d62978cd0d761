"""Module `operator`: each function is an operator of `model.slots`."""

from __future__ import annotations

import functools
import operator
from typing import Any

from weft_capture.functions.table import rule
from weft_capture.model.protocol import Tracer, Value
from weft_capture.model.slots import BINARY, COMPARE, UNARY, binary, compare, contains, unary


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
