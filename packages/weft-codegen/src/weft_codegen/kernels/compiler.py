"""Runs the C compiler, and tells a machine that cannot compile from source that is wrong.

Each command gets a process group of its own, which ends with this call whatever happens, and no
later than `config.compiler_timeout`. After a failure an empty source is compiled: a compiler that
cannot do that is not asked again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft_core.errors import CompilerUnavailable

from weft_codegen.config import settings
from weft_codegen.kernels.toolchain import Toolchain, mark_broken

_FULL = re.compile(r"No space left|quota exceeded|[Ff]ile size limit|File too large|Read-only file")
_ENDED = re.compile(r"signal terminated program|internal compiler error|Cannot allocate|out of mem")
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Finished:
    """What a command did: whether it made its file, and what it wrote."""

    worked: bool
    text: str


class _TooLong(Exception):
    """A command ran longer than it may."""


def run_all(commands: Sequence[tuple[Sequence[str], Path]], tools: Toolchain) -> list[Finished]:
    """Run commands at once, each with the file that it makes.

    Raises:
        OSError: when there is no room for the files.
        CompilerUnavailable: when a command does not start or end, or the compiler cannot even
            compile an empty source.
    """
    folder = commands[0][1].parent
    try:
        finished = _run(commands, settings.compiler_timeout)
    except _TooLong:
        _probe(tools, folder)
        text = f"the C compiler ran longer than {settings.compiler_timeout:g} s and was ended"
        remedy = "raise weft.config.compiler_timeout, or compile a smaller function"
        raise CompilerUnavailable("codegen.build", text, remedy=remedy) from None
    for text in (done.text for done in finished if not done.worked):
        if _FULL.search(text):
            raise OSError(f"the C compiler says: {_first_line(text)}")
        if _ENDED.search(text):
            text = f"the C compiler did not end as it should: {_first_line(text)}"
            raise CompilerUnavailable("codegen.build", text, remedy="see what its output says")
        _probe(tools, folder)
    return finished


def _run(commands: Sequence[tuple[Sequence[str], Path]], seconds: float | None) -> list[Finished]:
    """Run commands at once, and end all of them before returning.

    Raises:
        _TooLong: after so many seconds.
        CompilerUnavailable: when one does not start.
    """
    end = None if seconds is None else time.monotonic() + seconds
    environment = {**os.environ, "LC_ALL": "C"}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, _ in commands:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env=environment, process_group=0,
            )  # fmt: skip
            running.append(process)
        finished = []
        for process, (_, made) in zip(running, commands, strict=True):
            left = None if end is None else max(end - time.monotonic(), 0)
            text = process.communicate(timeout=left)[0].decode(errors="replace")
            finished.append(Finished(process.returncode == 0 and made.exists(), text))
        return finished
    except subprocess.TimeoutExpired:
        raise _TooLong from None
    except OSError as error:
        text = f"cannot start {shlex.join(commands[0][0][:1])}: {error.strerror or error}"
        raise CompilerUnavailable("codegen.build", text, remedy="set CC to a compiler") from error
    finally:
        for process in running:
            if process.returncode is None:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _probe(tools: Toolchain, folder: Path) -> None:
    """Compile and link an empty source.

    Raises:
        CompilerUnavailable: when that fails; the compiler counts as broken from then on.
    """
    source, made = folder / "probe.c", folder / "probe.so"
    source.write_text("int weft_probe(void) { return 0; }\n")
    command = [*tools.command, *tools.kernel_flags, str(source), *tools.link_flags]
    limit = min(_PROBE_SECONDS, settings.compiler_timeout or _PROBE_SECONDS)
    try:
        (done,) = _run([([*command, "-o", str(made)], made)], limit)
    except _TooLong:
        reason = f"does not end within {limit:g} s"
    else:
        if done.worked:
            return
        said = _first_line(done.text)
        reason = f"says: {said}" if said else "makes no file"
    text = f"{shlex.join(tools.command)} cannot compile an empty program: it {reason}"
    raise mark_broken(tools, text)


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    chosen = next((line for line in lines if _FULL.search(line) or _ENDED.search(line)), None)
    return (chosen or (lines or [""])[0])[:300]
