"""Launches of the program's Triton kernels: each is one node, `weft::launch_`.

Grid functions and `triton.heuristics` are executed symbolically, for each config of an autotuner.
Triton compiles, tunes and specialises when the node runs, as in eager execution.
"""

from __future__ import annotations

import functools
from typing import Any

from weft_core.errors import Unsupported
from weft_core.launches import KERNELS, LAUNCH_, bind

from weft_capture.breaks import Break
from weft_capture.effects.rehearsals import isolated
from weft_capture.functions.table import rule
from weft_capture.model.containers import SequenceValue
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.tensor import SymValue, TensorValue


class _Launched(Value):
    cls = object  # the compiled kernel, which does not exist before the graph runs


@rule(*(f"triton.runtime.{name}.run" for name in KERNELS.split()))
def _run(tx: Tracer, kernel: Any, *args: Value, grid: Value, warmup: Value, **kw: Value) -> Value:
    if kernel.source is None or warmup.nb_bool(tx):
        raise Break("triton-kernel", "a Triton kernel created in the frame, or a warmup call")
    tx.guard_identity(kernel.source, kernel.obj)
    tx.process_bound = "a Triton kernel"
    values: dict[int, Value] = {}

    def plain(value: Value) -> Any:
        value = tx.force(value)
        if isinstance(value, SequenceValue):
            return tuple(map(plain, value.items))
        if type(value) is not TensorValue and not isinstance(value, SymValue):
            return value.as_constant()
        values[id(value.example())] = value
        return value.example()

    def call(function: Any, meta: dict[str, Any]) -> Any:
        options = tx.literal({name: values.get(id(value), value) for name, value in meta.items()})
        return plain(tx.literal(function).tp_call(tx, [options], {}))

    size = plain(grid) if isinstance(grid, SequenceValue) else functools.partial(call, grid)
    keywords = {name: plain(value) for name, value in kw.items()}
    try:
        with isolated(tx, "the grid of a launch"):
            name, *pools, written = bind(kernel.obj, size, list(map(plain, args)), keywords, call)
    except Unsupported as reason:
        raise Break("triton-kernel", f"a launch of a Triton kernel: {reason.cause}") from None
    lists = [[values[id(item)] for item in pool] for pool in pools]
    launch = tx.literal([name, *lists, written])
    tx.graph.emit_plain("call_function", LAUNCH_, launch.unpack(tx), {})
    return _Launched()
