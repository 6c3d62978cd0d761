"""Carry the disk cache from one machine to another as one blob of bytes.

`save_cache_artifacts()` packs the entries of the cache folder, `load_cache_artifacts(blob)` unpacks
them into the cache folder of this process. A blob that is loaded is trusted: its entries are
machine code and pickles. Its digest finds damage, not forgery; entries get this user's own seal.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from dataclasses import dataclass

from weft_core import cachedir
from weft_core.arguments import checked
from weft_core.errors import WeftError

_HEAD = b"weft-cache1"
_DIGEST_SIZE = hashlib.sha256().digest_size
_ENTRY = re.compile(r"[a-z]+/\w[\w.-]*", re.ASCII)
_MAX_ENTRIES = 100_000


@dataclass(frozen=True)
class CacheInfo:
    """What a blob holds: the names of its entries."""

    entries: tuple[str, ...]


def save_cache_artifacts() -> tuple[bytes, CacheInfo] | None:
    """Return the whole disk cache as bytes with a list of its entries; None when it is empty."""
    root = cachedir.cache_dir()
    names = [path.relative_to(root).as_posix() for path in cachedir.entries()]
    found = {name: cachedir.read_checked(root / name) for name in names if _is_entry(name)}
    payloads = {name: payload for name, payload in found.items() if payload is not None}
    if not payloads:
        return None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, payload in payloads.items():
            member = tarfile.TarInfo(name)
            member.size = len(payload)
            archive.addfile(member, io.BytesIO(payload))
    packed = buffer.getvalue()
    return _HEAD + hashlib.sha256(packed).digest() + packed, CacheInfo(tuple(payloads))


@checked
def load_cache_artifacts(artifacts: bytes | bytearray | memoryview) -> CacheInfo:
    """Write a blob of `save_cache_artifacts` into the disk cache; existing entries are kept.

    Load only blobs that you trust: the cache holds machine code.

    Raises:
        InvalidArgument: for anything but bytes.
        WeftError: when the bytes are not such a blob, or are damaged; nothing is written then.
    """
    payloads = _unpack(artifacts)
    for name, payload in payloads.items():
        folder, _, file = name.partition("/")
        path = cachedir.cache_dir(folder) / file
        if cachedir.read_checked(path) is None:
            cachedir.try_write(path, payload)
    return CacheInfo(tuple(payloads))


def _is_entry(name: str) -> bool:
    """Whether this is a file in a folder of entries, and nothing else."""
    kind = name.partition("/")[0]
    return _ENTRY.fullmatch(name) is not None and kind not in cachedir.UNSEALED


def _unpack(artifacts: bytes | bytearray | memoryview) -> dict[str, bytes]:
    """Return the entries of a blob; nothing else may be in it."""
    start, blob = len(_HEAD) + _DIGEST_SIZE, bytes(artifacts)
    packed = blob[start:]
    if blob[:start] != _HEAD + hashlib.sha256(packed).digest():
        raise WeftError("not a blob of save_cache_artifacts, or a damaged one")
    payloads: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is None or not _is_entry(member.name) or len(payloads) >= _MAX_ENTRIES:
                    raise WeftError(f"not a blob of save_cache_artifacts: entry {member.name!r}")
                payloads[member.name] = content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise WeftError(f"not a blob of save_cache_artifacts: {error}") from error
    return payloads
