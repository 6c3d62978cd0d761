"""Text of index expressions, for dumps and for every target language."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft_codegen.loops.index import Atom, IndexExpr, Least, Quotient, Remainder, parts, single


@dataclass(frozen=True)
class Style:
    """How `render` writes each kind of atom; `leaf` names axes, sizes and computed values."""

    quotient: str = "({0} // {1})"
    remainder: str = "({0} % {1})"
    least: str = "min({0}, {1})"


PYTHON = Style()


def render(
    expr: IndexExpr,
    leaf: Callable[[Atom], str] = lambda atom: atom.key,
    style: Style | Mapping[type[Atom], Callable[[Atom, str, str], str]] = PYTHON,
) -> str:
    """Text of `expr` with infix + and *.

    `style` gives the formats for quotients, remainders and minima, or a table of functions
    (atom, left text, right text) -> text when a target needs to look at the operands' signs.
    """
    if not expr.terms:
        return "0"
    pieces: list[str] = []
    # The constant term sorts first canonically but reads better last.
    for monomial, scale in sorted(expr.terms, key=lambda term: not term[0]):
        factors = [_render_atom(atom, leaf, style) for atom in monomial]
        if abs(scale) != 1 or not factors:
            factors.append(str(abs(scale)))
        sign = "-" if scale < 0 else "+"
        pieces.append(f" {sign} " if pieces else ("-" if scale < 0 else ""))
        pieces.append("*".join(factors))
    return "".join(pieces)


def _render_atom(atom: Atom, leaf: Callable[[Atom], str], style: Any) -> str:
    pieces = parts(atom)
    if not pieces:
        return leaf(atom)
    left, right = (render(piece, leaf, style) for piece in pieces)
    if not isinstance(style, Style):
        return str(style[type(atom)](atom, left, right))
    text = {Quotient: style.quotient, Remainder: style.remainder, Least: style.least}
    if isinstance(atom, Least):
        return text[Least].format(left, right)
    return text[type(atom)].format(_enclosed(pieces[0], left), _enclosed(pieces[1], right))


def _enclosed(piece: IndexExpr, text: str) -> str:
    simple = piece.is_const or single(piece) is not None
    return text if simple else f"({text})"
