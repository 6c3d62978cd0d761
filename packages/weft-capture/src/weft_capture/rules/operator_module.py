"""Module `operator`: the operators as functions."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from weft_capture.rules.operators import BINARY, binary, compare, contains, unary
from weft_capture.rules.table import rule
from weft_capture.values.base import Value
from weft_capture.values.constant import NONE

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


def _operator_rows() -> None:
    for symbol, (function, _) in BINARY.items():
        for target, text in ((function, symbol), (_inplace(function), f"{symbol}=")):
            rule(target)(functools.partial(_binary_row, text))
    for symbol, name in (("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge")):
        rule(getattr(operator, name))(functools.partial(_compare_row, symbol))
    for symbol, name in (("-", "neg"), ("+", "pos"), ("~", "invert")):
        rule(getattr(operator, name))(functools.partial(_unary_row, symbol))
    rule(operator.eq)(functools.partial(_compare_row, "=="))
    rule(operator.ne)(functools.partial(_compare_row, "!="))


def _inplace(function: Any) -> Any:
    return getattr(operator, f"i{function.__name__.strip('_')}")


def _binary_row(symbol: str, tx: Tracer, left: Value, right: Value) -> Value:
    return binary(tx, symbol, left, right)


def _unary_row(symbol: str, tx: Tracer, value: Value) -> Value:
    return unary(tx, symbol, value)


def _compare_row(symbol: str, tx: Tracer, left: Value, right: Value) -> Value:
    return compare(tx, symbol, left, right)


_operator_rows()


@rule(operator.getitem)
def _getitem(tx: Tracer, items: Value, key: Value) -> Value:
    return items.getitem(tx, key)


@rule(operator.setitem)
def _setitem(tx: Tracer, items: Value, key: Value, item: Value) -> Value:
    items.setitem(tx, key, item)
    return NONE


@rule(operator.contains)
def _contains(tx: Tracer, items: Value, item: Value) -> Value:
    return contains(tx, items, item)
