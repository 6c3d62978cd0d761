"""When a lowered backward may be used again: its inputs' layouts, and what the trace assumed.

The engine's key has covered the autograd structure, dtypes, devices and the sizes that it knows.
Left to check are the inputs' sizes and strides, and for symbolic sizes the assumptions that the
shape environment collected. All of it becomes one Python expression over three lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft_compiled_autograd.lower import Lowered

Layout = tuple[list[torch.Size], list[Any]]
Check = Callable[[list[torch.Size], list[Any], Sequence[int]], bool]

_size: Any = torch.Tensor.size
_stride: Any = torch.Tensor.stride
_is_sparse: Any = torch.Tensor.is_sparse.__get__  # type: ignore[attr-defined]


def layout(inputs: Sequence[torch.Tensor]) -> Layout:
    """The shapes and strides (a sparse gradient has none) of the inputs.

    Runs on every backward, so the loops are in C.
    """
    shapes = list(map(_size, inputs))
    if True in map(_is_sparse, inputs):
        return shapes, [None if t.is_sparse else t.stride() for t in inputs]
    return shapes, list(map(_stride, inputs))


def build_check(lowered: Lowered, inputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> Check:
    """Return `check(shapes, strides, sizes) -> bool` for a traced backward."""
    if lowered.mode.shape_env is None:
        shapes, strides = layout(inputs)
        fixed = tuple(sizes)
        return lambda now, now_strides, now_sizes: (
            now == shapes and now_strides == strides and tuple(now_sizes) == fixed
        )
    return _symbolic_check(lowered)


def _symbolic_check(lowered: Lowered) -> Check:
    """Compile the check of a trace with symbolic sizes."""
    # Both import sympy, which a trace without symbolic sizes must not load.
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # noqa: PLC0415
    from torch.utils._sympy.printers import PythonPrinter  # noqa: PLC0415

    printer = PythonPrinter()
    env = lowered.mode.shape_env
    names: dict[str, str] = {}
    terms: list[str] = []

    def print_value(value: Any) -> str:
        # `_expr` is what the input was given; `expr` would apply what the trace learnt since.
        expression = value.node._expr if isinstance(value, torch.SymInt) else value
        return str(printer.doprint(expression))

    def match(place: str, value: Any) -> None:
        """Require `place` to be `value`; the first sight of a bare symbol names it instead."""
        text = print_value(value)
        if text.isidentifier() and text not in names:
            names[text] = place
        else:
            terms.append(f"{place} == {text}")

    dense = [(index, fake) for index, fake in enumerate(lowered.fakes) if fake is not None]
    for index, fake in dense:
        for dim, size in enumerate(fake.shape):
            match(f"shapes[{index}][{dim}]", size)
    for index, symbol in enumerate(lowered.symbols):
        match(f"sizes[{index}]", symbol)
    for index, fake in dense:
        values = "".join(print_value(stride) + ", " for stride in fake.stride())
        terms.append(f"strides[{index}] == ({values})")
    terms += [str(printer.doprint(guard.expr)) for guard in env.guards]
    for symbol, bounds in env.var_to_range.items():
        if str(symbol) in names:
            terms.append(f"{symbol} >= {bounds.lower}")
    kinds = [None if fake is None else fake.dim() for fake in lowered.fakes]
    bindings = "; ".join(f"{name} = {place}" for name, place in names.items()) or "pass"
    source = (
        "def check(shapes, strides, sizes):\n"
        f"    if list(map(kind, strides)) != {kinds}: return False\n"
        f"    {bindings}\n"
        f"    return {' and '.join(terms) or 'True'}\n"
    )
    scope: dict[str, Any] = dict(SYMPY_INTERP, kind=lambda at: None if at is None else len(at))
    exec(source, scope)
    return scope["check"]  # type: ignore[no-any-return]


class SeenShapes:
    """Which dimensions of a program's inputs have changed so far: those are traced as symbolic.

    A program is told apart by the ranks of its inputs too, so they never change.
    """

    def __init__(self) -> None:
        self._last: list[torch.Size] = []
        self.dynamic: list[set[int]] = []

    def update(self, shapes: Sequence[torch.Size]) -> list[list[int]]:
        """Compare with what was seen before; return the dimensions to keep symbolic, per input."""
        self.dynamic = self.dynamic or [set() for _ in shapes]
        for dims, old, new in zip(self.dynamic, self._last, shapes):
            dims.update(d for d, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
        self._last = list(shapes)
        return [sorted(dims) for dims in self.dynamic]
