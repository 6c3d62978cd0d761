"""Integer index expressions: which element a load or store touches, how often a loop runs.

An `IndexExpr` is a polynomial with integer coefficients over *atoms*: loop axes, size symbols,
floor quotients, remainders, minima and integers computed at run time.  It is kept in one canonical
form (sorted monomials, interned), so equal expressions are the same object and `is` compares them.
Sizes may be symbolic (`s0`); every size is taken to be at least one, because an axis of length
zero never runs; other integers may have any sign.  No sympy: `shapes.py` converts from it when a
graph is symbolic.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

Monomial = tuple["Atom", ...]
_remembered = functools.lru_cache(1 << 14)  # layers that are alike ask for the same things


@dataclass(frozen=True, eq=False)
class Atom:
    """An indivisible factor.  `key` orders atoms and names them in dumps.

    Atoms are interned by their constructors (`axis`, `size`, ...): identity is equality.
    """

    key: str


@dataclass(frozen=True, eq=False)
class Axis(Atom):
    """A loop variable that runs over 0 <= axis < extent."""

    extent: IndexExpr

    @property
    def at(self) -> IndexExpr:
        """The axis as an index expression."""
        return axis(self.key, self.extent)


@dataclass(frozen=True, eq=False)
class Size(Atom):
    """An integer known when the program is called: at least one if `sign` is 1, as sizes are, at
    most minus one if it is -1, anything if it is 0, as arguments of the caller's may be."""

    sign: int = 1


@dataclass(frozen=True, eq=False)
class Pair(Atom):
    """An operation on two index expressions."""

    left: IndexExpr
    right: IndexExpr


class Quotient(Pair):
    """Floor of left / right."""


class Remainder(Pair):
    """left - right * floor(left / right)."""


class Least(Pair):
    """The smaller of the two."""


@dataclass(frozen=True, eq=False)
class ComputedIndex(Atom):
    """An integer that the loop computes: `expr` is an Expr of integer dtype (see expr.py).

    It is known to lie in 0 <= value < extent (the lowering wraps negative indices).
    """

    expr: Any
    extent: IndexExpr


class IndexExpr:
    """A canonical integer polynomial; build it with `const`, `axis`, `size` and operators."""

    __slots__ = ("__weakref__", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    @_remembered
    def __add__(self, other: IndexLike) -> IndexExpr:
        other = index(other)
        if not self.terms:
            return other
        if not other.terms:
            return self
        sums = dict(self.terms)
        for monomial, coefficient in other.terms:
            sums[monomial] = sums.get(monomial, 0) + coefficient
        return _rejoined(_polynomial(sums))

    __radd__ = __add__

    @_remembered
    def __mul__(self, other: IndexLike) -> IndexExpr:
        other = index(other)
        products: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                monomial = tuple(sorted(left + right, key=lambda atom: atom.key))
                products[monomial] = products.get(monomial, 0) + a * b
        return _polynomial(products)

    __rmul__ = __mul__

    def __neg__(self) -> IndexExpr:
        return self * -1

    def __sub__(self, other: IndexLike) -> IndexExpr:
        return self + index(other) * -1

    def __rsub__(self, other: IndexLike) -> IndexExpr:
        return index(other) - self

    def __floordiv__(self, other: IndexLike) -> IndexExpr:
        return floordiv(self, index(other))

    def __mod__(self, other: IndexLike) -> IndexExpr:
        return mod(self, index(other))

    @property
    def is_const(self) -> bool:
        """Whether this is a plain integer."""
        return not self.terms or (len(self.terms) == 1 and not self.terms[0][0])

    @property
    def value(self) -> int:
        """The integer this is.  Raises ValueError when it is not constant."""
        if not self.terms:
            return 0
        if not self.is_const:
            raise ValueError(f"{self} is not a constant")
        return self.terms[0][1]

    def __repr__(self) -> str:
        return render(self)


IndexLike = IndexExpr | int

_interned: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_constants: dict[int, IndexExpr] = {}
_values = itertools.count()


def _intern(key: Any, build: Callable[[], Any]) -> Any:
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = build()
    return found


def _order(term: tuple[Monomial, int]) -> tuple[int, tuple[str, ...]]:
    return len(term[0]), tuple(atom.key for atom in term[0])


def _polynomial(sums: dict[Monomial, int]) -> IndexExpr:
    terms = tuple(sorted(((m, c) for m, c in sums.items() if c), key=_order))
    found = _interned.get(terms)
    if found is None:
        found = IndexExpr()
        found.terms = terms
        _interned[terms] = found
    return found


def _rejoined(total: IndexExpr) -> IndexExpr:
    """`total` with x where it has x % n + n * (x // n), as reshapes there and back make it."""
    for monomial, coefficient in total.terms:
        for atom in monomial:
            if isinstance(atom, Remainder):
                sums = dict(total.terms)
                rest = _polynomial({without(monomial, (atom,)) or (): coefficient})
                above = rest * atom.right * floordiv(atom.left, atom.right)
                if above.terms and all(sums.get(m) == c for m, c in above.terms):
                    return total - rest * _atom(atom) - above + rest * atom.left
    return total


def _atom(atom: Atom) -> IndexExpr:
    return _polynomial({(atom,): 1})


def _pair(kind: type[Pair], left: IndexExpr, right: IndexExpr, key: str) -> IndexExpr:
    return _atom(_intern((kind, left, right), lambda: kind(key, left, right)))


def const(value: int) -> IndexExpr:
    """The integer `value` as an index expression."""
    found = _constants.get(value)
    if found is None:
        found = _constants[value] = _polynomial({(): int(value)})
    return found


def index(value: IndexLike) -> IndexExpr:
    """`value` itself, or the constant it names."""
    return value if isinstance(value, IndexExpr) else const(value)


def axis(name: str, extent: IndexLike) -> IndexExpr:
    """The loop axis `name` over [0, extent) as an expression; its Axis is `.terms[0][0][0]`."""
    extent = index(extent)
    if extent is ONE:
        return ZERO
    return _atom(_intern((Axis, name, extent), lambda: Axis(name, extent)))


def as_axis(expr: IndexExpr) -> Axis:
    """The Axis that `expr` is.  Raises TypeError when it is anything else."""
    found = single(expr)
    if isinstance(found, Axis):
        return found
    raise TypeError(f"{expr} is not a loop axis")


def size(name: str, sign: int = 1) -> IndexExpr:
    """The symbolic size `name`, or another integer if `sign` is not 1 (see Size)."""
    return _atom(_intern((Size, name, sign), lambda: Size(name, sign)))


def computed(expr: Any, extent: IndexLike) -> IndexExpr:
    """The integer that `expr` (an Expr) evaluates to, known to lie in [0, extent)."""
    extent = index(extent)
    return _atom(
        _intern(
            (ComputedIndex, expr, extent),
            lambda: ComputedIndex(f"<{next(_values):06}>", expr, extent),
        )
    )


def least(left: IndexLike, right: IndexLike) -> IndexExpr:
    """min(left, right), folded when the difference has a known sign."""
    left, right = index(left), index(right)
    if nonnegative(right - left):
        return left
    if nonnegative(left - right):
        return right
    return _pair(Least, left, right, f"min({left}, {right})")


def product(factors: Iterable[IndexLike]) -> IndexExpr:
    """The product of `factors`; one when there are none."""
    return index(prod(factors, start=ONE))


def from_atoms(factors: Iterable[Atom]) -> IndexExpr:
    """The product of atoms."""
    return _polynomial({tuple(sorted(factors, key=lambda atom: atom.key)): 1})


def _divide_terms(num: IndexExpr, den: IndexExpr) -> tuple[IndexExpr, IndexExpr]:
    """Split num = den * whole + rest, taking into `whole` each term that den divides."""
    if len(den.terms) != 1:
        return ZERO, num
    (factor, scale) = den.terms[0]
    whole: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, coefficient in num.terms:
        left = without(monomial, factor)
        if left is None:
            rest[monomial] = coefficient
            continue
        # For a constant divisor keep 0 <= remainder < scale, so that constants reduce too.
        quotient, remainder = divmod(coefficient, scale)
        if quotient:
            whole[left] = whole.get(left, 0) + quotient
        if remainder:
            rest[monomial] = remainder
    return _polynomial(whole), _polynomial(rest)


def without(monomial: Monomial, factor: Monomial) -> Monomial | None:
    """`monomial` divided by `factor`; None where it has no such factor."""
    left = list(monomial)
    for atom in factor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def floordiv(num: IndexExpr, den: IndexExpr) -> IndexExpr:
    """floor(num / den) for den >= 1, simplified with the ranges of the axes."""
    if den is ONE or not num.terms or den is ZERO:
        return num  # nothing is ever divided by an empty extent
    whole, rest = _divide_terms(num, den)
    if in_range(rest, den):
        return whole
    if whole.terms:
        return whole + floordiv(rest, den)
    if den.is_const:
        common = den.value
        for _, coefficient in rest.terms:
            common = gcd(common, coefficient)
        if common > 1:
            scaled = _polynomial({m: c // common for m, c in rest.terms})
            return floordiv(scaled, const(den.value // common))
    inner = single(rest)
    if isinstance(inner, Quotient):
        return floordiv(inner.left, inner.right * den)
    if isinstance(inner, Remainder):
        outer, left = _divide_terms(inner.right, den)
        if not left.terms:
            return mod(floordiv(inner.left, den), outer)
    return _pair(Quotient, rest, den, f"({rest})//({den})")


def mod(num: IndexExpr, den: IndexExpr) -> IndexExpr:
    """num modulo den for den >= 1, in [0, den), simplified with the ranges of the axes."""
    if den is ONE or den is ZERO:
        return ZERO
    _, rest = _divide_terms(num, den)
    if in_range(rest, den):
        return rest
    inner = single(rest)
    if isinstance(inner, Remainder):
        _, left = _divide_terms(inner.right, den)
        if not left.terms:
            return mod(inner.left, den)
    return _pair(Remainder, rest, den, f"({rest})%({den})")


def single(expr: IndexExpr) -> Atom | None:
    """The atom that `expr` is, None when it is anything else."""
    if len(expr.terms) == 1:
        monomial, coefficient = expr.terms[0]
        if coefficient == 1 and len(monomial) == 1:
            return monomial[0]
    return None


def _atom_max(atom: Atom) -> IndexExpr:
    """An upper bound of a non-negative atom, itself free of axes where possible."""
    if isinstance(atom, Axis | ComputedIndex):
        return atom.extent - 1
    if isinstance(atom, Remainder):
        return atom.right - 1
    if isinstance(atom, Quotient):
        top = upper(atom.left)
        if top is not None:
            return floordiv(top, atom.right)
    return _atom(atom)


def _atom_nonnegative(atom: Atom) -> bool:
    if isinstance(atom, Remainder):
        return nonnegative(atom.right)
    if isinstance(atom, Pair):
        return nonnegative(atom.left) and nonnegative(atom.right)
    return not isinstance(atom, Size) or atom.sign > 0


def upper(expr: IndexExpr) -> IndexExpr | None:
    """The largest value `expr` can take, or None when a coefficient's sign leaves it unknown."""
    total = ZERO
    for monomial, coefficient in expr.terms:
        if not monomial:
            total = total + coefficient
            continue
        if not all(_atom_nonnegative(atom) for atom in monomial):
            return None
        if coefficient > 0:
            total = total + coefficient * product(_atom_max(atom) for atom in monomial)
        elif all(isinstance(atom, Size) for atom in monomial):
            total = total + coefficient * _polynomial({monomial: 1})
    return total


def nonnegative(expr: IndexExpr) -> bool:
    """Whether `expr` >= 0 is certain (sizes are at least one, axes at least zero)."""
    low = 0
    for monomial, coefficient in expr.terms:
        if len(monomial) == 1 and isinstance(monomial[0], Size) and monomial[0].sign:
            coefficient *= monomial[0].sign
        elif not all(_atom_nonnegative(atom) for atom in monomial):
            return False
        if coefficient < 0:
            if monomial:
                top = upper(_polynomial({monomial: 1}))
                if top is None or not top.is_const:
                    return False
                low += coefficient * top.value
            else:
                low += coefficient
        elif all(isinstance(atom, Size) for atom in monomial):
            low += coefficient
    return low >= 0


def in_range(expr: IndexExpr, bound: IndexExpr) -> bool:
    """Whether 0 <= expr < bound is certain."""
    if not nonnegative(expr):
        return False
    top = upper(expr)
    return top is not None and nonnegative(bound - 1 - top)


def atoms(expr: IndexExpr) -> Iterator[Atom]:
    """Every atom in `expr`, those inside quotients, remainders and minima included."""
    for monomial, _ in expr.terms:
        for atom in monomial:
            yield atom
            for part in operands(atom):
                yield from atoms(part)


def operands(atom: Atom) -> tuple[IndexExpr, ...]:
    """The index expressions an atom is made of (not an axis's extent)."""
    return (atom.left, atom.right) if isinstance(atom, Pair) else ()


# (atom, left text, right text) -> text: an atom of two operands in some language.
Style = Mapping[type[Pair], Callable[[Atom, str, str], str]]


def _infix(sign: str) -> Callable[[Atom, str, str], str]:
    def write(atom: Atom, *texts: str) -> str:
        simple = (piece.is_const or single(piece) is not None for piece in operands(atom))
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
    left, right = (render(piece, leaf, style) for piece in operands(atom))
    return style[type(atom)](atom, left, right)


ZERO = const(0)
ONE = const(1)
