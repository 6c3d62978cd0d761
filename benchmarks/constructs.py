"""What share of the Python constructs in `integration/constructs` is captured, and how.

python benchmarks/constructs.py              weft, fullgraph and default
python benchmarks/constructs.py --torch      also torch.compile(fullgraph=True), on its own
python benchmarks/constructs.py --write      write docs/coverage/constructs.md
python benchmarks/constructs.py -k classes   only cases whose name contains this
"""

import argparse
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "integration"))

from constructs import THEMES, Case, all_cases  # noqa: E402
from constructs.engines import Verdict, weft  # noqa: E402
from constructs.observe import differences, observe  # noqa: E402

STATUSES = ("pass", "break", "wrong", "silent")
Results = dict[str, dict[str, Verdict]]


def run(cases: list[Case], with_torch: bool) -> Results:
    """Return engine -> case -> verdict."""
    results: Results = {
        "weft fullgraph": {case.id: weft(case, fullgraph=True) for case in cases},
        "weft default": {case.id: weft(case, fullgraph=False) for case in cases},
    }
    if with_torch:
        command = [sys.executable, __file__, "--only-torch", *(case.id for case in cases)]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        rows = json.loads(output.splitlines()[-1])
        results["torch fullgraph"] = {name: Verdict(*row) for name, row in rows.items()}
    return results


def torch_fullgraph(case: Case) -> Verdict:
    """Run a case with torch.compile(fullgraph=True) and plain graphs."""
    graphs = []

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    logging.disable(logging.ERROR)
    expected = observe(case.function, case)
    torch._dynamo.reset()
    names = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
    with torch._dynamo.config.patch(dict.fromkeys(names, case.reads_data)):
        got = observe(torch.compile(case.function, backend=backend, fullgraph=True), case)
    logging.disable(logging.NOTSET)
    refused = next((o.error for o in got if _of_dynamo(o.error)), None)
    if refused is not None:
        return Verdict("break", f"{type(refused).__name__}: {str(refused).splitlines()[0]}")
    wrong = differences(expected, got)
    if wrong:
        return Verdict("wrong", "; ".join(wrong))
    return Verdict("pass" if graphs else "silent")


def _of_dynamo(error: BaseException | None) -> bool:
    return error is not None and type(error).__module__.startswith("torch._dynamo")


def only_torch(names: list[str]) -> None:
    """Run torch.compile on some cases and print the verdicts as one line of JSON."""
    wanted = set(names)
    verdicts = {case.id: torch_fullgraph(case) for case in all_cases() if case.id in wanted}
    print()
    print(json.dumps({name: (one.status, one.detail) for name, one in verdicts.items()}))


def table(cases: list[Case], results: Results) -> str:
    """Return the counts, theme by theme, as a Markdown table."""
    heads = [f"{engine} {status}" for engine in results for status in STATUSES]
    lines = [f"| theme | cases | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for theme in (*THEMES, "all"):
        chosen = [case for case in cases if theme in ("all", case.theme)]
        if not chosen:
            continue
        cells = [f"**{theme}**" if theme == "all" else theme, str(len(chosen))]
        for verdicts in results.values():
            counts = Counter(verdicts[case.id].status for case in chosen)
            cells += [str(counts[status] or "") for status in STATUSES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reasons(cases: list[Case], results: Results) -> str:
    """Return each case that weft does not capture whole, with its reason."""
    verdicts = results["weft fullgraph"]
    rows = [(case.id, verdicts[case.id]) for case in cases if verdicts[case.id].status != "pass"]
    lines = ["| case | | reason |", "|---|---|---|"]
    for name, one in rows:
        first = one.detail.splitlines()[0][:160].replace("|", "\\|") if one.detail else ""
        lines.append(f"| {name} | {one.status} | {first} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the arguments and do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("-k", default="")
    parser.add_argument("--only-torch", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_torch is not None:
        only_torch(options.only_torch)
        return
    cases = [case for case in all_cases() if options.k in case.id]
    results = run(cases, options.torch)
    text = f"{table(cases, results)}\n\n## Not captured whole\n\n{reasons(cases, results)}\n"
    print(text)
    defaults = results["weft default"]
    for case in cases:
        if defaults[case.id].status not in ("pass",):
            print(f"default: {case.id}: {defaults[case.id].status}: {defaults[case.id].detail}")
    if options.write:
        target = ROOT / "docs" / "coverage" / "constructs.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(
            "# Python constructs\n\nWritten by `python benchmarks/constructs.py --torch --write`. "
            "Every case is run twice; results, arguments, exceptions, text and warnings are "
            "compared with eager's.\n\n" + text
        )


if __name__ == "__main__":
    main()
