"""Run the packages' tests on several pairs of torch and CPython: docs/coverage/versions.md.

    python integration/versions.py /envs/a/bin/python /envs/b/bin/python ...

Each interpreter is one cell: an environment that has some torch, the weft packages in place
(CONTRIBUTING.md) and what the tests need, as `nox -s versions` makes them. Its cell is written
anew, the others stay as they are. Arguments after `--` go to pytest. With `--log`, the cells come
from the output of `pytest -v` runs, each below a line `commit HASH DATE`; logs of one cell are
merged, a later outcome of a test counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
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
COMMIT = re.compile(r"^commit (\S+) (\S+)$", re.M)
COUNTED = ("passed", "failed", "error", "skipped", "xfail")
HEAD = """# Versions

Made by `nox -s versions`, which makes an environment for each torch and each CPython that is there,
runs `packages/*/tests` in it and fills its cell (`integration/versions.py`). An error is a file of
tests that could not be imported or that ended the process; those of Triton need `triton` in the
environment. A cell names the commit and the day of its run. Where some tests of a cell were run
again at a later commit, their later outcome is counted, and the cell says how many they were and at
which commit. A cell also names the packages whose tests were not run in it.

| torch | {pythons} |
|---|{rule}|
"""


def versions_of(python: str) -> tuple[str, str]:
    """Return the versions of torch and CPython of an interpreter."""
    asked = subprocess.run([python, "-c", ASK], check=True, capture_output=True, text=True)
    torch, python_version = json.loads(asked.stdout.splitlines()[-1])
    return torch, python_version


def folders() -> list[str]:
    """Return the folders of tests."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/tests"))


def run_tests(python: str, options: list[str]) -> str:
    """Return what `pytest -v` prints: one line a test, so that a crash loses only what follows."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(describe, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    text = f"commit {commit.strip()} {datetime.now(UTC):%Y-%m-%d}\n"
    for folder in folders():
        command = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        text += ended.stdout
        if ended.returncode not in (0, 1, 5):
            text += f"\n{folder}::ended-with-{ended.returncode} ERROR\n"
    return text


def outcomes(output: str) -> dict[str, str]:
    """Return the last outcome of each test; what was not collected is a file with an error."""
    last = {test.strip(): outcome for test, outcome in OUTCOME.findall(output)}
    return last | dict.fromkeys(re.findall(r"^ERROR (\S+\.py)$", output, re.M), "ERROR")


def merged(earlier: dict[str, str], later: dict[str, str]) -> dict[str, str]:
    """Return outcomes with those of a later run, which replaces a crash of a folder or a file."""
    lost = (test for test in earlier if "::" not in test or "::ended-with-" in test)
    gone = {test for test in lost if any(t.startswith(test.split("::")[0]) for t in later)}
    return {test: outcome for test, outcome in earlier.items() if test not in gone} | later


def summary(outputs: list[str]) -> tuple[str, list[str]]:
    """Return the text of a cell, and the tests that failed."""
    last: dict[str, str] = {}
    runs = []
    for output in outputs:
        later = outcomes(output)
        commit, day = COMMIT.search(output).groups()
        again = sum(test in last for test in later)
        runs.append(f"at {commit}, {day}" + f", {again:,} of them again" * bool(again))
        last = merged(last, later)
    counts = Counter(outcome.lower() for outcome in last.values())
    cell = ", ".join(f"{counts[name]:,} {name}" for name in COUNTED if counts[name])
    bad = sorted(test for test, outcome in last.items() if outcome in ("FAILED", "ERROR"))
    absent = [name for name in folders() if not any(test.startswith(f"{name}/") for test in last)]
    runs += [f"not run: {', '.join(name.split('/')[1] for name in absent)}"] * bool(absent)
    return f"{cell} ({'; '.join(runs)})", bad


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
    runs: dict[tuple[str, str], list[str]] = {}
    for torch, python, path in arguments.log:
        runs.setdefault((short(torch), short(python)), []).append(Path(path).read_text())
    for interpreter in arguments.pythons:
        torch, python = map(short, versions_of(interpreter))
        runs[torch, python] = [run_tests(interpreter, options.split())]
    for (torch, python), outputs in runs.items():
        cells, failed = known()
        cells[torch, python], failed[f"torch {torch}, CPython {python}"] = summary(outputs)
        write(cells, failed)
        bad = failed[f"torch {torch}, CPython {python}"]
        print(f"torch {torch}, CPython {python}: {cells[torch, python]}", *bad, sep="\n  ")


if __name__ == "__main__":
    main()
