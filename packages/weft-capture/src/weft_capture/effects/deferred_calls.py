"""Functions that run for real in each call: output, clocks, random numbers.

Capture never runs them for the program. It records the call, and the replacement code makes it:
early, before the graph, or late, right after it, each in the program's order, and before writes to
objects. The conditions under which nothing can tell are checked; docs/architecture has them.
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
from weft_capture.tensors.runtime_values import RuntimeSource, Seen, origins


@dataclass(frozen=True, eq=False)
class RealCall:
    """One call; `made` is where its result goes."""

    function: Callable[..., Any]
    args: list[Value]
    made: RuntimeSource
    seen: Seen


class DeferredCalls:
    """The calls of one capture; `count` of them, those that were taken back included."""

    def __init__(self, tx: Tracer) -> None:
        self.tx = tx
        self.calls: list[RealCall] = []
        self.clock_at = -1
        self.count = 0
        self.written: set[int] = set()  # ids of lists that warnings go to

    def add(self, function: Callable[..., Any], *args: Value, early: bool = False) -> RuntimeSource:
        """Record a call; returns where its result will be.

        Args:
            function: takes positional arguments.
            early: it need not come after the operations before it.

        Raises:
            Break: when an argument comes later than the call.
        """
        tx = self.tx
        handlers = tx.overrides
        if handlers.modes or handlers.level or handlers.overriding(list(args), {}):
            raise Break("torch-function", "an effect under handlers of the program")
        late = bool(tx.graph.op_count) and not early
        if not late and has_checks(tx.graph):
            raise Break("side-effect", "what runs before a graph that may have to be given up")
        if not late and any(one.late for arg in args for one in origins(arg.source)):
            raise Break("data-dependent-value", "an argument that is known only after the graph")
        made = RuntimeSource(f"_weft_made_{self.count}", late)
        self.count += 1
        self.calls.append(RealCall(function, list(args), made, Seen(tx, args)))
        tx.journal.on_rollback(self.calls.pop)
        return made

    def read_clock(self, function: Callable[[], Any]) -> Value:
        """Record the reading of a clock."""
        made = self.add(function)
        if made.late and self.clock_at < 0:
            self.clock_at = self.tx.steps.now
            self.tx.journal.on_rollback(self.forget_clock)
        return self.tx.made(made, function())

    def forget_clock(self) -> None:
        """Allow operations again."""
        self.clock_at = -1

    def check_clock(self) -> None:
        """Break at the clock that an operation would follow."""
        if self.clock_at >= 0:
            raise BreakAtStep(self.clock_at, Break("side-effect", "a clock between operations"))

    def emit(self, out: Output, late: bool) -> None:
        """Write the calls before or after the graph."""
        for call in self.calls:
            if call.made.late is late:
                if late:
                    call.seen.check()
                # With the hook off: what a handler or a stream does is no program to capture.
                out.call(hook.run, [NONE, constant(call.function), *call.args])
                out.writer.store_local(call.made.name)
