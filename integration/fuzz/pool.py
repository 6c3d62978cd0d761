"""A worker process that is started again when a program crashes it, hangs, or it has run many.

Most seeds compile without optimisation, which takes gcc half the time.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .program import EAGER, Program, Verdict

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS_A_PROCESS = 200  # loaded libraries are never unloaded
OPTIMISED = 6  # one of so many seeds compiles as usual
SANITIZERS = {"address": "libasan.so", "undefined": "libubsan.so"}


class Worker:
    """Runs one program at a time in another process.

    Args:
        timeout: seconds that a function may take.
        backend: what `weft.compile` is given.
        sanitizer: of SANITIZERS, for generated code; "" is none.
        device: where the tensors of a program are.
    """

    def __init__(
        self,
        timeout: float = 120.0,
        backend: str = "codegen",
        sanitizer: str = "",
        device: str = "cpu",
    ) -> None:
        self.timeout = timeout
        self.backend = backend
        self.sanitizer = sanitizer
        self.device = device
        self.process: subprocess.Popen[str] | None = None
        self.folder: str | None = None
        self.functions = 0

    def seed(self, name: str, seed: int) -> tuple[Verdict, int]:
        """Run a generator's program; also how many programs in one that is."""
        return self._ask({"generator": name, "seed": seed}, seed)

    def program(self, program: Program, seed: int = 0) -> Verdict:
        """Run a program that is at hand, compiled as that of the seed."""
        return self._ask({"program": asdict(program)}, seed)[0]

    def close(self) -> None:
        """End the process and sweep its cache folder."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _ask(self, task: dict[str, Any], seed: int) -> tuple[Verdict, int]:
        if self.functions >= FUNCTIONS_A_PROCESS:
            self.close()
        if self.process is None:
            self._start()
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        self.functions += 1
        compiler = f"{self.folder}/" + ("usual" if seed % OPTIMISED == 0 else "quick")
        task |= {"backend": self.backend, "compiler": compiler, "device": self.device}
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        line, ready, phase = "\n", True, "eager"
        while line == "\n":
            ready = bool(select.select([process.stdout], [], [], self.timeout)[0])
            line = process.stdout.readline() if ready else ""
            phase = "weft" if line == "\n" else phase
        if line:
            found = json.loads(line)
            parts = found.pop("parts")
            if found.pop("last", False):
                self.close()
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
        self.functions = 0
        self.folder = tempfile.mkdtemp(prefix="weft-fuzz-")
        compiler = os.environ.get("CC") or "gcc"
        checks = f" -fsanitize={self.sanitizer}" if self.sanitizer else ""
        for name, flags in (("usual", checks), ("quick", f" -O0{checks}")):
            path = Path(self.folder, name)
            path.write_text(f'#!/bin/sh\nexec {compiler} "$@"{flags}\n')
            path.chmod(0o700)
        settings = {
            "WEFT_CACHE_DIR": str(Path(self.folder, "cache")),
            "WEFT_PGO": "0",
            "WEFT_MEASURE": "0",
            "OMP_NUM_THREADS": "1",
        }
        if self.sanitizer:
            settings |= _sanitized(compiler, self.sanitizer, Path(self.folder, "expected"))
        with Path(self.folder, "stderr").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "integration.fuzz.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **settings},
            )


def _sanitized(compiler: str, sanitizer: str, expected: Path) -> dict[str, str]:
    """The environment of a process whose generated code is checked.

    The sanitizer looks for the function that throws C++ exceptions when it is loaded. Guards read
    a tensor's object, and what lies behind it, to learn where torch keeps its fields.
    """
    expected.write_text("interceptor_via_fun:PyBytes_FromStringAndSize\n")
    libraries = []
    for name in (SANITIZERS[sanitizer], "libstdc++.so.6"):
        command = [*shlex.split(compiler), f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        libraries.append(found.stdout.strip())
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": f"detect_leaks=0:detect_odr_violation=0:suppressions={expected}",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
