"""Sizes and numbers that varied in earlier processes; this one makes them symbolic at once.

A profile is one file of the cache folder for a code object of one program (or job): the sizes and
numbers that became symbolic in it. Programs share the code of libraries (`nn.Sequential.forward`),
and what varies in one program need not in the next. A profile decides nothing but what is symbolic
from the first compile on, which guards then confirm, so that one of other code, or a damaged one
that reads as empty, does no harm.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from weft_core import cachedir
from weft_core.errors import CompilerUnavailable
from weft_core.events import logger, notify

from weft_guards.config import settings
from weft_guards.sources import is_literal

_log = logger("guards", "dynamic")

# (source, number of dimensions, dimension) for a size, with "stride" behind it for a stride,
# (source,) for an int or a float.
Fact = tuple[str | int, ...]

_written: set[Path] = set()  # a process starts from what others have left, also after a reset


class Profile:
    """The profile of one code object, known again by a digest of the whole object."""

    def __init__(self, code: CodeType) -> None:
        self.name = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        self.file = _digest(code)[:32]

    def load(self) -> set[Fact]:
        """Return what varied in earlier processes; nothing where that cannot be read."""
        try:
            path = self._path()
            found = set() if path in _written else _read(path)
        except (OSError, CompilerUnavailable):
            return set()
        if found:
            what = ", ".join(sorted(map(_text, found)))
            text = f"[profile] {self.name}: varied in an earlier process, so symbolic: {what}"
            remedy = f"remove {path}, or set WEFT_PGO=0; `python -m weft cache clear` removes all"
            notify(f"{text}\n  To compile it static first: {remedy}", quiet=True)
            _log.info("%s\n  To compile it static first: %s", text, remedy)
        return found

    def add(self, facts: Iterable[Fact]) -> None:
        """Write down what varied, beside what is there; where that fails, nothing is kept."""
        try:
            path = self._path()
            merged = sorted(_read(path) | set(facts), key=repr)
            cachedir.try_write(path, json.dumps(merged).encode())
            _written.add(path)
        except (OSError, CompilerUnavailable) as error:
            _log.info("%s: what varies was not kept: %s", self.name, error)

    def _path(self) -> Path:
        owner = hashlib.sha256((settings.job_id or _program()).encode()).hexdigest()[:8]
        return cachedir.cache_dir("dynamism") / f"{self.file}{owner}.json"


def _program() -> str:
    """Return the file that runs, or the current folder where there is none (a notebook)."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(file).resolve() if file else Path.cwd())


def _digest(code: CodeType) -> str:
    """Return a digest of file, name, line, bytecode, names, constants and nested code.

    Constants of generated code may be any objects: of those it covers the type.
    """
    parts: list[Any] = [code.co_filename, code.co_qualname, code.co_firstlineno, code.co_code]
    parts += [code.co_names, code.co_varnames, code.co_freevars]
    for one in code.co_consts:
        if isinstance(one, CodeType):
            parts.append(_digest(one))
        elif isinstance(one, frozenset):
            parts.append(sorted(map(repr, one)))
        else:
            parts.append(one if is_literal(one) else type(one).__qualname__)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _text(fact: Fact) -> str:
    source, *dim = fact
    return f"{'stride' if dim[2:] else 'size'} {dim[1]} of {source}" if dim else str(source)


def _read(path: Path) -> set[Fact]:
    payload = cachedir.read_checked(path)
    try:
        return set(map(tuple, json.loads(payload or b"[]")))
    except (ValueError, TypeError):
        return set()
