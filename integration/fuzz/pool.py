"""A worker process that is started again when a program crashes it, hangs, or it has run many."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .program import EAGER, Program, Verdict

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS_A_PROCESS = 300  # loaded libraries are never unloaded


class Worker:
    """Runs one program at a time in another process.

    Args:
        timeout: seconds that a program may take.
        backend: what `weft.compile` is given.
    """

    def __init__(self, timeout: float = 120.0, backend: str = "codegen") -> None:
        self.timeout = timeout
        self.backend = backend
        self.process: subprocess.Popen[str] | None = None
        self.folder: str | None = None
        self.programs = 0

    def seed(self, name: str, seed: int) -> tuple[Verdict, int]:
        """Run a generator's program; also how many programs in one that is."""
        return self._ask({"generator": name, "seed": seed})

    def program(self, program: Program) -> Verdict:
        """Run a program that is at hand."""
        return self._ask({"program": asdict(program)})[0]

    def close(self) -> None:
        """End the process and sweep its cache folder."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _ask(self, task: dict[str, Any]) -> tuple[Verdict, int]:
        if self.programs >= PROGRAMS_A_PROCESS:
            self.close()
        if self.process is None:
            self._start()
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        self.programs += 1
        process.stdin.write(json.dumps({**task, "backend": self.backend}) + "\n")
        process.stdin.flush()
        line, ready, phase = "\n", True, "eager"
        while line == "\n":
            ready = bool(select.select([process.stdout], [], [], self.timeout)[0])
            line = process.stdout.readline() if ready else ""
            phase = "weft" if line == "\n" else phase
        if line:
            found = json.loads(line)
            parts = found.pop("parts")
            return Verdict(**{**found, "notices": tuple(found["notices"])}), parts
        verdict = self._ended(ready)
        self.close()
        if phase == "eager":
            verdict = Verdict(EAGER, verdict.detail)
        return verdict, 1

    def _ended(self, crashed: bool) -> Verdict:
        assert self.process is not None and self.folder is not None
        if not crashed:
            return Verdict("hang", f"no answer in {self.timeout:.0f} s")
        status = self.process.wait()
        said = Path(self.folder, "stderr").read_text(errors="replace")
        return Verdict("crash", f"exit status {status}\n{said[-3000:]}")

    def _start(self) -> None:
        self.programs = 0
        self.folder = tempfile.mkdtemp(prefix="weft-fuzz-")
        settings = {
            "WEFT_CACHE_DIR": os.path.join(self.folder, "cache"),
            "WEFT_PGO": "0",
            "WEFT_MEASURE": "0",
            "OMP_NUM_THREADS": "1",
        }
        with open(Path(self.folder, "stderr"), "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "integration.fuzz.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **settings},
            )
