"""Compare weft, torch.compile and eager, in turn, in one run.

For each model and mode (inference, training) three processes are started: one a system. With fresh
cache folders their first call is the cold compile; a second pair of processes shows what a warm
cache gives. Then all three are timed in rounds, one after the other in each round, and the
quickest round of each counts: where another process takes a core, calls on two threads wait for
each other, and those of eager are the most. At the end each says how much memory one call takes.
Last, bandwidth.py shows what memory-bound kernels move beside a plain copy.

    python benchmarks/compare.py --only gpt,tiny_mlp --modes training --quick
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from systems import CASES, MODES, modes_of

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: made by `nox -s bench` -->", "<!-- end of figures -->"
ROUND_SECONDS = 0.15


class Worker:
    """One system in one process, which runs a script that ends in systems.serve."""

    def __init__(self, words: list[str], caches: Path) -> None:
        environment = {
            **os.environ,
            "WEFT_CACHE_DIR": str(caches / "weft"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch"),
            "HF_HUB_OFFLINE": "1",
        }
        # As packages that pip has installed are: compiled to bytecode once.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.first = self._answer()["first"]

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.process.stderr.read()[-2000:])
        return json.loads(line)

    def ask(self, line: str) -> dict[str, float]:
        """Return the answer to a line (see systems.serve)."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._answer()

    def seconds(self, calls: int) -> float:
        """Return the time that so many calls take."""
        return self.ask(f"calls {calls}")["seconds"]

    def peak(self) -> int:
        """Return the most bytes that one call has in use above what lived before it."""
        return int(self.ask("peak")["bytes"])

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=60)


@dataclass
class Row:
    """The figures of one model in one mode.

    Seconds, ratios to eager (above 1 is faster), and the bytes that one call needs at most.
    """

    name: str
    mode: str
    cold_weft: float
    cold_torch: float
    warm_weft: float
    warm_torch: float
    eager_call: float
    speed_weft: float
    speed_torch: float
    peak_eager: int
    peak_weft: int
    peak_torch: int


def measure(name: str, mode: str, rounds: int) -> Row:
    """Measure one model in one mode."""
    script = str(Path(__file__).parent / "systems.py")
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder)
        workers: dict[str, Worker] = {}
        try:
            cold = {}
            for system in ("eager", "weft", "torch"):
                workers[system] = Worker([script, name, mode, system], caches)
                cold[system] = workers[system].first
            speeds, call = steady(workers, rounds)
            peaks = {system: worker.peak() for system, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.close()
        warm = {}
        for system in ("weft", "torch"):
            again = Worker([script, name, mode, system], caches)
            warm[system] = again.first
            again.close()
    return Row(
        name, mode, cold["weft"], cold["torch"], warm["weft"], warm["torch"], call,
        speeds["weft"], speeds["torch"], peaks["eager"], peaks["weft"], peaks["torch"],
    )  # fmt: skip


def steady(workers: dict[str, Worker], rounds: int) -> tuple[dict[str, float], float]:
    """Time all in turn; returns eager's time over each one's, and eager's seconds a call."""
    for worker in workers.values():
        worker.seconds(3)
    call = min(workers["eager"].seconds(3) for _ in range(5)) / 3
    calls = max(1, math.ceil(ROUND_SECONDS / max(call, 1e-7)))
    least = dict.fromkeys(workers, math.inf)
    order = list(workers)
    for _ in range(rounds):
        order.append(order.pop(0))
        for system in order:
            least[system] = min(least[system], workers[system].seconds(calls))
    return {system: least["eager"] / least[system] for system in workers}, least["eager"] / calls


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def import_seconds() -> float:
    """Return what `import weft` takes after `import torch`, the median of five processes."""
    code = (
        "import torch, time; t = time.perf_counter(); import weft; print(time.perf_counter() - t)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            for _ in range(5)]  # fmt: skip
    return statistics.median(float(run.stdout) for run in runs)


def means(rows: list[Row]) -> dict[str, float]:
    """Return the geometric mean of every figure."""
    figures = [name for name in Row.__annotations__ if name not in ("name", "mode")]
    # A call that takes no memory counts as a byte.
    return {key: geometric_mean([getattr(row, key) or 1 for row in rows]) for key in figures}


def table(rows: list[Row], imported: float) -> str:
    """Return the figures as Markdown: a line a model, the means, and what was measured."""
    modes = list(dict.fromkeys(row.mode for row in rows))
    heads = ["model"]
    for mode in modes:
        heads += [f"{mode}: cold compile", "torch's", "speed", "torch's"]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, {})[row.mode] = row
    for name, found in by_name.items():
        lines.append(f"| {name} |" + "".join(_cells(found.get(mode)) for mode in modes))
    averages = [Row("", mode, **means([r for r in rows if r.mode == mode])) for mode in modes]
    lines.append("| **geometric mean** |" + "".join(_cells(row, bold=True) for row in averages))
    return "\n".join([*lines, "", _footnote(rows, averages, imported)])


def _cells(row: Row | None, bold: bool = False) -> str:
    if row is None:
        return " | | | |"
    mark = "**" if bold else ""
    return (
        f" {mark}{row.cold_weft:.1f} s{mark} | {row.cold_torch:.1f} s "
        f"| {mark}{row.speed_weft:.2f}x{mark} | {row.speed_torch:.2f}x |"
    )


def memory_table(rows: list[Row]) -> str:
    """Return the peaks of training steps as Markdown, in MB, and how many exceed torch.compile's.

    The gradients are among what a step holds, parameters and inputs are not. A kB more is no more:
    it is what a program keeps between calls.
    """
    lines = ["| training step | eager | weft | torch.compile |", "|---|--:|--:|--:|"]
    training = [row for row in rows if row.mode == "training"]
    for row in training:
        peaks = (row.peak_eager, row.peak_weft, row.peak_torch)
        lines.append(f"| {row.name} | " + " | ".join(f"{b / 1e6:.2f} MB" for b in peaks) + " |")
    above = [row.name for row in training if row.peak_weft > row.peak_torch + 1000]
    return "\n".join([*lines, "", f"weft above torch.compile: {', '.join(above) or 'none'}."])


def _footnote(rows: list[Row], averages: list[Row], imported: float) -> str:
    shorter = geometric_mean([row.cold_torch / row.cold_weft for row in rows])
    warm = "; ".join(
        f"{row.mode} {row.warm_weft:.2f} s against {row.warm_torch:.2f} s" for row in averages
    )
    machine = (
        f"{torch.get_num_threads()} CPU threads ({torch.backends.cpu.get_cpu_capability()}), "
        f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    text = (
        f"Cold compile: seconds of the first call in a new process with empty caches, of weft and "
        f"of torch.compile; weft's is {shorter:.0f} times shorter in the geometric mean. With warm "
        f"caches: {warm}. Speed: of later calls, as a multiple of eager's (above 1 is faster), "
        f"each timed in turn with eager. {machine}. `import weft` takes {imported * 1e3:.0f} ms "
        f"after torch."
    )
    return textwrap.fill(text, 100)


def write_figures(text: str, page: Path = README, begin: str = BEGIN) -> None:
    """Put the table between the markers of a page."""
    before, rest = page.read_text().split(begin)
    after = rest.split(END)[1]
    page.write_text(f"{before}{begin}\n{text}\n{END}{after}")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="models, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES), help="inference,training")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a first look")
    parser.add_argument("--write-readme", action="store_true", help="replace the README's table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; print and keep the figures."""
    options = arguments()
    names = options.only.split(",") if options.only else list(CASES)
    modes = options.modes.split(",")
    work = [(name, mode) for mode in modes for name in names if mode in modes_of(name)]
    rows: list[Row] = []
    failed = []
    started = time.perf_counter()
    for number, (name, mode) in enumerate(work, 1):
        passed = time.perf_counter() - started
        print(f"[{number}/{len(work)}] {name} {mode} ({passed:.0f} s)", file=sys.stderr, flush=True)
        try:
            rows.append(measure(name, mode, rounds=5 if options.quick else 15))
            print(f"    {asdict(rows[-1])}", file=sys.stderr, flush=True)
        except RuntimeError as error:
            failed.append(f"{name} {mode}")
            print(f"    failed: {error}", file=sys.stderr, flush=True)
    if rows:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "latest.json").write_text(
            json.dumps([asdict(row) for row in rows], indent=1)
        )
        text = table(rows, import_seconds())
        print(text, memory_table(rows), sep="\n\n", flush=True)
        subprocess.run([sys.executable, str(Path(__file__).parent / "bandwidth.py")], check=True)
        if options.write_readme:
            write_figures(text)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
