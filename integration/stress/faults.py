"""Cache folders that cannot be used, or hold what nobody may trust: results stay eager's.

Each fault is a function of the folder, run in a fork of its own before something is compiled. A
row says how many messages the user gets: one where the folder cannot be used, none where entries
are made again.
"""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import weft

from .kills import in_child, warm_up
from .programs import Case, difference, many

NOBODY = 65534


class _Evil:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.trace,)


def _entries(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "key"]


def read_only(folder: Path) -> None:
    """The folder can be read only, by a user who is not root."""
    _become_nobody(folder, 0o555)


def not_readable(folder: Path) -> None:
    """The folder cannot be entered."""
    _become_nobody(folder, 0o000)


def another_owner(folder: Path) -> None:
    """The folder belongs to root and anybody may write to it; this process is somebody else."""
    folder.chmod(0o777)
    _drop_root()


def _become_nobody(folder: Path, mode: int) -> None:
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
    folder.chmod(mode)
    _drop_root()


def _drop_root() -> None:
    """Give up the rights of root, to which no mode of a file applies."""
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def no_home(folder: Path) -> None:
    """There is no home folder and no setting."""
    del os.environ["WEFT_CACHE_DIR"]
    os.environ.pop("XDG_CACHE_HOME", None)
    os.environ["HOME"] = "/nonexistent"
    _drop_root()


def file_in_its_place(folder: Path) -> None:
    """A file has the folder's name."""
    shutil.rmtree(folder)
    folder.write_text("")


def file_size_limit(folder: Path) -> None:
    """No file may grow past 4 KiB: nothing that is compiled fits."""
    shutil.rmtree(folder)
    folder.mkdir(0o700)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def full_disk(folder: Path) -> None:
    """The folder is a file system of 64 KiB (mounted where this process may)."""
    shutil.rmtree(folder)
    folder.mkdir(0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], check=True)


def truncated_entries(folder: Path) -> None:
    """Every entry is cut in half."""
    for path in _entries(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped_bits(folder: Path) -> None:
    """One bit of every entry is another one."""
    for path in _entries(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))


def swapped_entries(folder: Path) -> None:
    """Entries of one sub-folder take each other's names."""
    for sub in folder.iterdir():
        paths = _entries(sub) if sub.is_dir() else []
        data = [path.read_bytes() for path in paths]
        for path, other in zip(paths, data[1:] + data[:1], strict=True):
            path.write_bytes(other)


def foreign_pickles(folder: Path) -> None:
    """Every entry is a pickle that leaves a trace; the folders are open to everybody."""
    evil = pickle.dumps(_Evil(str(folder / "loaded")))
    for path in _entries(folder):
        path.write_bytes(evil)
    for path in folder.iterdir():
        path.chmod(0o777)


FAULTS: dict[Callable[[Path], None], int] = {
    read_only: 1,
    not_readable: 1,
    another_owner: 1,
    no_home: 1,
    file_in_its_place: 1,
    file_size_limit: 2,  # the temporary folder cannot take files either
    full_disk: 1,
    truncated_entries: 1,
    flipped_bits: 1,
    swapped_entries: 1,
    foreign_pickles: 1,
}


def run(faults: dict[Callable[[Path], None], int] = FAULTS) -> tuple[list[str], int]:
    """Compile with each fault; return what went wrong and how many faults were tried."""
    warm_up()  # another user may not be able to read the modules of this environment
    failures = [f"{f.__name__}: {text}" for f, most in faults.items() for text in _tried(f, most)]
    return failures, len(faults)


def _tried(fault: Callable[[Path], None], most: int) -> list[str]:
    """Fill a folder, break it, compile with it: results are eager's, messages are few."""
    with tempfile.TemporaryDirectory(prefix="weft-stress-") as parent:
        Path(parent).chmod(0o755)
        folder, log = Path(parent, "cache"), Path(parent, "log")
        os.environ["WEFT_CACHE_DIR"] = str(folder)
        os.waitpid(in_child(_compiled), 0)
        log.touch()
        log.chmod(0o666)

        def work() -> list[str]:
            fault(folder)
            return _compiled()

        _, status = os.waitpid(in_child(work, str(log)), 0)
        said = log.read_text()
        if os.path.ismount(folder):
            subprocess.run(["umount", str(folder)], check=True)
        if folder.is_dir():
            folder.chmod(0o700)
        messages = sum(line.startswith(("[", "damaged", "weft")) for line in said.splitlines())
        if status or messages > most or (folder / "loaded").exists():
            return [f"exit status {status}, {messages} messages: {said[:1500]}"]
        return []


def _compiled() -> list[str]:
    cases: list[Case] = list(many(3).values())
    return [text for case in cases if (text := difference(weft.compile(case.function), case, 0))]
