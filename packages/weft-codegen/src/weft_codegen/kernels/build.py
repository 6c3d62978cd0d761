"""Turns C source into a loaded-ready shared object, through two caches on disk.

    kernels  --(by hash of one kernel)-->  objects/<digest>.o      several kernels an object
    program  --(by hash of everything)-->  programs/<digest>.so

What no object holds yet is split into a few units that compile in parallel with the host unit.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft_core import cachedir
from weft_core.errors import BackendCompilerError
from weft_core.events import span

from weft_codegen.kernels.compiler import run_all
from weft_codegen.kernels.toolchain import Toolchain, find

INCLUDE = Path(__file__).parent / "include"
KERNEL_HEADER = "weft_kernel.h"
HOST_HEADER = "weft_host.h"
_UNIT_BYTES = 6000


@dataclass(frozen=True)
class Sources:
    """The C text of a program: the host unit, and each kernel's text by its symbol.

    A symbol must change whenever its text does, comments aside (see `kernel_symbol`).
    """

    host: str
    kernels: Mapping[str, str]

    def host_unit(self) -> str:
        """The host's translation unit."""
        return _unit(HOST_HEADER, [self.host])

    def kernel_unit(self) -> str:
        """One translation unit with every kernel."""
        return _unit(KERNEL_HEADER, list(self.kernels.values()))


def kernel_symbol(text: str) -> str:
    """The symbol under which the kernel `text` (with its name left open) is compiled."""
    return f"weft_k{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def build(sources: Sources) -> Path:
    """The shared object of a program, from the cache or newly compiled.

    Raises:
        CompilerUnavailable: no C compiler, none that works, or no room for its files.
        BackendCompilerError: the compiler rejected the source; the message names the kept file.
    """
    tools = find()
    key = _digest(tools.fingerprint, _headers(), sources.host, *sorted(sources.kernels))
    while True:
        target = program_path(key)
        if cachedir.read_checked(target) is not None:
            return target
        try:
            with (
                span("codegen.cc"),
                cachedir.made_once(target),
                cachedir.scratch("build-") as folder,
            ):
                if cachedir.read_checked(target) is not None:  # another process was quicker
                    return target
                objects = _kernel_objects(sources.kernels, sources.host, tools, folder)
                cachedir.write_checked(target, _link(objects, folder / "program.so", tools))
            return target
        except OSError as error:  # no room: there may be some elsewhere
            cachedir.abandon(target.parent.parent, error)


def program_path(key: str) -> Path:
    """Where the shared object `key` is, or would be."""
    return cachedir.cache_dir("programs") / f"{key}.so"


def _kernel_objects(
    kernels: Mapping[str, str], host: str, tools: Toolchain, folder: Path
) -> list[Path]:
    """Object files that together define the host function and every kernel."""
    salt = _digest(tools.fingerprint, _headers())[:16]
    known = {symbol: _known_object(symbol, salt) for symbol in kernels}
    missing = {symbol: text for symbol, text in kernels.items() if known[symbol] is None}
    units = split(missing, os.cpu_count() or 1)
    jobs = [_Job(folder / "host.c", _unit(HOST_HEADER, [host]), tools.host_flags)]
    for number, unit in enumerate(units):
        text = _unit(KERNEL_HEADER, [missing[symbol] for symbol in unit])
        jobs.append(_Job(folder / f"kernels{number}.c", text, tools.kernel_flags))
    compile_all(jobs, tools)
    for unit, job in zip(units, jobs[1:], strict=True):
        payload = job.object.read_bytes()
        path = cachedir.cache_dir("objects") / f"{hashlib.sha256(payload).hexdigest()[:32]}.o"
        cachedir.write_checked(path, payload)
        for symbol in unit:
            cachedir.write_checked(_index_path(symbol, salt), path.name.encode())
            known[symbol] = path
    found = {path for path in known.values() if path is not None}
    return [jobs[0].object, *sorted(found)]


def _index_path(symbol: str, salt: str) -> Path:
    return cachedir.cache_dir("kernels") / f"{symbol}-{salt}"


def _known_object(symbol: str, salt: str) -> Path | None:
    name = cachedir.read_checked(_index_path(symbol, salt))
    if name is None:
        return None
    path = cachedir.cache_dir("objects") / name.decode()
    return None if cachedir.read_checked(path) is None else path


def split(kernels: Mapping[str, str], most: int) -> list[list[str]]:
    """Deal kernels into at most `most` units of similar size, none needlessly small."""
    total = sum(map(len, kernels.values()))
    count = max(1, min(most, total // _UNIT_BYTES)) if kernels else 0
    units: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for symbol in sorted(kernels, key=lambda name: -len(kernels[name])):
        smallest = sizes.index(min(sizes))
        units[smallest].append(symbol)
        sizes[smallest] += len(kernels[symbol])
    return units


@dataclass(frozen=True)
class _Job:
    """One translation unit to compile to `object`."""

    source: Path
    text: str
    flags: tuple[str, ...]

    @property
    def object(self) -> Path:
        return self.source.with_suffix(".o")


def _unit(header: str, texts: Sequence[str]) -> str:
    return "\n\n".join([f'#include "{header}"', *texts, ""])


def compile_all(jobs: Sequence[_Job], tools: Toolchain) -> None:
    """Compile every job, all at once.

    Raises:
        BackendCompilerError: for the first that fails.
    """
    commands = []
    for job in jobs:
        job.source.write_text(job.text)
        commands.append((_compile(job.source, job.flags, job.object, tools), job.object))
    finished = run_all(commands, tools)
    for job, (command, _), done in zip(jobs, commands, finished, strict=True):
        if not done.worked:
            raise _compile_error(job, command, done.text)


def build_script(kernels: Path, host: Path) -> str:
    """The commands that make a program of two written-out units, as a shell script."""
    tools = find()
    units = ((kernels, tools.kernel_flags), (host, tools.host_flags))
    objects = [Path(f"{source.stem}.o") for source, _ in units]
    pairs = zip(units, objects, strict=True)
    commands = [_compile(Path(source.name), flags, made, tools) for (source, flags), made in pairs]
    commands.append(_linking(objects, Path("program.so"), tools))
    return "\n".join(["#!/bin/sh", "set -e", *map(shlex.join, commands)]) + "\n"


def _compile(source: Path, flags: tuple[str, ...], made: Path, tools: Toolchain) -> list[str]:
    command = [*tools.command, *flags, f"-I{INCLUDE}", "-c", str(source)]
    return [*command, "-o", str(made)]


def _linking(objects: Sequence[Path], linked: Path, tools: Toolchain) -> list[str]:
    return [*tools.command, *map(str, objects), *tools.link_flags, "-o", str(linked)]


def _link(objects: Sequence[Path], linked: Path, tools: Toolchain) -> bytes:
    (done,) = run_all([(_linking(objects, linked, tools), linked)], tools)
    if not done.worked:
        raise BackendCompilerError("codegen.build", f"linking failed: {done.text[:2000]}")
    return linked.read_bytes()


def _compile_error(job: _Job, command: Sequence[str], output: str) -> BackendCompilerError:
    """An error that names a copy of the source which outlives the build folder."""
    kept = cachedir.cache_dir("failed") / f"{_digest(job.text)[:16]}-{job.source.name}"
    cachedir.atomic_write(kept, job.text.encode())
    again = " ".join(command).replace(str(job.source), str(kept))
    return BackendCompilerError(
        "codegen.build",
        f"the C compiler rejected {kept}:\n{output[:2000]}",
        remedy=f"please report it with that file; to see it again run: {again}",
    )


def _headers() -> str:
    return _digest(*(header.read_text() for header in sorted(INCLUDE.iterdir())))


def _digest(*parts: str) -> str:
    joined = hashlib.sha256()
    for part in parts:
        joined.update(part.encode())
        joined.update(b"\0")
    return joined.hexdigest()
