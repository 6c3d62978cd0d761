"""Scalar expressions: what one iteration of a loop computes.

A value is an immutable, interned DAG (equal expressions are the same object, so a repeated
subexpression is found by identity).  Every operation is one row of `OPS`, which serves type rules,
printing, interpretation, C and Triton alike:

    Expr = Const(value, dtype)                   a literal
         | Index(index, dtype)                   an index expression used as a number
         | Load(buffer, index, dtype, mask)      an element of a buffer; 0 where mask is false
         | Read(local, index, dtype)             an element of a local (index 0 for a scalar)
         | Apply(name, args, dtype)                 a row of OPS
         | Cast(arg, dtype)                      C-like conversion; float to bool is `!= 0`

Arithmetic never happens in bfloat16 or float16: the lowering casts loads to float32 and the value
back before the store.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

from weft_codegen.loops import index as ix
from weft_codegen.loops.ops import DTYPES, OPS

Number = bool | int | float


Operand = Any  # an Expr, or a Python number that takes the other operand's dtype


def _binary(name: str, swapped: bool = False) -> Callable[[Any, Operand], Expr]:
    """The Python operator that applies `name` (a method of Expr)."""

    def method(self: Expr, other: Operand) -> Expr:
        if not isinstance(other, Expr):
            other = constant(other, self.dtype)
        return apply(name, other, self) if swapped else apply(name, self, other)

    return method


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """A scalar value of `dtype`; make one with `constant`, `load`, `apply`, `cast`, ...

    Python's operators apply the rows of OPS, except that `==` compares identities.
    """

    dtype: torch.dtype

    __add__ = _binary("add")
    __radd__ = _binary("add", swapped=True)
    __sub__ = _binary("sub")
    __rsub__ = _binary("sub", swapped=True)
    __mul__ = _binary("mul")
    __rmul__ = _binary("mul", swapped=True)
    __truediv__ = _binary("div")
    __rtruediv__ = _binary("div", swapped=True)
    __and__ = _binary("and")
    __or__ = _binary("or")
    __lt__ = _binary("lt")
    __le__ = _binary("le")
    __gt__ = _binary("gt")
    __ge__ = _binary("ge")

    def __neg__(self) -> Expr:
        return apply("neg", self)

    @functools.cached_property
    def children(self) -> tuple[Expr, ...]:
        """The expressions this one is computed from, those inside index expressions included."""
        held = (getattr(self, item.name) for item in fields(self))
        return tuple(child for part in held for child in _held(part))

    @functools.cached_property
    def axes(self) -> frozenset[ix.Axis]:
        """Every loop axis the value depends on (not through locals)."""
        own = {
            atom for where in self.indices for atom in ix.atoms(where) if isinstance(atom, ix.Axis)
        }
        return frozenset(own).union(*(child.axes for child in self.children))

    @property
    def indices(self) -> tuple[ix.IndexExpr, ...]:
        """The index expressions this node itself holds."""
        return (self.index,) if isinstance(self, Index | Load | Read) else ()

    def __repr__(self) -> str:
        return expr_text(self)


def computed_operands(where: ix.IndexExpr) -> tuple[Expr, ...]:
    """The expressions that `where` takes integers from (indirect indexing)."""
    return tuple(atom.expr for atom in ix.atoms(where) if isinstance(atom, ix.ComputedIndex))


def _held(part: Any) -> tuple[Expr, ...]:
    """The expressions in a field of a node."""
    if isinstance(part, ix.IndexExpr):
        return computed_operands(part)
    if isinstance(part, Expr):
        return (part,)
    return part if isinstance(part, tuple) else ()


@dataclass(frozen=True, eq=False, repr=False)
class Const(Expr):
    """A literal; floats may be inf, nan and -0.0."""

    value: Number


@dataclass(frozen=True, eq=False, repr=False)
class Index(Expr):
    """An index expression as an integer value."""

    index: ix.IndexExpr


@dataclass(frozen=True, eq=False, repr=False)
class Load(Expr):
    """The element `index` (counted from the buffer's first element) of buffer `buffer`.

    `dtype` is the buffer's.  With a mask the address is only touched where the mask is true;
    elsewhere the value is zero.
    """

    buffer: str
    mask: Expr | None
    index: ix.IndexExpr


@dataclass(frozen=True)
class Local:
    """A variable of a kernel: a scalar (extent 1) or a row of `extent` elements."""

    name: str
    dtype: torch.dtype
    extent: ix.IndexExpr

    @property
    def is_scalar(self) -> bool:
        """Whether it is a single value, written without an index."""
        return self.extent is ix.ONE


@dataclass(frozen=True, eq=False, repr=False)
class Read(Expr):
    """The current value of a local's element `index`."""

    local: Local
    index: ix.IndexExpr


@dataclass(frozen=True, eq=False, repr=False)
class Apply(Expr):
    """A row of OPS applied to `args`."""

    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Cast(Expr):
    """`arg` converted to `dtype`; towards integers it truncates, as C does."""

    arg: Expr


_interned: weakref.WeakValueDictionary[Any, Expr] = weakref.WeakValueDictionary()


def _make(kind: type[Expr], *fields: Any) -> Any:
    key = (kind, *fields)
    node = _interned.get(key)
    if node is None:
        node = _interned[key] = kind(*fields)
    return node


def constant(value: Number, dtype: torch.dtype) -> Const:
    """The literal `value`, converted to `dtype`; an integer beyond its range wraps around."""
    if dtype.is_floating_point:
        # -0.0 == 0.0 and nan != nan, so the bits are the identity.
        key = (Const, dtype, struct.pack("d", value))
        return _interned.setdefault(key, Const(dtype, float(value)))  # type: ignore[return-value]
    if dtype is torch.bool:
        return _make(Const, dtype, bool(value))  # type: ignore[no-any-return]
    if not dtype.is_complex:  # of which there is no code
        limits = torch.iinfo(dtype)
        value = (int(value) - limits.min) % (1 << limits.bits) + limits.min
    return _make(Const, dtype, int(value))  # type: ignore[no-any-return]


def index_value(where: ix.IndexExpr, dtype: torch.dtype = torch.int64) -> Expr:
    """`where` as a number of `dtype`."""
    if where.is_const:
        return constant(where.value, dtype)
    if not dtype.is_floating_point:
        return _make(Index, dtype, where)  # type: ignore[no-any-return]
    return cast(_make(Index, torch.int64, where), dtype)


def load(buffer: str, where: ix.IndexExpr, dtype: torch.dtype, mask: Expr | None = None) -> Expr:
    """The element `where` of `buffer`; see Load."""
    if isinstance(mask, Const):
        if not mask.value:
            return constant(0, dtype)
        mask = None
    return _make(Load, dtype, buffer, mask, where)  # type: ignore[no-any-return]


def read(local: Local, where: ix.IndexExpr) -> Read:
    """The element `where` of `local`."""
    return _make(Read, local.dtype, local, where)  # type: ignore[no-any-return]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic on `dtype` happens in: float32 for the 16-bit floats."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def cast(arg: Expr, dtype: torch.dtype) -> Expr:
    """`arg` as `dtype`; nothing to do when it has it, or had it before it was widened."""
    if arg.dtype is dtype:
        return arg
    if isinstance(arg, Cast) and arg.arg.dtype is dtype and compute_dtype(dtype) is arg.dtype:
        return arg.arg
    if isinstance(arg, Const) and _castable(value := _number(arg), dtype):
        return constant(value, dtype)
    if isinstance(arg, Index) and not dtype.is_floating_point and dtype is not torch.bool:
        return _make(Index, dtype, arg.index)  # type: ignore[no-any-return]
    return _make(Cast, dtype, arg)  # type: ignore[no-any-return]


def _number(literal: Const) -> Number:
    """The value of a literal as its dtype holds it."""
    if literal.dtype is not torch.float32 or not math.isfinite(literal.value):
        return literal.value
    return _float32(literal.value)


def _castable(value: Number, dtype: torch.dtype) -> bool:
    """Whether a literal converts without rounding of its own or undefined behaviour."""
    if dtype in (torch.float64, torch.bool):
        return True
    if dtype is torch.float32:
        return not math.isfinite(value) or _float32(value) == value
    return float(value).is_integer() and abs(value) < 2**31 and not dtype.is_floating_point


def _float32(value: float) -> float:
    """The nearest number that float32 holds."""
    return ctypes.c_float(value).value


def apply(name: str, *args: Expr) -> Expr:
    """The operation `name` on `args`.

    Raises KeyError for an unknown name and ValueError when the operands' number or dtypes do not
    fit the row in OPS.
    """
    if name == "add" and args[0].dtype is torch.bool:
        name = "or"  # a sum of bits is 2 in C and 0 in Triton
    row = OPS[name]
    if len(args) != row.arity:
        raise ValueError(f"{name} takes {row.arity} operands, got {len(args)}")
    dtype = row.dtype(*(arg.dtype for arg in args))
    folded = _fold(name, args)
    return folded if folded is not None else _make(Apply, dtype, name, args)


# Identities that hold for every operand, nan and -0.0 included: (op, operand position, constant).
_NEUTRAL = (("mul", 0, 1), ("mul", 1, 1), ("div", 1, 1), ("sub", 1, 0))
_NEUTRAL_INTEGERS = (*_NEUTRAL, ("add", 0, 0), ("add", 1, 0))


_POLYNOMIAL: dict[str, Callable[..., ix.IndexExpr]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}


def _of_indices(name: str, args: tuple[Expr, ...]) -> Expr | None:
    """Arithmetic on index expressions; a comparison whose answer the axes' ranges give."""
    left, right = (index_of(arg) for arg in args)
    if left is None or right is None:
        return None
    if name in _POLYNOMIAL:
        small = all(abs(scale) < 2**31 for side in (left, right) for _, scale in side.terms)
        wraps = not small or args[0].dtype is not torch.int64
        return None if wraps else index_value(_POLYNOMIAL[name](left, right))
    if name == "eq":
        apart = ix.nonnegative(right - left - 1) or ix.nonnegative(left - right - 1)
        return constant(left is right, torch.bool) if apart or left is right else None
    if ix.nonnegative(right - left - 1):
        return constant(name == "lt", torch.bool)
    return constant(name == "ge", torch.bool) if ix.nonnegative(left - right) else None


def is_product(value: Expr) -> bool:
    """Whether an expression is a term of a matrix product."""
    return isinstance(value, Apply) and value.name == "product"


def index_of(arg: Expr) -> ix.IndexExpr | None:
    """The index expression that an integer expression is, or None."""
    if isinstance(arg, Index):
        return arg.index
    if isinstance(arg, Const) and not arg.dtype.is_floating_point:
        return ix.const(int(arg.value))
    return None


def _fold(name: str, args: tuple[Expr, ...]) -> Expr | None:
    if name in ("lt", "ge", "eq") or (name in _POLYNOMIAL and isinstance(args[0], Index | Const)):
        found = _of_indices(name, args)
        if found is not None:
            return found
    if name == "and" and args[0].dtype is torch.bool:
        known = next((arg for arg in args if isinstance(arg, Const)), None)
        other = args[args[0] is known]
        return None if known is None else other if known.value else known
    for op, position, value in _NEUTRAL if args[0].dtype.is_floating_point else _NEUTRAL_INTEGERS:
        arg = args[position] if name == op else None
        if isinstance(arg, Const) and arg.value == value:
            return args[1 - position]
    if name == "where":
        condition, yes, no = args
        if isinstance(condition, Const):
            return yes if condition.value else no
        if yes is no:
            return yes
    return None


def where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """`yes` where `condition` is true, else `no`."""
    return apply("where", condition, yes, no)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct node under `roots`, operands before their users."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))


def cost(nodes: Iterable[Expr], load: int = 0) -> int:
    """Rough cost of computing these nodes once, in float additions; a load costs `load`."""
    prices = {Apply: lambda node: OPS[node.name].cost, Load: lambda node: load}
    return sum(prices[type(node)](node) for node in nodes if type(node) in prices)


def dtype_text(dtype: torch.dtype) -> str:
    """The short name of a dtype (f32, i64, b8, ...)."""
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def index_text(where: ix.IndexExpr) -> str:
    """`where` as Python text, with computed integers in braces."""
    return ix.render(where, _leaf)


def _leaf(atom: ix.Atom) -> str:
    return f"{{{expr_text(atom.expr)}}}" if isinstance(atom, ix.ComputedIndex) else atom.key


def expr_text(node: Expr, names: Mapping[Expr, str] = MappingProxyType({})) -> str:
    """One-line text of an expression; nodes in `names` print as their name."""
    if node in names:
        return names[node]

    def text(operand: Expr) -> str:
        return expr_text(operand, names)

    if isinstance(node, Const):
        return repr(node.value)
    if isinstance(node, Index):
        return f"({index_text(node.index)})"
    if isinstance(node, Load):
        mask = "" if node.mask is None else f" if {text(node.mask)}"
        return f"{node.buffer}[{index_text(node.index)}{mask}]"
    if isinstance(node, Read):
        return element_text(node.local, node.index)
    if isinstance(node, Cast):
        return f"{dtype_text(node.dtype)}({text(node.arg)})"
    assert isinstance(node, Apply)
    args = [text(arg) for arg in node.args]
    template = OPS[node.name].c
    if "_{t}" in template:
        return f"{node.name}({', '.join(args)})"
    return template.format(*args)


def element_text(local: Local, where: ix.IndexExpr) -> str:
    """A local's name, with the index where it has more than one element."""
    return local.name if local.is_scalar else f"{local.name}[{index_text(where)}]"
