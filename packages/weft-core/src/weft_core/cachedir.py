"""The cache folder on disk: private, safe for many writers, and never trusted blindly.

A file is written beside its final name and renamed into place, so a reader sees all of it or
none. Checked files carry a digest; a damaged one reads as absent, so its owner rebuilds it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from pathlib import Path

_log = logging.getLogger("weft.core.cachedir")

_SEAL = b"weft-seal1"


def cache_dir(sub: str = "") -> Path:
    """Return weft's cache folder (or a folder inside it), made with mode 0700.

    `WEFT_CACHE_DIR` overrides the place; otherwise it is `$XDG_CACHE_HOME/weft`.
    A folder that another user owns is refused, since code is loaded from it.

    Raises:
        PermissionError: when the folder belongs to another user.
    """
    root = os.environ.get("WEFT_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    path = Path(root) if root else base
    for folder in (path, path / sub):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{folder} belongs to another user; set WEFT_CACHE_DIR to a folder of yours"
            )
    return path / sub


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that no reader ever sees a part of it; the last writer wins."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_checked(path: Path, payload: bytes) -> None:
    """Write a payload with its digest behind it, for `read_checked`.

    Loaders and linkers ignore bytes behind an ELF file, so a shared object may be a payload.
    """
    atomic_write(path, payload + _SEAL + _sha256(payload))


def read_checked(path: Path) -> bytes | None:
    """Return the payload, or None when the file is absent or damaged (which is logged)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot read %s: %s", path, error)
        return None
    payload, _, digest = data.rpartition(_SEAL)
    if digest != _sha256(payload):
        _log.warning("damaged cache file %s: it will be made again", path)
        return None
    return payload


@functools.cache
def package_digest(file: str) -> str:
    """Return a digest of the sources in the folder of a file, and of the folders in it."""
    paths = sorted(Path(file).parent.rglob("*.[pch]*"))
    return _sha256(b"".join(p.read_bytes() for p in paths if p.suffix in (".py", ".c", ".h"))).hex()


def _sha256(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()
