"""Folders that only this user can write to, and temporary ones where that is not possible.

A temporary folder stands in for a cache folder that cannot be used: of another user, a file,
read-only, full. It goes when the process ends; those of killed processes are swept, as are builds
that were killed. Locks tell which those are: a process holds one as long as it works in a folder.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from weft_core.errors import CompilerUnavailable
from weft_core.events import notify

_PATIENCE = 1.0  # seconds to wait for who sweeps
_OLD = 24 * 3600.0  # seconds after which leftovers go, whoever may hold a lock
_FRESH = 60.0  # seconds in which a process has locked the temporary folder that it made

_lock = threading.RLock()
_replacements: dict[Path, Path] = {}
_held: list[int] = []  # locks of the temporary folders
_swept: set[Path] = set()
_seen: set[Path] = set()


def requested_root() -> Path:
    """Return where the cache folder is to be."""
    named = os.environ.get("WEFT_CACHE_DIR")
    if named:
        return Path(os.path.abspath(named))  # noqa: PTH100 - resolve() would follow links
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(shared).is_absolute():
        home = os.path.expanduser("~")  # noqa: PTH111 - as it is, without a home
        return Path(home, ".cache", "weft")
    return Path(shared, "weft")


def all_roots() -> set[Path]:
    """Return every cache folder that this process has used, temporary ones included."""
    return _seen


def replacement(root: Path) -> Path | None:
    """Return the temporary folder that stands in for a cache folder, if one does."""
    _seen.add(root)
    return _replacements.get(root)


def replace(root: Path, used: Path | None, error: OSError) -> Path:
    """Make a temporary folder that stands in for a cache folder, and tell why.

    Args:
        used: what stood in for it, if anything did, when `error` happened.

    Raises:
        CompilerUnavailable: when that was a temporary folder, or none can be made.
    """
    remedy = "set WEFT_CACHE_DIR to a folder of yours that can be written"
    with _lock:
        now = _replacements.get(root)
        if now is not None and now != used:
            return now
        if now is not None:
            text = f"nothing can be written: {error}"
            raise CompilerUnavailable("core.cachedir", text, remedy=remedy)
        reason = error.strerror or error
        try:
            made = _make_temporary()
        except OSError as none:
            text = f"{root} cannot be used ({reason}), and no temporary folder made: {none}"
            raise CompilerUnavailable("core.cachedir", text, remedy=remedy) from error
        _seen.add(made)
        _replacements[root] = made
    notify(
        f"[cache] {root} cannot be used ({reason}): what is compiled is kept for this process "
        f"alone\n  What to do: {remedy}"
    )
    return made


def secure(folder: Path, *, link: bool = False) -> None:
    """Create a folder that only this user can write to, or make an existing one private.

    Args:
        link: it may be a symbolic link that this user, or the system, made.

    Raises:
        OSError: when it cannot be made so.
    """
    if not folder.is_absolute():
        raise FileNotFoundError("no home folder")
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
    here = folder.lstat()
    if stat.S_ISLNK(here.st_mode):
        if not link or here.st_uid not in (0, os.geteuid()):
            raise PermissionError("it is a symbolic link")
        here = folder.stat()
    if not stat.S_ISDIR(here.st_mode):
        raise NotADirectoryError("it is no folder")
    if here.st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if here.st_mode & 0o022:
        folder.chmod(stat.S_IMODE(here.st_mode) & ~0o022)
        if folder.stat().st_mode & 0o022:
            raise PermissionError("others can write to it")


@contextlib.contextmanager
def working_folder(place: Path) -> Iterator[Path]:
    """Keep what is made in a folder from being swept; the first time, sweep what was left there."""
    lock = _open_locked(place, sweeps=place not in _swept)
    _swept.add(place)
    try:
        yield place
    finally:
        os.close(lock)


def _open_locked(place: Path, *, sweeps: bool) -> int:
    """Return a descriptor of the folder that holds a shared lock, where locks are to be had."""
    lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        if sweeps:
            _sweep(place, alone=_try_lock(lock, fcntl.LOCK_EX))
        end = time.monotonic() + _PATIENCE
        while not _try_lock(lock, fcntl.LOCK_SH) and time.monotonic() < end:
            time.sleep(0.01)
    return lock


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(place: Path, *, alone: bool) -> None:
    """Delete what killed processes left: all there is if nobody works here, else what is old."""
    before = time.time() - _OLD
    for entry in list(os.scandir(place)):
        with contextlib.suppress(OSError):
            if alone or entry.stat(follow_symlinks=False).st_mtime < before:
                _delete(entry)


def _delete(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        Path(entry).unlink()


# ---- temporary folders


def _make_temporary() -> Path:
    """Make a temporary folder that goes with this process."""
    prefix = f"weft-{os.geteuid()}-"
    made = Path(tempfile.mkdtemp(prefix=prefix))
    _held.append(_open_locked(made, sweeps=False))
    atexit.register(_end, made, os.getpid())
    for entry in list(os.scandir(made.parent)):
        if entry.name.startswith(prefix) and entry.path != str(made):
            with contextlib.suppress(OSError):
                _delete_abandoned(entry)
    return made


def _delete_abandoned(entry: os.DirEntry[str]) -> None:
    """Delete a temporary folder of this user's whose process is gone."""
    found = entry.stat(follow_symlinks=False)
    if found.st_uid != os.geteuid() or found.st_mtime > time.time() - _FRESH:
        return
    lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _try_lock(lock, fcntl.LOCK_EX):
            _delete(entry)
    finally:
        os.close(lock)


def _end(made: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(made, ignore_errors=True)


def _after_fork() -> None:
    """A child makes temporary folders of its own: those of its parent go with that."""
    global _lock
    _lock = threading.RLock()
    _replacements.clear()
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
