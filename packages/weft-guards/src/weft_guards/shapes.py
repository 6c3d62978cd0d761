"""What was assumed of symbolic sizes, as guards over the inputs.

A `ShapeEnv` (torch's, over sympy) knows which inputs are functions of others, the range of each
symbol, and the conditions that branches asked for. `shape_guards` makes SHAPE guards of them. Only
called when something is symbolic, so sympy is imported inside functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from weft_core.errors import Unsupported
from weft_core.events import logger
from weft_core.jagged import is_jagged

from weft_guards.guards import Guard
from weft_guards.payloads import ShapeExpr
from weft_guards.sources import Source, TensorProperty

if TYPE_CHECKING:
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_log = logger("guards", "dynamic")

Binding = tuple[Source, Any]  # an input property, and the SymInt that stands for it


def symbolic_bindings(inputs: Iterable[tuple[Source, Any]]) -> Iterator[Binding]:
    """Yield every input property that has a SymInt for value.

    Args:
        inputs: sources with fake tensors or SymInts (anything else is passed over, and jagged
            tensors, whose sizes are those of what is inside).
    """
    for source, value in inputs:
        if isinstance(value, torch.SymInt):
            yield source, value
        elif isinstance(value, torch.Tensor) and not is_jagged(type(value)):
            rows: dict[Any, Sequence[Any]] = {"size": value.shape}
            if value.layout is torch.strided:
                rows |= {"stride": value.stride(), "storage_offset": [value.storage_offset()]}
            for prop, amounts in rows.items():
                for dim, amount in enumerate(amounts):
                    if isinstance(amount, torch.SymInt):
                        yield TensorProperty(source, prop, dim), amount


def shape_guards(shape_env: ShapeEnv, inputs: Iterable[tuple[Source, Any]]) -> list[Guard]:
    """Return the guards under which a graph with symbolic sizes is right.

    Args:
        shape_env: where the graph's symbols live.
        inputs: every graph input's source with its fake tensor or SymInt.

    Raises:
        Unsupported: when a condition is about a symbol that no input determines.
    """
    bindings = list(symbolic_bindings(inputs))
    origin = _origins(bindings)
    maker = _Maker(origin)
    for source, amount in bindings:
        maker.equal(source, amount.node.expr)
    used = {symbol for _, amount in bindings for symbol in amount.node.expr.free_symbols}
    for symbol in sorted(used, key=str):
        maker.range(symbol, shape_env.var_to_range.get(symbol))
    for condition in shape_env.guards:
        expr = shape_env.simplify(condition.expr)
        if not _implied(expr, shape_env):
            maker.condition(expr)
    for guard in maker.guards:
        _log.info("assumed: %s", guard)
    return maker.guards


def _origins(bindings: list[Binding]) -> dict[sympy.Symbol, Source]:
    """Return the first input property that is exactly each symbol.

    Symbols that were replaced since (two sizes found equal, a size found constant) keep the
    property they began as, for conditions that still mention them.
    """
    origin: dict[sympy.Symbol, Source] = {}
    for of in (attrgetter("node.expr"), attrgetter("node._expr")):
        for source, amount in bindings:
            expr = of(amount)
            if expr.is_Symbol:
                origin.setdefault(expr, source)
    return origin


def _implied(expr: Any, shape_env: ShapeEnv) -> bool:
    """Say whether the ranges of its symbols, which are guarded, already decide a condition."""
    import sympy  # noqa: PLC0415 - loaded already where something is symbolic
    from torch.utils._sympy.value_ranges import bound_sympy  # noqa: PLC0415 - imports sympy

    if expr is sympy.true:
        return True
    ranges = {symbol: shape_env.var_to_range[symbol] for symbol in expr.free_symbols
              if symbol in shape_env.var_to_range}  # fmt: skip
    bound: Any = bound_sympy(expr, ranges)
    return bool(bound.is_singleton() and bound.lower is sympy.true)


class _Maker:
    """Makes SHAPE guards from sympy expressions."""

    def __init__(self, origin: dict[sympy.Symbol, Source]) -> None:
        self.origin = origin
        self.guards: list[Guard] = []

    def _text(self, expr: Any, sources: list[Source]) -> str:
        """Print an expression as Python, with placeholders for sources, which are added to."""
        from torch.utils._sympy.printers import PythonPrinter  # noqa: PLC0415 - imports sympy

        unknown = [symbol for symbol in expr.free_symbols if symbol not in self.origin]
        if unknown:
            raise Unsupported(
                "shape-guard",
                f"the condition {expr} is about {', '.join(map(str, unknown))}, "
                "which no input's size determines",
                "mark the dimension static with mark_static",
            )
        origin = {symbol.name: self.origin[symbol] for symbol in expr.free_symbols}

        def placeholder(name: re.Match[str]) -> str:
            return _placeholder(origin[name[0]], sources) if name[0] in origin else name[0]

        return re.sub(r"\b[A-Za-z_]\w*", placeholder, PythonPrinter().doprint(expr))

    def _add(self, text: str, sources: list[Source]) -> None:
        guard = Guard(sources[0], "SHAPE", ShapeExpr(text, tuple(sources)))
        if guard not in self.guards:
            self.guards.append(guard)

    def equal(self, source: Source, expr: Any) -> None:
        """Guard that a property is the given function of other properties."""
        if expr.is_Symbol and self.origin.get(expr) == source:
            return
        sources: list[Source] = []
        left = _placeholder(source, sources)
        self._add(f"{left} == {self._text(expr, sources)}", sources)

    def range(self, symbol: sympy.Symbol, bounds: Any) -> None:
        """Guard the range of a symbol, as far as it says more than that sizes are not negative."""
        if bounds is None or symbol not in self.origin:
            return
        low = f"{int(bounds.lower)} <= " if bounds.lower.is_Integer else ""
        high = f" <= {int(bounds.upper)}" if bounds.upper.is_Integer else ""
        if isinstance(self.origin[symbol], TensorProperty) and low == "0 <= ":
            low = ""
        if low or high:
            self._add(f"{low}{{0}}{high}", [self.origin[symbol]])

    def condition(self, expr: Any) -> None:
        """Guard a condition."""
        sources: list[Source] = []
        text = self._text(expr, sources)
        if not sources:  # a constant that is not true: nothing can ever match
            raise Unsupported("shape-guard", f"the condition {expr} never holds")
        self._add(text, sources)


def _placeholder(source: Source, sources: list[Source]) -> str:
    """Return the placeholder of a source, which is added to the list when it is new."""
    if source not in sources:
        sources.append(source)
    return f"{{{sources.index(source)}}}"
