"""`python -m weft`: what weft finds on this machine, its disk cache, and reports of scripts.

python -m weft              versions, C compiler, instruction set, threads, cache folder
python -m weft cache        how many files the disk cache holds, and how large they are
python -m weft cache clear  delete them
python -m weft report run.py -o report.html [-- arguments of run.py]
                            run a script and write what became of it as a page (see weft.report)
python -m weft bisect run.py [-- arguments of run.py]
                            run a script eagerly, and find the operator for which what it compiles
                            gives other results or fails (see weft.bisect)
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from weft_codegen.kernels import toolchain
from weft_core import cachedir
from weft_core.errors import CompilerNotFound

import weft


def _compiler() -> str:
    """Describe the C compiler that codegen would use."""
    try:
        command = toolchain.find().command
        shown = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except CompilerNotFound as error:
        return f"{error.cause}: compiled functions run eagerly (Debian: apt install gcc)"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(command)}: does not run ({error})"
    return f"{shlex.join(command)}: {shown.splitlines()[0] if shown else 'says no version'}"


def environment() -> Iterator[tuple[str, str]]:
    """Yield the facts that a bug report needs, as (name, value)."""
    yield "weft", weft.__version__
    yield "torch", str(torch.__version__)
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    yield "C compiler", _compiler()
    yield "CPU", torch.backends.cpu.get_cpu_capability()
    yield "threads", str(torch.get_num_threads())
    yield "CUDA", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    yield "backends", ", ".join(weft.list_backends())
    yield "cache folder", str(cachedir.cache_dir())
    for name in sorted(key for key in os.environ if key.startswith("WEFT_")):
        yield name, os.environ[name]


def show_environment() -> None:
    """Print the environment report."""
    for name, value in environment():
        print(f"{name:<14}{value}")


def cache(action: str) -> None:
    """Print how large the disk cache is (`info`), or delete it (`clear`)."""
    files = cachedir.entries()
    text = f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB"
    for path in files if action == "clear" else ():
        path.unlink(missing_ok=True)
    print(f"{cachedir.cache_dir()}: {'deleted ' if action == 'clear' else ''}{text}")


def _run(script: str, arguments: list[str]) -> None:
    """Run a script as Python does."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def bisect(script: str, arguments: list[str], calls: int) -> int:
    """Run a script eagerly and bisect what it compiles; returns 1 if something differs.

    Args:
        script: its path.
        arguments: its command line.
        calls: how many calls of each compiled function are looked at.
    """
    from weft.bisection import Found, watched  # noqa: PLC0415  loads every stage

    try:
        with watched(calls):
            _run(script, arguments)
    except Found as found:
        print(f"weft: {found.args[0]}")
        return 1
    except SystemExit as leaving:
        print(f"the script left with {leaving.code!r}", file=sys.stderr)
    print("weft: no compiled call differs from eager")
    return 0


def report(script: str, arguments: list[str], page: str, trace: str | None) -> int:
    """Run a script with everything recorded; write the page, also where the script raises.

    Args:
        script: its path.
        arguments: its command line.
        page: the file for `Report.save`.
        trace: the file for `Report.save_trace`, or None.
    """
    weft.config.record = True
    status: int | str | None = 0
    try:
        _run(script, arguments)
    except SystemExit as leaving:
        status = leaving.code
    except BaseException:
        traceback.print_exc()
        status = 1
    outcome = weft.report()
    print(f"weft: {outcome.save(page).resolve()}", file=sys.stderr)
    if trace is not None:
        print(f"weft: {outcome.save_trace(trace).resolve()}", file=sys.stderr)
    if isinstance(status, str):
        print(status, file=sys.stderr)
    return status if isinstance(status, int) else int(status is not None)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m weft", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("env", help="what weft finds on this machine (the default)")
    disk = commands.add_parser("cache", help="the disk cache")
    disk.add_argument("action", nargs="?", choices=["info", "clear"], default="info")
    told = commands.add_parser("report", help="run a script and write its report as a page")
    told.add_argument("script", help="the script; its own arguments come after --")
    told.add_argument("-o", "--output", default="weft-report.html", help="the page")
    told.add_argument("--trace", help="also write the time of compiling, for ui.perfetto.dev")
    search = commands.add_parser("bisect", help="find why compiled code differs from eager")
    search.add_argument("script", help="the script; its own arguments come after --")
    search.add_argument("--calls", type=int, default=4, help="calls to look at, of each function")
    given = sys.argv[1:] if arguments is None else arguments
    end = given.index("--") if "--" in given else len(given)
    chosen = parser.parse_args(given[:end])
    if chosen.command == "report":
        return report(chosen.script, given[end + 1 :], chosen.output, chosen.trace)
    if chosen.command == "bisect":
        return bisect(chosen.script, given[end + 1 :], chosen.calls)
    if chosen.command == "cache":
        cache(chosen.action)
    else:
        show_environment()
    return 0


if __name__ == "__main__":
    sys.exit(main())
