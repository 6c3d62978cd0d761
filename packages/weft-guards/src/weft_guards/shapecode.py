"""Conditions on sizes as postfix code for C (`_amounts.h` runs it), from their Python text.

The text is the one that the Python form of a check runs, so both mean the same. It is read as a
syntax tree; integer arithmetic has words, and everything else (floats, conditional expressions,
functions that are not in the tables) is left to Python.
"""

from __future__ import annotations

import ast
import struct
from typing import Any

from weft_guards.abi import extension
from weft_guards.payloads import ShapeExpr

MAX_WORDS = 256  # as in _amounts.h
_OPERATORS: dict[type, str] = {
    ast.Add: "ADD", ast.Sub: "SUB", ast.Mult: "MUL", ast.FloorDiv: "DIV", ast.Mod: "MOD",
    ast.Pow: "POW", ast.USub: "NEG", ast.Not: "NOT", ast.And: "AND", ast.Or: "OR",
    ast.Eq: "EQ", ast.NotEq: "NE", ast.Lt: "LT", ast.LtE: "LE", ast.Gt: "GT", ast.GtE: "GE",
}  # fmt: skip
_FOLDS = {"min": "MIN", "max": "MAX"}


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
    writer = _Writer({f"v{index}": amount for index, amount in enumerate(amounts)})
    writer.write(ast.parse(condition.template.format(*writer.amounts), mode="eval").body)
    if len(writer.words) > MAX_WORDS:
        raise NoCode
    return struct.pack(f"={len(writer.words)}q", *writer.words)


class _Writer:
    """Writes the words of a syntax tree: operands first."""

    def __init__(self, amounts: dict[str, int]) -> None:
        self.amounts = amounts
        self.words: list[int] = []
        native: Any = extension()
        self.numbers = {name: number for number, name in enumerate(native.words.split())}

    def word(self, name: str, *operand: int) -> None:
        self.words += (self.numbers[name], *operand)

    def write(self, node: ast.expr) -> None:
        """Write one node, by its type.

        Raises:
            NoCode: for a type without a row here.
        """
        match node:
            case ast.Name(id=name) if name in self.amounts:
                self.word("AMOUNT", self.amounts[name])
            case ast.Constant(value=int(value)) if -(1 << 63) <= value < 1 << 63:
                self.word("NUMBER", int(value))
            case ast.UnaryOp(op=op, operand=operand):
                self.fold(op, [operand])
            case ast.BinOp(left=left, op=op, right=right):
                self.fold(op, [left, right])
            case ast.BoolOp(op=op, values=values) if all(map(_is_truth, values)):
                self.fold(op, values)
            case ast.Compare(left=left, ops=ops, comparators=rights):
                for index, (compare, pair) in enumerate(zip(ops, zip([left, *rights], rights))):
                    self.fold(compare, list(pair))
                    if index:
                        self.word("AND")
            case ast.Call(func=ast.Name(id=name), args=values) if name in _FOLDS:
                self.fold(_FOLDS[name], values)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="math"), attr="floor"),
                args=[ast.BinOp(left=left, op=ast.Div(), right=right)],
            ):
                self.fold("FLOOR", [left, right])
            case _:
                raise NoCode

    def fold(self, operator: ast.AST | str, values: list[ast.expr]) -> None:
        """Write an operator on one value, or between values from the left."""
        name = operator if isinstance(operator, str) else _OPERATORS.get(type(operator))
        if name is None:
            raise NoCode
        self.write(values[0])
        for value in values[1:]:
            self.write(value)
            self.word(name)
        if len(values) == 1:
            self.word(name)


def _is_truth(node: ast.expr) -> bool:
    """Say whether a value is True or False, so that `and` and `or` give that too."""
    return isinstance(node, ast.Compare | ast.BoolOp) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )
