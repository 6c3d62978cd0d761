"""Run seeds of generators until they or the minutes end; reduce what fails; count."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from . import generator
from .alone import write
from .minimise import minimise
from .pool import Worker
from .program import Program, Verdict


@dataclass
class Tally:
    """What became of the programs of one generator."""

    functions: int = 0
    programs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    notices: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.kinds.most_common())
        said = "".join(f"\n    {n} x {text}" for text, n in self.notices.most_common(8))
        return f"{self.functions} functions, {self.programs} programs: {kinds}{said}"


def hunt(
    name: str,
    seeds: Iterable[int],
    *,
    backend: str = "codegen",
    minutes: float = 1e9,
    folder: Path | None = None,
    reduce_seconds: float = 90.0,
    say: Callable[[str], None] = print,
) -> Tally:
    """Run a generator's programs; those that fail are reduced and written into `folder`."""
    tally, end = Tally(), time.monotonic() + minutes * 60
    worker = Worker(backend=backend)
    try:
        for seed in seeds:
            if time.monotonic() > end:
                break
            verdict, parts = worker.seed(name, seed)
            tally.functions += 1
            tally.programs += parts
            tally.kinds[verdict.kind] += 1
            tally.notices.update(text.splitlines()[0][:160] for text in verdict.notices if text)
            if verdict.fails:
                told = f"{verdict.detail[:300]}...{verdict.detail[300:][-600:]}"
                text = f"{name} seed {seed}: {verdict.kind}\n  {told}"
                tally.failures.append(text)
                say(text)
                if folder is not None and reduce_seconds:
                    left = min(reduce_seconds, max(end - time.monotonic(), 10))
                    say(f"  {_reduced(worker, name, seed, verdict, folder, left)}")
            elif verdict.kind != "pass":
                say(f"{name} seed {seed}: {verdict.kind} {verdict.detail[:200]}")
    finally:
        worker.close()
    return tally


def _reduced(
    worker: Worker, name: str, seed: int, verdict: Verdict, folder: Path, seconds: float
) -> Path:
    """Reduce a failing program, write its file and return the path."""
    program = smaller = generator(name)(seed)
    if verdict.kind not in ("generator", "harness"):

        def fails(candidate: Program) -> bool:
            return worker.program(candidate).kind == verdict.kind

        smaller = minimise(program, fails, seconds)
        found = worker.program(smaller)
        verdict = found if found.kind == verdict.kind else verdict
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{seed}_{worker.backend}.py"
    write(path, smaller, verdict, worker.backend, f"{name} seed {seed}")
    return path
