"""What happens when a stage after capture fails.

By default the failure becomes a `BackendCompilerError` that names the stage, the op, the user's
line and a file that reproduces it. With `config.on_compile_error = "eager"` the graph runs op by
op instead, with one warning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from torch import fx
from weft_core import cachedir, events
from weft_core.dumps import HEADER, graph_script
from weft_core.errors import BackendCompilerError, CompilerUnavailable, WeftError, user_frame

from weft.settings import umbrella

_REPRO = f"# A graph that weft failed to compile. Run this file to see the failure.\n{HEADER}"


def describe(gm: fx.GraphModule) -> str:
    """Name a graph for the progress line: how many calls, and where the user's code begins."""
    nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module")]
    where = next((place for n in nodes if (place := user_line(n))), "")
    return f"a graph of {len(nodes)} calls" + (f" from {where}" if where else "")


def user_line(node: fx.Node) -> str:
    """Return `file:line` of the user's code that a node stands for, or an empty text."""
    return ":".join(user_frame(node.meta.get("stack_trace"))[:2])


def compile_or_fallback(
    compile_graph: Callable[[], Callable[..., Any]], gm: fx.GraphModule
) -> Callable[..., Any]:
    """Run a backend on a graph and turn a failure into what `config.on_compile_error` says.

    A machine that cannot compile always means eager execution, with one notice that says why.

    Raises:
        BackendCompilerError: when the backend fails and the setting is `"raise"`.
    """
    try:
        return compile_graph()
    except CompilerUnavailable as error:
        events.notify(f"{error}\n  Until then compiled functions run eagerly.", eager=True)
    except Exception as error:
        report = _report(error, gm)
        if umbrella.on_compile_error == "raise":
            raise report from error
        text = f"{report}\n  The graph runs eagerly (config.on_compile_error)."
        events.notify(text, eager=True)
    events.counters["stats"]["eager_fallbacks"] += 1
    return gm.forward


def _report(error: Exception, gm: fx.GraphModule) -> BackendCompilerError:
    """Build the error to raise; a stage that already knows its op and line keeps them."""
    if not isinstance(error, BackendCompilerError):
        cause = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
        error = BackendCompilerError(events.current_stage() or "backend", cause)
    first = next((place for n in gm.graph.nodes if (place := user_line(n))), None)
    line, remedy = error.user_line or first, error.remedy or _remedy(gm)
    return BackendCompilerError(error.stage, error.cause, error.op, line, remedy)


def _remedy(gm: fx.GraphModule) -> str:
    text = 'set weft.config.on_compile_error = "eager" to run this graph without compiling it'
    path = _write_repro(gm)
    if not path:
        return text
    smaller = f"python -m weft bisect {path}"
    return f"{text}; a program that reproduces the failure: {path} (`{smaller}` makes it smaller)"


def _write_repro(gm: fx.GraphModule) -> str | None:
    """Write a runnable file that compiles this graph on random inputs; None if it cannot be."""
    source = graph_script(gm, f"{_REPRO}import weft\n\n", "weft.compile(module)(*inputs)")
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    try:
        path = cachedir.cache_dir("repro") / f"{name}.py"
        cachedir.atomic_write(path, source.encode())
    except (OSError, CompilerUnavailable):
        return None
    return str(path)
