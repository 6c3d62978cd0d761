"""CPython's own test package inside compiled functions.

    python benchmarks/cpython_tests.py                    every module of MODULES
    python benchmarks/cpython_tests.py test_dict test_set some
    python benchmarks/cpython_tests.py --write            write docs/coverage/cpython.md

Each test method is run twice: as it is, and compiled by weft (backend: run the graph as it is). A
test that passes plain and fails compiled is `wrong`. A test whose method was captured with no
graph break is `whole`; one that breaks is still right. The methods hold no tensors, so what is
measured is the language, not the graphs.
"""

import argparse
import contextlib
import io
import json
import signal
import subprocess
import sys
import unittest
import warnings
from collections import Counter
from pathlib import Path

import weft_capture
from weft_core.events import counters

ROOT = Path(__file__).parent.parent
MODULES = (
    "test_generators", "test_exceptions", "test_dict", "test_list", "test_set", "test_tuple",
    "test_contextlib", "test_itertools", "test_functools", "test_collections", "test_heapq",
    "test_bisect", "test_operator", "test_math", "test_enum", "test_dataclasses", "test_with",
    "test_raise", "test_scope", "test_grammar", "test_unpack", "test_call", "test_patma",
    "test_named_expressions", "test_extcall", "test_unpack_ex", "test_listcomps", "test_descr",
    "test_property", "test_super", "test_slice", "test_range", "test_enumerate", "test_except_star",
    "test_keywordonlyarg", "test_positional_only_arg", "test_compare", "test_copy", "test_deque",
    "test_defaultdict", "test_ordered_dict", "test_fstring", "test_augassign", "test_binop",
    "test_iter", "test_bool", "test_userdict", "test_userlist", "test_string",
)  # fmt: skip
SECONDS = 10


class TooLong(BaseException):
    """A test that ran past its time."""


def run_module(name: str) -> dict[str, tuple[str, str]]:
    """Run a test module; returns test -> (status, detail). For a process of its own."""
    def out_of_time(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, out_of_time)
    # The tests hold no tensors: capture every frame all the same.
    weft_capture.api.has_tensor_work = lambda function, flat_args: True
    rows: dict[str, tuple[str, str]] = {}
    for test in _tests(f"test.{name}"):
        plain, _ = _run(test, None)
        if plain != "pass":
            continue
        rows[test.id().partition(".")[2]] = _compiled(test)
    return rows


def _tests(module: str) -> list[unittest.TestCase]:
    found: list[unittest.TestCase] = []

    def walk(suite: object) -> None:
        if isinstance(suite, unittest.TestSuite):
            for part in suite:
                walk(part)
        elif isinstance(suite, unittest.TestCase) and hasattr(suite, "_testMethodName"):
            found.append(suite)

    walk(unittest.defaultTestLoader.loadTestsFromName(module))
    return [test for test in found if not type(test).__module__.startswith("unittest")]


def _compiled(test: unittest.TestCase) -> tuple[str, str]:
    counters["frames"].clear()
    method = getattr(test, test._testMethodName)
    optimised = weft_capture.capture(method, lambda graph, inputs: graph.forward)
    state = optimised._weft_capture  # type: ignore[attr-defined]
    status, detail = _run(test, optimised)
    codes = [f"{record.code} ({record.detail})" for record in state.breaks]
    compiled = counters["frames"]["compiled"]
    state.forget()
    if status != "pass":
        return ("time" if status == "time" else "wrong"), detail
    if not compiled and not codes:
        return "plain", ""
    return ("breaks", codes[0]) if codes else ("whole", "")


def _run(test: unittest.TestCase, method: object) -> tuple[str, str]:
    """Run one test, with another function in the place of its method when one is given."""
    if method is not None:
        setattr(test, test._testMethodName, method)
    result = unittest.TestResult()
    text = io.StringIO()
    signal.alarm(SECONDS)
    try:
        with (
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(text),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            test.run(result)
    except TooLong:
        return "time", f"more than {SECONDS} seconds"
    finally:
        signal.alarm(0)
        test.__dict__.pop(test._testMethodName, None)
    bad = [*result.failures, *result.errors]
    if bad:
        return "fail", bad[0][1].strip().splitlines()[-1]
    return ("skip" if result.skipped or not result.testsRun else "pass"), ""


def run(modules: list[str], verbose: bool) -> dict[str, dict[str, tuple[str, str]]]:
    """Run modules, each in a process of its own."""
    results = {}
    for name in modules:
        command = [sys.executable, __file__, "--only", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            rows = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            print(f"{name}: did not run: {done.stderr.strip()[-300:]}")
            continue
        results[name] = rows
        counts = Counter(status for status, _ in rows.values())
        print(f"{name}: {dict(counts)}", flush=True)
        for test, (status, detail) in rows.items():
            if status in ("wrong", "time") or verbose:
                print(f"    {status} {test}: {detail[:300]}")
    return results


STATUSES = ("whole", "breaks", "plain", "wrong", "time")


def table(results: dict[str, dict[str, tuple[str, str]]]) -> str:
    """Return the counts as a Markdown table."""
    lines = [f"| module | tests | {' | '.join(STATUSES)} |", "|---" * (2 + len(STATUSES)) + "|"]
    total: Counter[str] = Counter()
    for name, rows in results.items():
        counts = Counter(status for status, _ in rows.values())
        total += counts
        cells = [str(counts[status] or "") for status in STATUSES]
        lines.append(f"| {name} | {len(rows)} | {' | '.join(cells)} |")
    cells = [str(total[status]) for status in STATUSES]
    lines.append(f"| **all** | {total.total()} | {' | '.join(cells)} |")
    right = total.total() - total["wrong"] - total["time"]
    share = 100 * right / max(total.total(), 1)
    whole = 100 * total["whole"] / max(total.total(), 1)
    lines.append(f"\n{share:.1f} % right, {whole:.1f} % captured whole.")
    return "\n".join(lines)


def main() -> None:
    """Parse the arguments and do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.only:
        rows = run_module(options.only)
        print()
        print(json.dumps(rows))
        return
    results = run(options.modules or list(MODULES), options.verbose)
    text = table(results)
    print(text)
    if options.write:
        target = ROOT / "docs" / "coverage" / "cpython.md"
        target.parent.mkdir(exist_ok=True)
        head = f"{sys.version_info.major}.{sys.version_info.minor}"
        target.write_text(
            f"# CPython's own tests\n\nWritten by `python benchmarks/cpython_tests.py --write` on "
            f"CPython {head}. `whole`: the test's method was captured with no break; `breaks`: "
            "right, with breaks; `plain`: ran uncompiled; `wrong`: passes plain and fails "
            f"compiled.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
