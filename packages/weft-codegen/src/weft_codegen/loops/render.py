"""Text of index expressions, for dumps and for every target language."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft_codegen.loops.index import (
    Atom,
    IndexExpr,
    Least,
    Pair,
    Quotient,
    Remainder,
    parts,
    single,
)

# (atom, left text, right text) -> text: an atom of two parts in some language.
Style = Mapping[type[Pair], Callable[[Atom, str, str], str]]


def _infix(sign: str) -> Callable[[Atom, str, str], str]:
    def write(atom: Atom, *texts: str) -> str:
        simple = (piece.is_const or single(piece) is not None for piece in parts(atom))
        left, right = (t if s else f"({t})" for s, t in zip(simple, texts, strict=True))
        return f"({left} {sign} {right})"

    return write


_PYTHON: Style = {
    Quotient: _infix("//"),
    Remainder: _infix("%"),
    Least: lambda _, left, right: f"min({left}, {right})",
}


def render(
    expr: IndexExpr, leaf: Callable[[Atom], str] = lambda atom: atom.key, style: Style = _PYTHON
) -> str:
    """Text of `expr` with infix + and *; `leaf` writes axes, sizes and computed values."""
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


def _render_atom(atom: Atom, leaf: Callable[[Atom], str], style: Style) -> str:
    if not isinstance(atom, Pair):
        return leaf(atom)
    left, right = (render(piece, leaf, style) for piece in parts(atom))
    return style[type(atom)](atom, left, right)
