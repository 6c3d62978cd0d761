"""The logs of one capture: its graph, its side effects, and the code that replaces the frame."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

from torch.fx import GraphModule
from weft_core.events import counters, enabled, logger

from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Tracer

_graph_log = logger("capture", "graph")
_code_log = logger("capture", "graph_code")
_bytecode_log = logger("capture", "bytecode")
_text_log = logger("capture", "frame_code")
_effects_log = logger("capture", "side_effects")


def log_graph(graph: GraphModule) -> None:
    """Log a captured graph: `graph`, `graph_code`."""
    if enabled("graph"):
        lines = (f"  {n.op:<14} {n.name:<20} {n.target} {n.args}" for n in graph.graph.nodes)
        number = counters["capture"]["graphs"]
        _graph_log.info("captured graph %d\n%s", number, "\n".join(lines))
    if enabled("graph_code"):
        _code_log.info("%s", graph.code)


def log_code(tx: Tracer, code: types.CodeType) -> None:
    """Log what replaces a frame: `side_effects`, `bytecode`, `frame_code`."""
    original = tx.function.__code__
    if enabled("side_effects"):
        lines = "\n".join(f"  {line}" for line in _side_effects(tx)) or "  none"
        _effects_log.info("side effects of %s\n%s", original.co_qualname, lines)
    if enabled("bytecode"):
        title = f"{original.co_qualname} ({original.co_filename}:{original.co_firstlineno})"
        for which, shown in (("original", original), ("rewritten", code)):
            _bytecode_log.info("%s bytecode of %s\n%s", which, title, dis.Bytecode(shown).dis())
    if enabled("frame_code"):
        from weft_capture.output import frame_code  # noqa: PLC0415  loaded when it is asked for

        _text_log.info("%s", frame_code.log_text(code))


def _side_effects(tx: Tracer) -> Iterator[str]:
    """Yield what the replacement code does beside running its graph, in its order."""
    for call in sorted(tx.calls.calls, key=lambda call: call.result.late):
        name = call.function.__qualname__.removeprefix("_").removesuffix("_now")
        yield f"call {name} {'after' if call.result.late else 'before'} the graph"
    for value in tx.effects.changed:
        attributes = ", ".join(value.attrs) if isinstance(value, UserObject) else ""
        text = f"write {value.source} ({value.python_type().__name__})"
        yield f"{text}: {attributes}" if attributes else text
    for (_, name), (owner, _) in tx.effects.globals.items():
        text = owner.__qualname__ if isinstance(owner, type) else owner.get("__name__")
        yield f"write {text}.{name}"
