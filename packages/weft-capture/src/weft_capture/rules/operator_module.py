"""Module `operator`: the operators as functions."""

from __future__ import annotations

import functools
import operator
from typing import Any

from weft_capture.rules.operators import (
    BINARY,
    COMPARE,
    INPLACE,
    UNARY,
    binary,
    compare,
    contains,
    unary,
)
from weft_capture.rules.table import rule
from weft_capture.values.base import Tracer, Value


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
    return items.getitem(tx, key)


@rule(operator.setitem)
def _setitem(tx: Tracer, items: Value, key: Value, item: Value) -> None:
    items.setitem(tx, key, item)


@rule(operator.contains)
def _contains(tx: Tracer, items: Value, item: Value) -> Value:
    return contains(tx, items, item)
