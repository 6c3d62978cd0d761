"""Calls that run eagerly in each call of the function: output, clocks, random numbers.

Capture only records such a call. The replacement code makes it before the graph (early) or right
after it (late), in the program's order, and before writes to objects.
docs/architecture/capture-effects.md lists the conditions under which the program cannot notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft_capture import frame as hook
from weft_capture.breaks import Break, BreakAtStep
from weft_capture.effects.runtime_asserts import has_checks
from weft_capture.model.constant import NONE, constant
from weft_capture.model.protocol import Output, Tracer, Value
from weft_capture.tensors.runtime_values import RuntimeSource, TensorSnapshot, origins


@dataclass(frozen=True, eq=False)
class DeferredCall:
    """One call; `result` is where its result is stored."""

    function: Callable[..., Any]
    args: list[Value]
    result: RuntimeSource
    snapshot: TensorSnapshot


class DeferredCalls:
    """The calls of one capture; `count` includes calls that were rolled back."""

    def __init__(self, tx: Tracer) -> None:
        self.tx = tx
        self.calls: list[DeferredCall] = []
        self.clock_at = -1
        self.count = 0
        self.written: set[int] = set()  # ids of lists that warnings go to

    def add(self, function: Callable[..., Any], *args: Value, early: bool = False) -> RuntimeSource:
        """Record a call and return the source of its result.

        Args:
            function: takes positional arguments.
            early: the call may run before the operations that precede it.

        Raises:
            Break: when an argument is computed after the call.
        """
        tx = self.tx
        handlers = tx.overrides
        if handlers.modes or handlers.level or handlers.overriding(list(args), {}):
            raise Break("torch-function", "a side effect inside a function mode")
        late = bool(tx.graph.op_count) and not early
        if not late and has_checks(tx.graph):
            raise Break("side-effect", "a call before a graph that may have to run again")
        if not late and any(origin.late for arg in args for origin in origins(arg.source)):
            raise Break("data-dependent-value", "an argument that the graph computes")
        result = RuntimeSource(f"_weft_runtime_{self.count}", late)
        self.count += 1
        self.calls.append(DeferredCall(function, list(args), result, TensorSnapshot(tx, args)))
        tx.journal.on_rollback(self.calls.pop)
        return result

    def read_clock(self, function: Callable[[], Any]) -> Value:
        """Record the reading of a clock."""
        source = self.add(function)
        if source.late and self.clock_at < 0:
            self.clock_at = self.tx.steps.now
            self.tx.journal.on_rollback(self.forget_clock)
        return self.tx.runtime_value(source, function())

    def forget_clock(self) -> None:
        """Allow operations again."""
        self.clock_at = -1

    def check_clock(self) -> None:
        """Break at a clock that an operation follows."""
        if self.clock_at >= 0:
            raise BreakAtStep(
                self.clock_at, Break("side-effect", "a clock read between operations")
            )

    def emit(self, out: Output, late: bool) -> None:
        """Write the calls before or after the graph."""
        for call in self.calls:
            if call.result.late is late:
                if late:
                    call.snapshot.check()
                # With the frame hook off, so that a handler or a stream is not captured.
                out.call(hook.run, [NONE, constant(call.function), *call.args])
                out.writer.store_local(call.result.name)
