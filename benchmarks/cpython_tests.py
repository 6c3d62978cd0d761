"""CPython's own test package inside compiled functions.

    python benchmarks/cpython_tests.py                      every module of MODULES
    python benchmarks/cpython_tests.py test_dict test_set   some
    python benchmarks/cpython_tests.py --test test_set.TestSet.test_pop   one test, in this process
    python benchmarks/cpython_tests.py --write              merge into docs/coverage/cpython.md

Each test method is run twice: as it is, and compiled by weft (backend: run the graph as it is). A
test that passes plain and fails compiled is `wrong`. A test whose method was captured with no
graph break is `whole`; one that breaks is still right. The methods hold no tensors, so what is
measured is the language, not the graphs.

Each module runs in a process that writes each result down as it comes (`--keep FOLDER`, a folder
in the temporary one unless told): a crash or a hang costs one test, and a run that was stopped, or
that ran past its `--seconds`, goes on where it ended. `--again` forgets what was kept.
"""

import argparse
import contextlib
import copy
import io
import json
import signal
import subprocess
import sys
import tempfile
import time
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
    "test_iter", "test_bool", "test_userdict", "test_userlist", "test_string", "test_class",
    "test_decorators", "test_types", "test_generator_stop", "test_coroutines", "test_builtin",
    "test_isinstance", "test_funcattrs", "test_index", "test_hash", "test_dictviews", "test_unary",
    "test_global", "test_opcodes", "test_subclassinit", "test_genericalias", "test_typechecks",
    "test_abc", "test_weakset", "test_reprlib", "test_sort", "test_float", "test_int", "test_long",
    "test_complex", "test_exception_variations", "test_exception_hierarchy", "test_userstring",
    "test_pprint", "test_dynamicclassattribute", "test_module", "test_print", "test_fractions",
    "test_numeric_tower", "test_graphlib", "test_dynamic", "test_asyncgen", "test_copyreg",
    "test_contextlib_async", "test_typing", "test_random", "test_textwrap", "test_format",
    "test_string_literals", "test_strtod", "test_cmath", "test_pow", "test_statistics",
)  # fmt: skip
SECONDS = 10
END = "(end)"
LEFT_OUT = {
    "tuple_reuse": "asks for the id of a tuple that no variable holds any more",
    "_sizeof": "asks for the bytes that CPython's own object takes",
    "TestTracing": "counts lines under `sys.settrace`, which sees the replacement's lines",
    "test_lru_reentrancy_with_len": "puts another `len` into builtins, which capture needs too",
    "setvectorcall": "puts other C code into a Python function",
    "test_envar_good_path_builtin": "puts another `int` into builtins, which capture needs too",
    "denial_of_service": "measures time",
    "test_bug1229429": "counts the references to an object",
    "test_splittable_popitem": "asks for the bytes that CPython's own object takes",
    "SharedKeyTests.test_subclasses": "asks for the bytes that CPython's own object takes",
    "ClassPropertiesAndMethods.test_slots": "counts all objects of the process, a compiler's too",
}
"""Parts of test names -> why such tests say nothing about a compiler of functions."""


class TooLong(BaseException):
    """A test that ran past its time."""


def run_module(name: str, kept: Path) -> None:
    """Run the tests of a module that `kept` has no result for, and add theirs. Its own process."""
    prepare()
    done = read(kept)
    with kept.open("a") as out:
        for test in _tests(f"test.{name}"):
            label = test.id().partition(".")[2]
            if label in done or any(part in label for part in LEFT_OUT):
                continue
            print(json.dumps([label, "crash", "the process died here"]), file=out, flush=True)
            plain, _ = _run(copy.copy(test), None)
            row = _compiled(test) if plain == "pass" else ("unfit", plain)
            print(json.dumps([label, *row]), file=out, flush=True)
        print(json.dumps([END, "", ""]), file=out, flush=True)


def prepare() -> None:
    """Have every frame captured, and a test that takes too long stopped."""

    def out_of_time(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, out_of_time)
    # The tests hold no tensors: capture every frame all the same.
    weft_capture.api.has_tensor_work = lambda function, flat_args: True


def read(kept: Path) -> dict[str, tuple[str, str]]:
    """Return what a file of results holds: test -> (status, detail), the last one of each."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {label: (status, detail) for label, status, detail in map(json.loads, lines)}


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


def _compiled(test: unittest.TestCase, verbose: bool = False) -> tuple[str, str]:
    counters["frames"].clear()
    method = getattr(test, test._testMethodName)
    optimised = weft_capture.capture(method, lambda graph, inputs: graph.forward)
    state = optimised._weft_capture  # type: ignore[attr-defined]
    status, detail = _run(test, optimised, verbose)
    codes = [f"{record.code} ({record.detail})" for record in state.breaks]
    compiled = counters["frames"]["compiled"]
    state.forget()
    if status != "pass":
        return ("time" if status == "time" else "wrong"), detail
    if not compiled and not codes:
        return "plain", ""
    return ("breaks", codes[0]) if codes else ("whole", "")


def _run(test: unittest.TestCase, method: object, verbose: bool = False) -> tuple[str, str]:
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
    if bad and bad[0][1].rstrip().endswith(TooLong.__name__):
        return "time", f"more than {SECONDS} seconds"
    if bad:
        return "fail", bad[0][1] if verbose else bad[0][1].strip().splitlines()[-1]
    return ("skip" if result.skipped or not result.testsRun else "pass"), ""


def run_to_end(name: str, kept: Path, seconds: float) -> None:
    """Run a module in processes of its own until it has ended or its time is over."""
    until = time.monotonic() + seconds
    while END not in read(kept) and time.monotonic() < until:
        command = [sys.executable, __file__, "--only", name, "--keep", str(kept.parent)]
        before = len(read(kept))
        kept.touch()  # `watch` takes a file that does not change for a test that hangs
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        watch(child, kept, until)
        _, errors = child.communicate()
        if len(read(kept)) == before:
            print(f"{name}: did not run: {errors.decode(errors='replace').strip()[-300:]}")
            return


def watch(child: "subprocess.Popen[bytes]", kept: Path, until: float) -> None:
    """Wait for a child; end it when a test hangs past its own alarm, or the module's time ends."""
    while child.poll() is None:
        time.sleep(0.2)
        written = kept.stat().st_mtime if kept.exists() else time.time()
        hangs = time.time() - written > 4 * SECONDS + 20
        if not hangs and time.monotonic() < until:
            continue
        child.kill()
        child.wait()
        lines = kept.read_text().splitlines() if kept.exists() else []
        if lines and json.loads(lines[-1])[1] == "crash":  # the test it was at
            label = json.loads(lines.pop())[0]
            if hangs:
                lines.append(json.dumps([label, "time", "hangs"]))
            kept.write_text("".join(f"{line}\n" for line in lines))


def run(
    modules: list[str], folder: Path, seconds: float, verbose: bool
) -> dict[str, dict[str, tuple[str, str]]]:
    """Run modules; returns the results of those that ran to their end."""
    results = {}
    for name in modules:
        kept = folder / f"{name}.jsonl"
        run_to_end(name, kept, seconds)
        rows = read(kept)
        if rows.pop(END, None) is None:
            print(f"{name}: not at its end yet")
        rows = {test: row for test, row in rows.items() if row[0] != "unfit"}
        results[name] = rows
        counts = Counter(status for status, _ in rows.values())
        print(f"{name}: {dict(counts)}", flush=True)
        for test, (status, detail) in rows.items():
            if status in ("wrong", "time", "crash") or verbose:
                print(f"    {status} {test}: {detail[:300]}")
    return results


STATUSES = ("whole", "breaks", "plain", "wrong", "time", "crash")


def read_table(target: Path) -> dict[str, Counter[str]]:
    """Return the counts that the table has already: module -> status -> tests."""
    found: dict[str, Counter[str]] = {}
    lines = target.read_text().splitlines() if target.exists() else []
    names: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "module":
            names = cells
        elif cells[0].startswith("test_"):
            row = dict(zip(names, cells, strict=True))
            found[cells[0]] = Counter({s: int(row.get(s) or 0) for s in STATUSES})
    return found


def table(results: dict[str, Counter[str]]) -> str:
    """Return the counts as a Markdown table."""
    lines = [f"| module | tests | {' | '.join(STATUSES)} |", "|---" * (2 + len(STATUSES)) + "|"]
    total: Counter[str] = Counter()
    for name, counts in sorted(results.items()):
        total += counts
        cells = [str(counts[status] or "") for status in STATUSES]
        lines.append(f"| {name} | {counts.total()} | {' | '.join(cells)} |")
    cells = [str(total[status]) for status in STATUSES]
    lines.append(f"| **all** | {total.total()} | {' | '.join(cells)} |")
    right = sum(total[status] for status in ("whole", "breaks", "plain"))
    share = 100 * right / max(total.total(), 1)
    whole = 100 * total["whole"] / max(total.total(), 1)
    lines.append(f"\n{share:.1f} % right, {whole:.1f} % captured whole.")
    return "\n".join(lines)


def run_one(label: str) -> None:
    """Run one test in this process, and print what a failure says."""
    prepare()
    module, _, rest = label.partition(".")
    for test in _tests(f"test.{module}"):
        if test.id().endswith(rest):
            plain, _ = _run(copy.copy(test), None)
            print(test.id(), plain, *_compiled(test, verbose=True), sep="\n  ")


def reasons(results: dict[str, dict[str, tuple[str, str]]], count: int = 15) -> str:
    """Return the commonest first breaks of the tests of a run, as a Markdown list."""
    found = Counter(
        detail
        for rows in results.values()
        for status, detail in rows.values()
        if status == "breaks"
    )
    return "\n".join(f"- {tests}: `{detail}`" for detail, tests in found.most_common(count))


def write(target: Path, results: dict[str, Counter[str]], broke: str) -> None:
    """Write the table, with the rows of modules that did not run now as they were."""
    target.parent.mkdir(exist_ok=True)
    left_out = "\n".join(f"- `{part}`: {why}" for part, why in LEFT_OUT.items())
    head = f"{sys.version_info.major}.{sys.version_info.minor}"
    target.write_text(
        f"# CPython's own tests\n\nWritten by `python benchmarks/cpython_tests.py --write` on "
        f"CPython {head}. `whole`: the test's method was captured with no break; `breaks`: "
        "right, with breaks; `plain`: ran uncompiled; `wrong`: passes plain and fails "
        f"compiled.\n\n{table(read_table(target) | results)}\n\n"
        f"`time` is longer than {SECONDS} seconds: mostly loops over Python numbers, of which "
        "capture executes each step, up to its limit of 100,000 instructions.\n\n"
        f"The commonest first breaks, with the tests that had them:\n\n{broke}\n\n"
        f"Left out:\n\n{left_out}\n"
    )


def main() -> None:
    """Parse the arguments and do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--test", help="one test, as module.Class.method")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "weft-cpython")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", type=float, default=300, help="for each module")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    if options.only:
        run_module(options.only, options.keep / f"{options.only}.jsonl")
        return
    if options.test:
        run_one(options.test)
        return
    modules = options.modules or list(MODULES)
    for name in modules if options.again else ():
        (options.keep / f"{name}.jsonl").unlink(missing_ok=True)
    results = run(modules, options.keep, options.seconds, options.verbose)
    counts = {name: Counter(s for s, _ in rows.values()) for name, rows in results.items()}
    print(table(counts))
    if options.write:
        write(ROOT / "docs" / "coverage" / "cpython.md", counts, reasons(results))


if __name__ == "__main__":
    main()
