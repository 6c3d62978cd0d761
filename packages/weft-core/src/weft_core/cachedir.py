"""The cache folder on disk: private, safe for many writers, and never trusted.

    <root>/key             32 random bytes of this user's, by which entries are sealed
    <root>/<kind>/<name>   an entry: payload, seal
    <root>/tmp/            unfinished files and builds, and what says who makes which entry

A seal covers folder, name and payload, so that no entry is taken for another, and nothing that
another user left is loaded. Files are renamed into place: a reader sees a whole file or none.
A folder that cannot be used is replaced by a temporary one for this process (see `_privatedir`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from weft_core import _privatedir
from weft_core.events import notify

_log = logging.getLogger("weft.core.cachedir")

_SEAL = b"weft-seal2"
_MAC_SIZE = hashlib.sha256().digest_size
_KEY_SIZE = 32
UNSEALED = ("tmp", "repro", "failed")
"""The folders whose files no process reads."""

_damaged: set[Path] = set()  # roots of which a damaged entry was told


def cache_dir(sub: str = "") -> Path:
    """Return weft's cache folder (or a folder inside it), which only this user can write to.

    `WEFT_CACHE_DIR` overrides the place; otherwise it is `$XDG_CACHE_HOME/weft`. Where that cannot
    be used, a temporary folder takes its place for this process, and the user is told once.

    Raises:
        CompilerUnavailable: when no temporary folder can be made either.
    """
    wanted = _privatedir.requested_root()
    root = _privatedir.replacement(wanted)
    while True:
        try:
            if root is None:
                _privatedir.secure(wanted, link=True)
            return _inside(root or wanted, sub)
        except OSError as error:
            root = _privatedir.replace(wanted, root, error)


def abandon(root: Path, error: OSError) -> None:
    """Use a temporary folder from here on: `root` cannot take what must be written.

    Raises:
        CompilerUnavailable: when `root` was one already, or none can be made.
    """
    wanted = _privatedir.requested_root()
    _privatedir.replace(wanted, None if root == wanted else root, error)


def _inside(root: Path, sub: str) -> Path:
    path = root
    for name in filter(None, sub.split("/")):
        path = path / name
        _privatedir.secure(path)
    return path


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Make a folder in the cache folder for a while; if this process is killed, others sweep it."""
    with (
        _privatedir.working_folder(cache_dir("tmp")) as place,
        tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as folder,
    ):
        yield Path(folder)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that no reader ever sees a part of it; the last writer wins.

    Raises:
        OSError: when it cannot be written.
    """
    with _privatedir.working_folder(_inside(_root_of(path), "tmp")) as place:
        handle, name = tempfile.mkstemp(dir=place, prefix=f"{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def made_once(path: Path, patience: float = 60.0) -> Iterator[None]:
    """Wait while another process makes an entry, and then let others wait for this one.

    Whoever creates a file beside it first makes the entry. That file goes when the block ends, or
    is ignored: at once if its process is gone from this host, after `patience` seconds if there is
    none to ask. So the block may run in several processes, and is to look for the entry first.
    """
    claim = None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # what is made cannot be kept either
            place = stack.enter_context(_privatedir.working_folder(_inside(_root_of(path), "tmp")))
            claim = _claim(path, place / f"making-{path.name}", time.monotonic() + patience)
        try:
            yield
        finally:
            if claim is not None:
                with contextlib.suppress(OSError):
                    claim.unlink()


def _claim(path: Path, claim: Path, end: float) -> Path | None:
    """Return the file that tells others to wait, or None where another process made the entry."""
    host = os.uname().nodename
    while not path.exists():
        late = time.monotonic() > end
        with contextlib.suppress(FileExistsError), open(claim, "x", opener=_create) as file:
            file.write(f"{host} {os.getpid()}")
            return claim
        if late or _is_left(claim, host):
            claim.unlink(missing_ok=True)
        else:
            time.sleep(0.02)
    return None


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _is_left(claim: Path, host: str) -> bool:
    """Whether the process that created a claim is gone from this host."""
    with contextlib.suppress(OSError, ValueError):
        made_on, process = claim.read_text().split()
        try:
            if made_on == host:
                os.kill(int(process), 0)
        except ProcessLookupError:
            return True
    return False


def write_checked(path: Path, payload: bytes) -> None:
    """Write a payload with its seal behind it, for `read_checked`.

    Loaders and linkers ignore bytes behind an ELF file, so a shared object may be a payload.

    Raises:
        OSError: when it cannot be written.
    """
    atomic_write(path, payload + _SEAL + _mac(path, payload))


def try_write(path: Path, payload: bytes) -> None:
    """`write_checked` what can be made again; where that fails, the user is told once."""
    try:
        write_checked(path, payload)
    except OSError as error:
        notify(
            f"[cache] {_root_of(path)} cannot be written ({error.strerror or error}): what is "
            "compiled is not kept\n  What to do: make room, or set WEFT_CACHE_DIR to a folder of "
            "yours that can be written"
        )


def read_checked(path: Path) -> bytes | None:
    """Return the payload, or None when the file is absent, damaged or not this user's (logged)."""
    try:
        data = _read_own(path)
        payload, seal, mac = data[: -_MAC_SIZE - len(_SEAL)], data[:-_MAC_SIZE], data[-_MAC_SIZE:]
        whole = seal.endswith(_SEAL) and hmac.compare_digest(mac, _mac(path, payload))
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot read %s: %s", path, error)
        return None
    if whole:
        return payload
    root = _root_of(path)
    level = logging.INFO if root in _damaged else logging.WARNING
    _damaged.add(root)
    _log.log(level, "damaged cache file %s: it will be made again", path)
    return None


def entries() -> list[Path]:
    """Return the files of the cache folder, apart from the key and what is being written."""
    root = cache_dir()
    found = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    kept = (path for path in found if path.relative_to(root).parts[0] not in ("tmp", "key"))
    return sorted(path for path in kept if path.is_file() and not path.is_symlink())


@functools.cache
def package_digest(file: str) -> str:
    """Return a digest of the sources in the folder of a file, and of the folders in it."""
    paths = sorted(Path(file).parent.rglob("*.[pch]*"))
    sources = b"".join(p.read_bytes() for p in paths if p.suffix in (".py", ".c", ".h"))
    return hashlib.sha256(sources).hexdigest()


# ---- seals


def _root_of(path: Path) -> Path:
    """Return the cache folder that a file is in: the one in use, or the one of before."""
    known = _privatedir.all_roots()
    return next((folder for folder in path.parents if folder in known), path.parent)


def _mac(path: Path, payload: bytes) -> bytes:
    root = _root_of(path)
    name = path.relative_to(root).as_posix().encode()
    return hmac.digest(_key(root), len(name).to_bytes(4, "big") + name + payload, "sha256")


def _key(root: Path) -> bytes:
    """Return this user's key, made when there is none that only this user can read."""
    path = root / "key"
    for _ in range(100):
        try:
            found = _read_own(path, 0o077)
            if len(found) == _KEY_SIZE:
                return found
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s is not used: %s", path, error)
        _new_key(path)
    raise OSError(f"{path} changes all the time")


def _new_key(path: Path) -> None:
    """Put a new key where there is none, or one that cannot be used; the first writer wins."""
    bad = path.lstat().st_ino if os.path.lexists(path) else None
    with _privatedir.working_folder(_inside(path.parent, "tmp")) as place:
        handle, name = tempfile.mkstemp(dir=place, prefix="key.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(os.urandom(_KEY_SIZE))
            if bad is not None:
                Path(name).replace(path)
                return
            with contextlib.suppress(FileExistsError):
                try:
                    os.link(name, path)
                except (PermissionError, NotImplementedError):  # a file system without links
                    Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)


def _read_own(path: Path, others: int = 0o022) -> bytes:
    """Read a plain file of this user's for which others have none of these rights.

    Raises:
        OSError: when it is absent, or anything else.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no plain file")
        if found.st_uid != os.geteuid() or found.st_mode & others:
            raise PermissionError("others could have written it, or can read what they must not")
        return file.read()
