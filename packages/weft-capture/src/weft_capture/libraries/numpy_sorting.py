"""`numpy.argsort`: of equal elements NumPy's default order is another one than torch's.

Where the program does not ask for a stable order, the graph calls NumPy itself, as an operator.
"""

from __future__ import annotations

import torch

from weft_capture.breaks import Break
from weft_capture.functions.table import rule
from weft_capture.libraries.numpy import ArrayValue, apply, np
from weft_capture.model.constant import NONE, constant
from weft_capture.model.protocol import Tracer, Value

_LAST = constant(-1)
_STABLE = ("stable", "mergesort")
_library = torch.library.Library("weft_capture", "FRAGMENT")
_library.define("numpy_argsort(Tensor array, int axis) -> Tensor")


def _order(array: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.from_numpy(np.argsort(array.numpy(), axis))


def _fake(array: torch.Tensor, axis: int) -> torch.Tensor:
    return array.new_empty(array.shape, dtype=torch.int64)


_library.impl("numpy_argsort", _order, "CPU")
_library.impl("numpy_argsort", _fake, "Meta")

if np is not None:

    @rule(np.argsort)
    def _argsort(
        tx: Tracer, a: Value, axis: Value = _LAST, kind: Value = NONE, **more: Value
    ) -> Value:
        if more or not isinstance(a, ArrayValue) or a.cls is not np.ndarray:
            raise Break("numpy", "numpy.argsort with more arguments, or of no array")
        if axis is NONE:
            a, axis = a.call_method(tx, "ravel", [], {}), constant(0)
            assert isinstance(a, ArrayValue)
        stable = apply(tx, "argsort", [a, axis], {"kind": constant("stable")})
        kind_name = kind.as_constant()
        if kind_name in _STABLE:
            return stable
        if kind_name not in (None, "quicksort"):
            raise Break("numpy", f"numpy.argsort of kind {kind_name}")
        operator = torch.ops.weft_capture.numpy_argsort.default
        order = tx.graph.emit("call_function", operator, [a.tensor, axis], {})
        return ArrayValue(order, np.ndarray)
