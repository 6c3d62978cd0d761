"""If it does not pay, it does not run: a compiled graph proves itself against eager.

Call 2 runs both, calls 3 to 7 time both; then the slower one is dropped (eager replaces the
compiled graph only when it wins clearly) and the verdict is kept on disk. Only graphs that may run
twice on the same inputs are measured, and no slow ones: compiled code has little to lose there.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import fx
from weft_core import events, recording
from weft_core.cachedir import cache_dir, read_checked, try_write

from weft_codegen.kernels import CompiledGraph
from weft_codegen.loops.lower.fxnodes import is_pure
from weft_codegen.torch_compat import VERSION

Run = Callable[..., Any]

_ROUNDS = 5
# Eager must be this much faster: what two measurements of one thing differ by on a busy machine.
_CLEARLY = 1.1
_LONGEST_SECONDS = 0.05
_hints = events.logger("codegen", "perf_hints")
_log = logging.getLogger("weft.codegen.measure")
_tuning = events.logger("codegen", "autotuning")


def measured(compiled: CompiledGraph, gm: fx.GraphModule) -> Run:
    """What should run for `gm`: `compiled`, eager, or a trial that decides during its first calls.

    Args:
        compiled: made of the aten graph `gm`.
    """
    calls = [
        node for node in gm.graph.nodes if node.op not in ("placeholder", "output", "get_attr")
    ]
    # Whether it can run once more on the same inputs without anybody noticing.
    if not (compiled.loadable.repeatable and all(is_pure(node.target) for node in calls)):
        return compiled
    eager = Eager(gm)
    key = f"{compiled.path.stem}-{torch.get_num_threads()}-{VERSION}"
    path = cache_dir("verdicts") / hashlib.sha256(key.encode()).hexdigest()[:32]
    verdict = read_checked(path)
    if verdict is None:
        return Trial(compiled, eager, lambda pays: try_write(path, b"01"[pays : pays + 1]))
    if verdict == b"1":
        return compiled
    _hints.info("%s runs eagerly: measured slower before (%s)", eager, path)
    return eager


class Trial:
    """Calls `compiled` and times it against `eager`, then becomes the faster of the two."""

    def __init__(self, compiled: Run, eager: Run, keep: Callable[[bool], None]) -> None:
        self._compiled = compiled
        self._eager: Run | None = eager
        self._keep = keep
        self._lock = threading.Lock()
        self._calls = 0
        self._seconds: list[tuple[float, float]] = []
        self._run = self._round
        self._graph = recording.here()

    def __call__(self, *args: Any) -> Any:
        """The outputs of the graph."""
        return self._run(*args)

    def call_owning(self, args: list[Any]) -> Any:
        """As `CompiledGraph.call_owning`, once the compiled graph has won."""
        owning = getattr(self._run, "call_owning", None)
        return self._run(*args) if owning is None else owning(args)

    def _round(self, *args: Any) -> Any:
        eager = self._eager
        if eager is None or not self._lock.acquire(blocking=False):
            return self._compiled(*args)
        try:
            start = time.perf_counter()
            result = self._compiled(*args)
            fused = time.perf_counter() - start
            self._calls += 1
            if self._calls > 1:
                self._compare(eager, args, fused)
            return result
        finally:
            self._lock.release()

    def _compare(self, eager: Run, args: tuple[Any, ...], fused: float) -> None:
        if fused > _LONGEST_SECONDS:
            self._settle(pays=True)
            return
        start = time.perf_counter()
        try:
            eager(*args)
        except Exception:  # whatever eager cannot do here, the compiled graph just did
            _log.debug("eager failed in a measurement", exc_info=True)
            self._settle(pays=True)
            return
        if self._calls > 2:
            self._seconds.append((fused, time.perf_counter() - start))
        if len(self._seconds) == _ROUNDS:
            self._decide(eager)

    def _decide(self, eager: Run) -> None:
        fused, plain = zip(*self._seconds, strict=True)
        pays = any(statistic(fused) <= _CLEARLY * statistic(plain) for statistic in (min, median))
        verdict = "pays" if pays else "does not pay and runs eagerly"
        for report in (_tuning.info, _hints.debug if pays else _hints.info):
            times = median(fused) * 1e6, median(plain) * 1e6
            report("%s %s: %.1f µs compiled, %.1f µs eager", eager, verdict, *times)
        seconds = {"compiled": median(fused), "eager": median(plain), "pays": pays}
        recording.keep("measured", lambda: seconds, self._graph)
        self._keep(pays)
        self._settle(pays)

    def _settle(self, pays: bool) -> None:
        if not pays:
            assert self._eager is not None
            events.counters["codegen"]["does_not_pay"] += 1
            self._run = self._eager
            self._compiled = self._eager
            return
        self._run = self._compiled
        self._eager = None


class Eager:
    """The aten graph run operator by operator, as a compiled graph is called."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm

    def __call__(self, *args: Any) -> list[Any]:
        # Casts that autocast made are in the graph already.
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            with torch.no_grad(), torch._C._DisableAutocast():
                made = self._gm.forward(*args)
        else:
            made = self._gm.forward(*args)
        return list(made) if isinstance(made, list | tuple) else [made]

    def __str__(self) -> str:
        calls = [node for node in self._gm.graph.nodes if node.op == "call_function"]
        return f"a graph of {len(calls)} operators, the last {calls[-1].target}"
