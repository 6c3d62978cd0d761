"""Identity and equality of two values, with their guards."""

from __future__ import annotations

import operator
from typing import Any

from weft_guards.sources import CallSource, ConstSource, Source

from weft_capture.breaks import Break
from weft_capture.model.constant import Constant, is_shared
from weft_capture.model.protocol import Tracer, Value
from weft_capture.model.slots import compare, one_object
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.runtime_values import RuntimeValue, is_runtime
from weft_capture.tensors.tensor import SymValue


def identical(tx: Tracer, left: Value, right: Value) -> bool:
    """Evaluate `left is right`; the result for two objects of the program is guarded.

    Raises:
        Break: for two equal constants, which may be one object or two.
    """
    data = Constant | SymValue | symbolic_scalars.SymFloatValue | RuntimeValue
    runtime = any(isinstance(o, RuntimeValue) and is_runtime(o) for o in (left, right))
    if isinstance(left, data) and isinstance(right, data) and not (runtime or left is right):
        return _one_number(tx, left, right)
    return one_object(tx, left, right)


def equal(tx: Tracer, left: Value, right: Value) -> bool:
    """Evaluate `left is right or left == right` as a Python bool, as containers do."""
    if one_object(tx, left, right) or compare(tx, "==", left, right).nb_bool(tx):
        return True
    hint = getattr(left, "hint", None)
    return hint != hint and identical(tx, left, right)  # NaN


def _one_number(tx: Tracer, left: Value, right: Value) -> bool:
    varies = any(
        isinstance(o, symbolic_scalars.SymFloatValue | RuntimeValue) for o in (left, right)
    )
    if left.python_type() is not right.python_type():
        return False
    same_payload = getattr(left, "value", left) is getattr(right, "value", right)  # NaN, say
    if not (varies or same_payload or tx.builtin(operator.eq, left, right).nb_bool(tx)):
        return False
    (source, first), (origin, other) = (_origin_object(tx, each) for each in (left, right))
    if source is None and origin is None:
        if not (varies or first is other or is_shared(first)):
            raise Break("object-identity", f"whether two objects {left.describe()} are one")
        return not varies
    if source != origin:
        tx.process_bound = "whether two numbers or texts are one object"
        sources = (source or ConstSource(first), origin or ConstSource(other))
        tx.guard(CallSource(operator.is_, sources), "CONST", first is other)
    return first is other


def _origin_object(tx: Tracer, value: Any) -> tuple[Source | None, object]:
    """Return the source of a number or string, and the object."""
    if isinstance(value, Constant):
        return value.origin, value.value
    if isinstance(value, symbolic_scalars.SymFloatValue | RuntimeValue):
        return value.source, value.hint
    entry, number = tx.graph.input_at.get(value.node), value.as_constant()
    return value.source, number if entry is None else entry.example
