"""Every operator of torch's own operator database through codegen, against eager.

    python benchmarks/op_coverage.py run      [--results FILE] [--match TEXT] [--modes ...]
    python benchmarks/op_coverage.py report   [--results FILE] [--write FILE]
    python benchmarks/op_coverage.py aten     [--write FILE]

A *case* is one operator with one dtype in one mode. Each of its samples is traced forward and
backward by weft_aot, lowered and scheduled by weft_codegen, run, and compared with eager. Modes:

    static    every size known; the loop program runs in the reference interpreter
    dynamic   every size above one symbolic; interpreter
    native    the first samples as one graph, compiled to C (one a sample would take days)
    cuda      the same on a GPU, compiled by Triton (only where asked for)

`report` makes docs/coverage/operator-samples.md of the results. `aten` only traces and lowers some
samples, and makes docs/coverage/operators.md, a list by aten operator (see aten_ops.py).

Cases run in a worker process, so that one that hangs or crashes costs only itself; results go to
a file of JSON lines, and a case that is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "docs" / "coverage" / "operator-samples.md"
ATEN_REPORT, ATEN_RESULTS = REPORT.with_name("operators.md"), ROOT / ".coverage-aten.jsonl"
RESULTS = ROOT / ".coverage-operators.jsonl"
DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")
MODES = ("static", "dynamic", "native")
ALL_MODES = (*MODES, "cuda")
# Samples of a case that are run at most; of float32 with static sizes every one.
MOST = {"static": 8, "dynamic": 60, "native": 3, "cuda": 3, "aten": 4}


def cases(worker: Worker, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Every case, float32 first: {op, dtype, mode}."""
    names = worker.run({"mode": "list"}, 60)["samples"]
    for dtype in options.dtypes:
        for mode in options.modes:
            for item in names:
                known = dtype in item["dtypes"] and (mode != "dynamic" or dtype == "float32")
                if options.match in item["op"] and known:
                    yield {"op": item["op"], "dtype": dtype, "mode": mode}


class Worker:
    """A process that runs cases, one JSON line a sample, and is replaced when it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, case: dict[str, str], seconds: float) -> dict[str, Any]:
        """The samples of a case, and how it ended ("" when it ran to its end)."""
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(case) + "\n")
        process.stdin.flush()
        samples: list[dict[str, Any]] = []
        for line in self._lines(seconds):
            if line.startswith("{"):
                samples.append(json.loads(line))
            elif line.startswith("done"):
                return {**case, "samples": samples, "end": ""}
        code = process.poll()
        process.kill()
        process.wait()
        self._process = None
        end = "took too long" if code is None else f"process ended with {code}"
        return {**case, "samples": samples, "end": end}

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, bufsize=1, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return self._process

    def _lines(self, seconds: float) -> Iterator[str]:
        """Lines as they come; ends when the process ends or is silent for too long."""
        assert self._process is not None and self._process.stdout is not None
        stream = self._process.stdout.fileno()
        unfinished = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            # A stream's own buffer would hide lines from the selector.
            while selector.select(seconds):
                got = os.read(stream, 65536)
                if not got:
                    return
                *lines, unfinished = (unfinished + got).split(b"\n")
                yield from (line.decode() for line in lines)


def run(options: argparse.Namespace) -> None:
    """Run every case that the results do not hold yet."""
    done = {(r["op"], r["dtype"], r["mode"]) for r in load(options.results)}
    worker = Worker()
    todo = [c for c in cases(worker, options)
            if (c["op"], c["dtype"], c["mode"]) not in done]  # fmt: skip
    todo = todo[options.shard[0] :: options.shard[1]]
    end = time.monotonic() + options.budget
    with options.results.open("a") as out:
        for number, case in enumerate(todo):
            if time.monotonic() > end:
                return
            began = time.monotonic()
            result = worker.run(case, options.seconds)
            result["seconds"] = round(time.monotonic() - began, 2)
            out.write(json.dumps(result) + "\n")
            out.flush()
            if sys.stderr.isatty():
                print(f"\r{number + 1}/{len(todo)} {case['op']:<50}", end="", file=sys.stderr)


def work() -> None:
    """The worker: cases from stdin, samples to stdout."""
    from aten_ops import facts_of  # noqa: PLC0415
    from op_samples import list_cases, run_case  # noqa: PLC0415  torch's test machinery is slow

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what operators print must not mix with the answers
    for line in sys.stdin:
        case = json.loads(line)
        if case["mode"] == "list":
            samples = list_cases()
        elif case["mode"] == "aten":
            samples = facts_of(case["op"], case["dtype"], MOST["aten"])
        else:
            samples = run_case(**case, most=_most(case))
        for sample in samples:
            answers.write(json.dumps(sample) + "\n")
        answers.write("done\n")


def _most(case: dict[str, str]) -> int | None:
    every = case["dtype"] == "float32" and case["mode"] == "static"
    return None if every else MOST[case["mode"]]


# ---- the report ----


def load(path: Path) -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


KINDS = ("lowered", "extern", "break", "wrong")


def counts(results: list[dict[str, Any]]) -> dict[str, int]:
    """How many samples ended in each way."""
    found = dict.fromkeys(KINDS, 0)
    for result in results:
        for sample in result["samples"]:
            found[sample["kind"]] = found.get(sample["kind"], 0) + 1
        found["wrong"] += result["end"].startswith("process ended")
    return found


def text_of(found: dict[str, int]) -> str:
    """Counts as one table cell: lowered / extern / break."""
    if not any(found.values()):
        return ""
    cell = " / ".join(str(found[kind]) for kind in KINDS[:3])
    return f"{cell} **{found['wrong']} wrong**" if found["wrong"] else cell


def report(results: list[dict[str, Any]]) -> str:
    """The page."""
    by_op: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_op.setdefault(result["op"], []).append(result)
    lines = [*_summary(results, by_op), "", "## Operators", ""]
    lines.append("| operator | float32 | float32, dynamic | other dtypes | C | goes to libtorch |")
    lines.append("|---|---|---|---|---|---|")
    for name in sorted(by_op):
        rows = by_op[name]
        cells = [
            text_of(counts([r for r in rows if wanted(r)])) for wanted in _COLUMNS
        ]  # fmt: skip
        externs = sorted({e for r in rows for s in r["samples"] for e in s.get("externs", ())})
        more = f" and {len(externs) - 4} more" if len(externs) > 4 else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(externs[:4])}{more} |")
    return "\n".join(lines) + "\n"


_COLUMNS = (
    lambda r: r["dtype"] == "float32" and r["mode"] == "static",
    lambda r: r["dtype"] == "float32" and r["mode"] == "dynamic",
    lambda r: r["dtype"] != "float32" and r["mode"] != "native",
    lambda r: r["mode"] == "native",
)


def _summary(results: list[dict[str, Any]], by_op: dict[str, Any]) -> list[str]:
    from op_samples import DATABASE, LEFT_OUT, torch_version  # noqa: PLC0415  see `work`

    dtypes = {
        name: {str(d)[6:] for d in op.supported_dtypes("cpu")} for name, op in DATABASE.items()
    }
    every = sum(dtype in known for known in dtypes.values() for dtype in DTYPES)
    wanted = 2 * every + sum("float32" in known for known in dtypes.values())
    unfinished = (
        f"This copy holds {len(results):,} of {wanted:,} cases (an operator with a dtype in a"
        " mode); the session goes on where it stopped."
    )
    lines = [
        "# Samples of operators",
        "",
        f"Made by `nox -s coverage` with torch {torch_version}: {len(by_op)} of the"
        f" {len(DATABASE)} operators of torch's own operator database"
        " (`torch.testing._internal.common_methods_invocations.op_db`), forward and backward,"
        " against eager. A sample counts as",
        "",
        "- **lowered**: all of it became loops of weft's own;",
        "- **extern**: some of it is a call into libtorch (named in the last column);",
        "- **break**: no graph or no program, so it runs as eager does;",
        "- **wrong**: another result than eager's, or an error of the compiler.",
        "",
        "Breadth comes from the reference interpreter, which runs the scheduled loop program;"
        f" the C compiler sees the first {MOST['native']} samples of each operator and dtype as one"
        f" graph. float32 runs every sample, other dtypes at most {MOST['static']}; with every size"
        f" symbolic at most {MOST['dynamic']} of float32. Left out, as no two calls agree on their"
        f" result or they are no operators of a CPU: {', '.join(sorted(LEFT_OUT))}.",
        "",
        *([unfinished, ""] if len(results) < wanted else []),
        "| mode | dtype | samples | lowered | extern | break | wrong |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for mode in ALL_MODES:
        for dtype in DTYPES:
            some = [r for r in results if (r["mode"], r["dtype"]) == (mode, dtype)]
            found = counts(some)
            total = sum(found[kind] for kind in KINDS)
            cells = " | ".join(f"{found[kind]:,}" for kind in KINDS)
            if not total:
                continue
            lines.append(f"| {mode} | {dtype} | {total:,} | {cells} |")
    return [*lines, "", *_breaks(results), *_wrong(results)]


def _breaks(results: list[dict[str, Any]]) -> list[str]:
    """The most frequent reasons of breaks."""
    reasons: dict[str, int] = {}
    for sample in (s for r in results for s in r["samples"] if s["kind"] == "break"):
        reasons[sample["why"]] = reasons.get(sample["why"], 0) + 1
    most = sorted(reasons, key=lambda why: -reasons[why])[:25]
    lines = ["## Why graphs run eagerly", "", "| samples | reason |", "|---|---|"]
    lines += [f"| {reasons[why]} | {why.replace('|', '/')} |" for why in most]
    slow = sorted({r["op"] for r in results if r["end"] == "took too long"})
    return [*lines, *(["", f"Stopped after their time limit: {', '.join(slow)}."] if slow else [])]


def _wrong(results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for result in results:
        case = f"{result['op']} {result['dtype']} {result['mode']}"
        if result["end"].startswith("process ended"):
            lines.append(f"- {case}: {result['end']}")
        wrong = [s["why"] for s in result["samples"] if s["kind"] == "wrong"]
        lines += [f"- {case}: {why}" for why in sorted(set(wrong))]
    return ["", "## Wrong", "", *lines] if lines else []


def _aten(options: argparse.Namespace) -> None:
    """Trace and lower samples; write the list by aten operator."""
    from aten_ops import CLASSES, aten_report  # noqa: PLC0415  see `work`
    from op_samples import torch_version  # noqa: PLC0415

    options.modes, options.dtypes, options.results = ["aten"], list(CLASSES), ATEN_RESULTS
    run(options)
    _write(aten_report(load(ATEN_RESULTS), torch_version), options.write, ATEN_REPORT)


def _write(text: str, path: Path | None, default: Path) -> None:
    """Write a page: to stdout, or to a file of this name or the default one."""
    print(text) if path is None else (default if path == Path() else path).write_text(text)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "report", "aten", "worker"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--match", default="", help="only operators whose name holds this")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=ALL_MODES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a sample")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds to stop after")
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), metavar=("K", "N"))
    parser.add_argument("--write", type=Path, nargs="?", const=Path())
    options = parser.parse_args()
    if options.what == "worker":
        work()
    elif options.what == "run":
        run(options)
    elif options.what == "aten":
        _aten(options)
    else:
        text = report(load(options.results))
        _write(text, options.write, REPORT)
        if "## Wrong" in text:
            sys.exit("some results are wrong")


if __name__ == "__main__":
    main()
