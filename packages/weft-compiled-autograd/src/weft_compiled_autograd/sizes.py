"""A size that is only a name: what the engine carries around while a tape is recorded.

The engine stores a dynamic size in a `SymInt`, and that accepts any object that answers the few
questions below. A reference has no value, so nothing can specialise on it by accident, and no
symbolic-shape machinery (sympy, 0.35 s to import) is loaded for it.
"""

from __future__ import annotations

from typing import Any

from weft_compiled_autograd.errors import NotCapturable


class SizeRef:
    """Stands for one dynamic size. Products and sums are references that nothing may name."""

    def is_int(self) -> bool:
        """Yes: a SymInt; without a value, so symbolic too."""
        return True

    def is_float(self) -> bool:
        """No; nor any of the other kinds."""
        return False

    is_symbolic = is_int
    is_bool = is_nested_int = is_constant = is_float

    def maybe_as_int(self) -> int | None:
        """No value is known."""
        return None

    def clone(self) -> SizeRef:
        """References have no state."""
        return self

    def wrap_int(self, value: int) -> SizeRef:
        """A constant beside a reference: its value is of no interest."""
        return SizeRef()

    def mul(self, other: Any) -> SizeRef:
        """A product; the engine computes element counts that nothing reads."""
        return SizeRef()

    add = sub = sym_max = sym_min = mul

    def guard_int(self, *where: Any) -> int:
        """Refuse to be a number.

        Raises:
            NotCapturable: always.
        """
        raise NotCapturable("the value of a dynamic size is needed during the capture")

    int_ = guard_int

    def __str__(self) -> str:
        return "size"
