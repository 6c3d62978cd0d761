"""Which C compiler to run and with which flags; found without starting a process.

A loop marked `#pragma omp simd` is vectorised for this machine and yet every operation rounds as
eager's does: NaN, infinities and -0.0 keep their meaning, and a*b + c is not contracted.
Without -fno-trapping-math (gcc 12, AVX-512) conditional code is not vectorised at all.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from weft_core.errors import CompilerNotFound, CompilerUnavailable
from weft_core.events import notify

CANDIDATES = ("cc", "gcc", "clang")
_COMMON = (
    "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-fno-math-errno", "-w",
    "-fno-trapping-math", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing",
)  # fmt: skip
# -O3 without copying loops around: half the compile time, the same speed (measured, gcc 12).
# Threading jumps would take erf's chain of choices apart into two: an eighth of its time.
# Names of gcc's own, which clang refuses.
_QUICK = ("-fno-split-loops", "-fno-peel-loops", "-fno-thread-jumps")


@dataclass(frozen=True)
class Toolchain:
    """A C compiler for this machine.

    `kernel_flags` are for loops, `host_flags` for the code that calls them; `fingerprint` changes
    whenever the same source could compile to something else.
    """

    command: tuple[str, ...]
    kernel_flags: tuple[str, ...]
    host_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    fingerprint: str


def find() -> Toolchain:
    """The compiler to use: $CC, else the first of cc, gcc and clang on PATH.

    Raises:
        CompilerNotFound: when there is none.
        CompilerUnavailable: when it was found not to work.
    """
    tools = _find(os.environ.get("CC", ""), os.environ.get("PATH", ""))
    if tools.fingerprint in _broken:
        raise _unavailable(_broken[tools.fingerprint])
    return tools


_broken: dict[str, str] = {}  # what is wrong with a compiler, by fingerprint


def mark_broken(tools: Toolchain, reason: str) -> CompilerUnavailable:
    """Do not ask this compiler again; returns the error to raise."""
    _broken[tools.fingerprint] = reason
    return _unavailable(reason)


def _unavailable(reason: str) -> CompilerUnavailable:
    return CompilerUnavailable("codegen.build", reason, remedy="set CC to a C compiler that works")


@functools.cache
def _find(wanted: str, search: str) -> Toolchain:
    try:
        words = tuple(shlex.split(wanted))
    except ValueError:
        words = ()
    named = (words,) if words and words[0] else ()
    for command in (*named, *((name,) for name in CANDIDATES)):
        program = shutil.which(command[0], path=search)
        if program is not None:
            if wanted.strip() and command not in named:
                why = f"{named[0][0]!r} is no program" if named else "it is no command line"
                notify(f"[compiler] CC={wanted} is not used, since {why}: {program} is, instead")
            return _toolchain((program, *command[1:]))
    raise CompilerNotFound([command[0] for command in named] + list(CANDIDATES))


def _toolchain(command: tuple[str, ...]) -> Toolchain:
    isa = isa_flags()
    program = Path(command[0]).resolve()
    quick = () if "clang" in program.name else _QUICK
    kernel_flags = ("-O3", *quick, *_COMMON, *_target_flags(isa), *_vector_math())
    host_flags, link_flags = ("-O1", *_COMMON), ("-shared", "-fPIC", "-lm")
    stat = program.stat()
    parts = (*command, str(program), str(stat.st_size), str(stat.st_mtime_ns), platform.machine())
    parts += (*sorted(isa), *kernel_flags, *host_flags, *link_flags)
    fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Toolchain(command, kernel_flags, host_flags, link_flags, fingerprint)


@functools.cache
def isa_flags() -> frozenset[str]:
    """The instruction set extensions of this CPU as the kernel lists them; empty if unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@functools.cache
def last_level_cache() -> int:
    """Bytes of the largest cache; 32 MiB if unknown."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max((int(s[:-1]) << 10 for s in sizes if s.endswith("K")), default=32 << 20)


def _target_flags(isa: frozenset[str]) -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    # gcc keeps to 256 bits unless told; memory-bound loops gain from whole cache lines.
    wide = ("-mprefer-vector-width=512",) if "avx512f" in isa else ()
    return ("-march=native", *wide)


def _vector_math() -> tuple[str, ...]:
    """The define that lets kernels call glibc's vector functions, where they all exist."""
    if platform.machine() != "x86_64":
        return ()
    try:
        library = ctypes.CDLL("libmvec.so.1")
    except OSError:
        return ()
    # The last functions to arrive (glibc 2.35).
    return ("-DWEFT_MVEC",) if hasattr(library, "_ZGVdN8v_erfcf") else ()
