"""Run seeds of generators until they or the minutes end; reduce what fails; count."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import generator
from .alone import write
from .minimise import minimise, split
from .pool import Worker
from .program import Program, Verdict

MOST_REDUCED = 3  # programs of one function

# What weft may say of a program that is right.
EXPECTED = (
    "ZeroDivisionError",  # of integers of no elements
    "integral dtype. Got torch.bool",  # shifts of truth values
    "[overlapping-write]",  # through a view whose elements share memory
    "writes to memory that it reads elsewhere",
    "is not implemented",  # a derivative
    "is only known while running",
    "a kernel that stores torch.complex",
    "a kernel that stores torch.uint",
)


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
        said = "".join(f"\n    {n} x {text}" for text, n in self.notices.most_common(12))
        return f"{self.functions} functions, {self.programs} programs: {kinds}{said}"


@dataclass
class Hunt:
    """Runs the programs of one generator; those that fail are reduced and written into `folder`.

    Args:
        name: the generator.
        backend, sanitizer, device: see pool.Worker.
        minutes: when to stop.
        folder, reduce_seconds: where reduced programs go, and how long one is reduced.
        jobs: processes.
    """

    name: str
    backend: str = "codegen"
    sanitizer: str = ""
    device: str = "cpu"
    minutes: float = 1e9
    folder: Path | None = None
    reduce_seconds: float = 90.0
    jobs: int = 1
    say: Callable[[str], None] = print
    tally: Tally = field(default_factory=Tally)

    def run(self, seeds: Iterable[int]) -> Tally:
        """Run the programs of these seeds."""
        self.end = time.monotonic() + self.minutes * 60
        self.lock = threading.Lock()
        self.seeds = iter(seeds)
        with ThreadPoolExecutor(self.jobs) as pool:
            for done in [pool.submit(self._work) for _ in range(self.jobs)]:
                done.result()
        return self.tally

    def _work(self) -> None:
        worker = Worker(backend=self.backend, sanitizer=self.sanitizer, device=self.device)
        try:
            while time.monotonic() < self.end:
                with self.lock:
                    seed = next(self.seeds, None)
                if seed is None:
                    break
                verdict, parts = worker.seed(self.name, seed)
                with self.lock:
                    new = self._count(seed, verdict, parts)
                if new:
                    self._report(worker, seed, verdict)
        finally:
            worker.close()

    def _count(self, seed: int, verdict: Verdict, parts: int) -> bool:
        """Note a verdict; whether it is a failure."""
        tally = self.tally
        tally.functions += 1
        tally.programs += parts
        tally.kinds[verdict.kind] += 1
        for text in verdict.notices:
            line = re.sub(r"\d+", "N", text.partition("\n")[0])[:160]
            tally.notices[line] += 1
            if tally.notices[line] == 1 and not any(one in text for one in EXPECTED):
                self.say(f"{self.name} seed {seed}: says {text[:400]}")
        if not verdict.fails and verdict.kind != "pass":
            self.say(f"{self.name} seed {seed}: {verdict.kind} {verdict.detail[:200]}")
        return verdict.fails

    def _report(self, worker: Worker, seed: int, verdict: Verdict) -> None:
        """Say what fails of a function: programs of it that fail alone, or all of it."""
        found = []
        if verdict.kind not in ("generator", "harness"):
            program = generator(self.name)(seed)
            parts = split(program)
            found = [(part, worker.program(part, seed)) for part in parts]
            found = [(part, one) for part, one in found if one.fails] or [(program, verdict)]
        for number, (program, one) in enumerate(found or [(None, verdict)]):
            told = f"{one.detail[:300]}...{one.detail[300:][-600:]}"
            text = f"{self.name} seed {seed}: {one.kind}\n  {told}"
            if program is not None and number < MOST_REDUCED:
                text += self._reduced(worker, program, seed, number, one)
            with self.lock:
                self.tally.failures.append(text)
            self.say(text)

    def _reduced(
        self, worker: Worker, program: Program, seed: int, number: int, verdict: Verdict
    ) -> str:
        """Reduce a failing program and write its file; what to say of it."""
        if self.folder is None:
            return ""

        def fails(candidate: Program) -> bool:
            return worker.program(candidate, seed).kind == verdict.kind

        seconds = min(self.reduce_seconds, max(self.end - time.monotonic(), 10))
        smaller = minimise(program, fails, seconds) if self.reduce_seconds else program
        again = worker.program(smaller, seed)
        verdict = again if again.kind == verdict.kind else verdict
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.name}_{seed}_{number}_{self.backend}.py"
        write(path, smaller, verdict, self.backend, f"{self.name} seed {seed}", self.device)
        body = "".join(f"\n    {line}" for line in smaller.source.splitlines())
        return f"\n  {path}{body}" + "".join(f"\n    {call}" for call in smaller.calls)


def hunt(name: str, seeds: Iterable[int], **settings: Any) -> Tally:
    """Run seeds of a generator with the settings of `Hunt`."""
    return Hunt(name, **settings).run(seeds)
