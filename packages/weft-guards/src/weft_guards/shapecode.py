"""Conditions on sizes as postfix code for C (`_shape_vm.h` runs it), from their Python text.

The text is the one that the Python form of a check runs, so both mean the same. It is read as a
syntax tree; integer arithmetic has words, and everything else (floats, conditional expressions,
functions that are not in the tables) is left to Python.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator
from typing import Any

from weft_guards.abi import extension
from weft_guards.payloads import ShapeExpr

MAX_WORDS = 256  # as in _shape_vm.h
# What follows the operands of an operator, or of a function; a number pushes itself.
_WORDS: dict[type | str, str] = {
    ast.Add: "ADD", ast.Sub: "-1 MUL ADD", ast.USub: "-1 MUL", ast.Mult: "MUL",
    ast.FloorDiv: "DIV", ast.Mod: "MOD", "min": "MIN", "max": "MAX", "floor": "FLOOR",
    ast.Eq: "EQ", ast.NotEq: "EQ 0 EQ", ast.Lt: "LT", ast.LtE: "LE", ast.Gt: "LE 0 EQ",
    ast.GtE: "LT 0 EQ", ast.Not: "0 EQ", ast.And: "MIN", ast.Or: "MAX",
}  # fmt: skip


class NoCode(Exception):
    """C has no words for a condition."""


def shape_code(condition: ShapeExpr, amounts: list[int]) -> bytes:
    """Return the code of a condition.

    Args:
        condition: its text, with {0}, {1}, ... for its sources.
        amounts: the number of the amount that each source's value is.

    Raises:
        NoCode: when C cannot run it.
    """
    native: Any = extension()
    numbers = {name: number for number, name in enumerate(native.words.split())}
    names = {f"v{index}": amount for index, amount in enumerate(amounts)}
    words: list[int] = []
    for token in _tokens(ast.parse(condition.template.format(*names), mode="eval").body):
        if token in numbers:
            words.append(numbers[token])
        elif token in names:
            words += numbers["AMOUNT"], names[token]
        else:
            words += numbers["NUMBER"], int(token)
    try:
        code = struct.pack(f"={len(words)}q", *words)
    except struct.error:  # a number that int64 does not hold
        raise NoCode from None
    if len(words) > MAX_WORDS:
        raise NoCode
    return code


def _tokens(node: ast.expr) -> Iterator[str]:
    """Yield a syntax tree in postfix order: names, numbers and words.

    Raises:
        NoCode: for a node without a row here.
    """
    match node:
        case ast.Name(id=name):
            yield name
        case ast.Constant(value=int(value)):
            yield str(int(value))
        case ast.UnaryOp(op=op, operand=operand):
            yield from _folded(type(op), [operand])
        case ast.BinOp(left=left, op=op, right=right):
            yield from _folded(type(op), [left, right])
        case ast.BoolOp(op=op, values=values) if all(map(_is_truth, values)):
            yield from _folded(type(op), values)
        case ast.Compare(left=left, ops=ops, comparators=rights):
            for index, pair in enumerate(zip([left, *rights], rights)):
                yield from _folded(type(ops[index]), list(pair))
                yield from _WORDS[ast.And].split() if index else ()
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=values):
            yield from _folded(name, values)
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="math"), attr="floor"),
            args=[ast.BinOp(left=left, op=ast.Div(), right=right)],
        ):
            yield from _folded("floor", [left, right])
        case _:
            raise NoCode


def _folded(operator: type | str, values: list[ast.expr]) -> Iterator[str]:
    """Yield an operator behind one value, or between values from the left."""
    if operator not in _WORDS:
        raise NoCode
    yield from _tokens(values[0])
    for value in values[1:]:
        yield from [*_tokens(value), *_WORDS[operator].split()]
    if len(values) == 1:
        yield from _WORDS[operator].split()


def _is_truth(node: ast.expr) -> bool:
    """Say whether a value is True or False, so that `and` and `or` give that too."""
    return isinstance(node, ast.Compare | ast.BoolOp) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )
