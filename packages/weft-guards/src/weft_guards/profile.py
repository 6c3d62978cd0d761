"""What varied in earlier processes, so that this one compiles it dynamic at once.

A profile is one file of the cache folder for a code object: the sizes and numbers that became
symbolic in it. It decides nothing but what is symbolic from the first compile on, which guards then
confirm, so that a profile of other code, or a damaged one that reads as empty, does no harm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

from weft_core import cachedir
from weft_core.errors import CompilerUnavailable
from weft_core.events import logger

_log = logger("guards", "dynamic")

# (source, number of dimensions, dimension) for a size, with "stride" behind it for a stride,
# (source,) for an int or a float.
Fact = tuple[str | int, ...]

_written: set[Path] = set()  # a process starts from what others have left, also after a reset


class Profile:
    """The profile of one code object, known again by its file, name, first line and bytecode."""

    def __init__(self, code: CodeType) -> None:
        bytecode = hashlib.sha256(code.co_code).hexdigest()[:16]
        where = (code.co_filename, code.co_qualname, code.co_firstlineno, bytecode)
        self.name = code.co_qualname
        self.file = hashlib.sha256(repr(where).encode()).hexdigest()[:32]

    def load(self) -> set[Fact]:
        """Return what varied in earlier processes; nothing where that cannot be read."""
        try:
            path = self._path()
            found = set() if path in _written else _read(path)
        except (OSError, CompilerUnavailable):
            return set()
        if found:
            _log.info(
                "%s: in an earlier process %d sizes and numbers varied", self.name, len(found)
            )
        return found

    def add(self, facts: Iterable[Fact]) -> None:
        """Write down what varied, beside what is there; where that fails, nothing is kept."""
        try:
            path = self._path()
            merged = sorted(_read(path) | set(facts), key=repr)
            cachedir.keep(path, json.dumps(merged).encode())
            _written.add(path)
        except (OSError, CompilerUnavailable) as error:
            _log.info("%s: what varies was not kept: %s", self.name, error)

    def _path(self) -> Path:
        return cachedir.cache_dir("dynamism") / f"{self.file}.json"


def _read(path: Path) -> set[Fact]:
    payload = cachedir.read_checked(path)
    try:
        return set(map(tuple, json.loads(payload or b"[]")))
    except (ValueError, TypeError):
        return set()
