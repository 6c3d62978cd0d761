"""`numpy.argsort`: of equal elements NumPy's default order is another one than torch's.

Where the program does not ask for a stable order, the graph checks that no elements are equal.
"""

from __future__ import annotations

from weft_capture import polyfills
from weft_capture.breaks import Break
from weft_capture.effects.runtime_asserts import emit_check
from weft_capture.functions.table import rule
from weft_capture.libraries.numpy import ArrayValue, apply, np
from weft_capture.model.constant import NONE, constant
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.tensor import TensorValue

_LAST = constant(-1)
_STABLE = ("stable", "mergesort")

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
        order = apply(tx, "argsort", [a, axis], {"kind": constant("stable")})
        if kind.as_constant() in _STABLE:
            return order
        if a.tensor.fake.is_floating_point():
            differ = tx.const_object(polyfills.all_differ).tp_call(tx, [a.tensor, axis], {})
            if isinstance(differ, TensorValue) and emit_check(tx, differ, True):
                return order
        raise Break("numpy", "numpy.argsort, where elements may be equal")
