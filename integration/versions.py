"""Run the packages' tests on several pairs of torch and CPython: docs/coverage/versions.md.

    python integration/versions.py /envs/a/bin/python /envs/b/bin/python ...

Each interpreter is one cell: an environment that has some torch, the weft packages in place
(CONTRIBUTING.md) and what the tests need. Its cell is written anew, the others stay as they are.
Arguments after `--` go to pytest. With `--log`, the cells come from the output of `pytest -v` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "coverage" / "versions.md"
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ASK = (
    "import json, platform, torch;"
    "print(json.dumps([torch.__version__.split('+')[0], platform.python_version()]))"
)
OUTCOME = re.compile(r"^(\S+::.*?|\S+\.py) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.M)
COUNTED = ("passed", "failed", "error", "skipped", "xfail")
HEAD = """# Versions

Made by `python integration/versions.py PYTHON...`, which runs `packages/*/tests` with each
interpreter and fills its cell. An error is a file of tests that could not be imported or that
ended the process; those of Triton need `triton` in the environment.

| torch | {pythons} |
|---|{rule}|
"""


def versions_of(python: str) -> tuple[str, str]:
    """Return the versions of torch and CPython of an interpreter."""
    asked = subprocess.run([python, "-c", ASK], check=True, capture_output=True, text=True)
    torch, python_version = json.loads(asked.stdout.splitlines()[-1])
    return torch, python_version


def run_tests(python: str, options: list[str]) -> str:
    """Return what `pytest -v` prints: one line a test, so that a crash loses only what follows."""
    tests = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("packages/*/tests"))
    text = ""
    for folder in tests:
        command = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        text += ended.stdout
        if ended.returncode not in (0, 1, 5):
            text += f"\n{folder}::ended-with-{ended.returncode} ERROR\n"
    return text


def summary(output: str) -> tuple[str, list[str]]:
    """Return the text of a cell, and the tests that failed."""
    last = dict(OUTCOME.findall(output))
    last |= dict.fromkeys(re.findall(r"^ERROR (\S+\.py)$", output, re.M), "ERROR")
    counts = Counter(outcome.lower() for outcome in last.values())
    cell = ", ".join(f"{counts[name]:,} {name}" for name in COUNTED if counts[name])
    bad = sorted(test for test, outcome in last.items() if outcome in ("FAILED", "ERROR"))
    return cell, bad


def short(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def known() -> tuple[dict[tuple[str, str], str], dict[str, list[str]]]:
    """Return the cells that are filled, and what failed in them, from the table."""
    text = TABLE.read_text() if TABLE.exists() else ""
    cells = {}
    for torch, row in re.findall(r"^\| (2\.\d+) \|(.*)\|$", text, re.M):
        for python, cell in zip(PYTHONS, row.split("|")):
            cells[torch, python] = cell.strip()
    failed = {}
    for title, part in re.findall(r"^## (torch .*?)\n\n(.*?)(?=\n## |\Z)", text, re.M | re.S):
        failed[title] = re.findall(r"^- `(.*)`$", part, re.M)
    return cells, failed


def write(cells: dict[tuple[str, str], str], failed: dict[str, list[str]]) -> None:
    """Write the table."""
    text = HEAD.format(
        pythons=" | ".join(f"CPython {python}" for python in PYTHONS), rule="---|" * 3 + "---"
    )
    for torch in TORCHES:
        row = [cells.get((torch, python)) or "not run" for python in PYTHONS]
        text += f"| {torch} | {' | '.join(row)} |\n"
    for title, tests in sorted(failed.items()):
        if tests:
            text += f"\n## {title}\n\n" + "".join(f"- `{test}`\n" for test in tests)
    TABLE.write_text(text)


def main() -> None:
    """Fill the cells of the interpreters that are given."""
    argv, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument(
        "--log", nargs=3, action="append", default=[], metavar=("TORCH", "CPYTHON", "FILE")
    )
    arguments = parser.parse_args(argv.split())
    runs = [(torch, python, Path(path).read_text()) for torch, python, path in arguments.log]
    for interpreter in arguments.pythons:
        runs.append((*versions_of(interpreter), run_tests(interpreter, options.split())))
    for torch, python, output in runs:
        cells, failed = known()
        cell, bad = summary(output)
        cells[short(torch), short(python)] = cell
        failed[f"torch {short(torch)}, CPython {short(python)}"] = bad
        write(cells, failed)
        print(f"torch {torch}, CPython {python}: {cell}", *bad, sep="\n  ")


if __name__ == "__main__":
    main()
