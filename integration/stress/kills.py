"""Processes that are killed while they compile into one cache folder."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import weft

from .programs import CASES, Case, difference, many

LONGEST = 1.5  # seconds after which a compile is killed at the latest
PROGRAMS = 12


def run(times: int = 1000, seed: int = 0) -> tuple[list[str], int]:
    """Kill `times` processes with SIGKILL; return what went wrong and how many died compiling.

    After every 25 kills a process compiles every program with the same folder, and must get eager's
    results and say nothing of the cache. At the end nothing of the killed ones may be left.
    """
    rng = random.Random(seed)
    failures: list[str] = []
    killed = 0
    warm_up()
    with tempfile.TemporaryDirectory(prefix="weft-stress-") as folder:
        os.environ["WEFT_CACHE_DIR"] = folder
        for number in range(times):
            child = in_child(lambda: _compile_all(rng.randrange(1 << 30)))
            time.sleep(rng.uniform(0, LONGEST))
            os.kill(child, signal.SIGKILL)
            killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
            if number % 25 == 24 or number == times - 1:
                failures += _verified(folder)
            if rng.random() < 0.1:
                _empty(Path(folder), rng)
    return failures, killed


def warm_up() -> None:
    """Compile something else first: forks then begin with every module imported."""
    with tempfile.TemporaryDirectory(prefix="weft-stress-") as folder:
        os.environ["WEFT_CACHE_DIR"] = folder
        case = CASES["normalised"]
        assert not difference(weft.compile(case.function), case, 0)
    weft.reset()


def in_child(work: Callable[[], list[str]], log: str | None = None) -> int:
    """Run `work` in a fork of this process; its status is 0 when it returns an empty list.

    Args:
        log: a file that takes what it writes to stderr, with what went wrong.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if log is not None:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        failures = work()
        for text in failures:
            os.write(2, f"{text}\n".encode())
        status = bool(failures)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _compile_all(seed: int) -> list[str]:
    """Compile programs in the order that a seed gives."""
    cases = list(many(PROGRAMS).values())
    random.Random(seed).shuffle(cases)
    return [text for case in cases if (text := _checked(case))]


def _checked(case: Case) -> str:
    return difference(weft.compile(case.function), case, 0)


def _verified(folder: str) -> list[str]:
    """Compile everything in a process that is left alone; what it says is a failure."""
    log = Path(tempfile.gettempdir(), f"weft-stress-{os.getpid()}.log")
    _, status = os.waitpid(in_child(lambda: _compile_all(0), log), 0)
    said = log.read_text().strip()
    log.unlink()
    failures = [f"exit status {status}: {said[:500]}"] if status or said else []
    left = [path.name for path in Path(folder, "tmp").iterdir()]
    return failures + [f"left behind: {name}" for name in left]


def _empty(folder: Path, rng: random.Random) -> None:
    """Delete some entries, so that processes keep having something to compile."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "key" and rng.random() < 0.7:
            path.unlink()
