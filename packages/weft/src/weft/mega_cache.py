"""Carry the disk cache from one machine to another as one blob of bytes.

`save_cache_artifacts()` packs the cache folder, `load_cache_artifacts(blob)` unpacks it into the
cache folder of this process. Entries keep their own checksums, so a damaged or foreign entry is
recompiled, as always.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import PurePosixPath

from weft_core import cachedir
from weft_core.errors import WeftError

_MAX_ENTRIES = 100_000


@dataclass(frozen=True)
class CacheInfo:
    """What a blob holds: the names of its entries."""

    entries: tuple[str, ...]


def save_cache_artifacts() -> tuple[bytes, CacheInfo] | None:
    """Return the whole disk cache as bytes with a list of its entries; None when it is empty."""
    root = cachedir.cache_dir("")
    files = sorted(
        path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")
    )
    if not files:
        return None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in files:
            archive.add(path, arcname=path.relative_to(root).as_posix())
    return buffer.getvalue(), CacheInfo(tuple(p.relative_to(root).as_posix() for p in files))


def load_cache_artifacts(artifacts: bytes) -> CacheInfo:
    """Write a blob of `save_cache_artifacts` into the disk cache; existing entries are kept.

    Load only blobs that you trust: the cache holds machine code.

    Raises:
        WeftError: when the bytes are not such a blob.
    """
    root = cachedir.cache_dir("")
    names = []
    try:
        with tarfile.open(fileobj=io.BytesIO(artifacts), mode="r:gz") as archive:
            for member in archive.getmembers()[:_MAX_ENTRIES]:
                where = PurePosixPath(member.name)
                content = archive.extractfile(member) if member.isfile() else None
                if content is None or where.is_absolute() or ".." in where.parts:
                    continue
                names.append(member.name)
                target = root / where
                if not target.exists():
                    cachedir.cache_dir(str(where.parent))
                    cachedir.atomic_write(target, content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise WeftError(f"not a blob of save_cache_artifacts: {error}") from error
    return CacheInfo(tuple(names))
