"""Compare ways to run a PyTorch model on a CPU: eager, torch.compile, weft, ONNX Runtime, OpenVINO.

    python benchmarks/runtimes.py --only vit,llama --threads 1 --batches 1,8
    python benchmarks/runtimes.py --apart
    python benchmarks/runtimes.py --cpu-time --write    # docs/architecture/runtimes.md

A row is a model (runtime_models.py) and a batch: batch 1 is the latency of a single stream, a
larger one throughput. All systems take turns in every round, and the quickest round of each counts.
Without `--apart` they share one process, so their thread pools disturb each other where there is
more than one thread; on a busy machine, `--cpu-time` counts the processor's time, which is fair
with one thread. With `--apart` each has a process of its own, which also gives memory and the
time to the first result, cold and with what an earlier process left on disk (weft's and torch's
caches, the file that the other two were exported to).

onnxruntime, onnx, onnxscript and openvino are no dependencies of weft: what is not installed is
left out, and said. Every result is compared with eager's.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compare import ROOT, Worker, geometric_mean, steady, write_figures
from runtime_models import MODELS, make
from systems import serve
from torch import nn

PAGE = ROOT / "docs" / "architecture" / "runtimes.md"
BEGIN = "<!-- figures: made by `nox -s runtimes` -->"
Step = Callable[[], Any]
Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Setup:
    """What a system is asked to run, and where it may keep files."""

    model: nn.Module
    inputs: Inputs
    threads: int
    folder: Path

    def step(self, call: Callable[..., Any]) -> Step:
        """Return what calls a function with the inputs."""
        return lambda: call(*self.inputs)


def _eager(setup: Setup) -> Step:
    return setup.step(setup.model)


def _torch(setup: Setup) -> Step:
    return setup.step(torch.compile(setup.model))


def _weft(setup: Setup, **options: bool) -> Step:
    import weft  # noqa: PLC0415  its import is part of what is measured

    return setup.step(weft.compile(setup.model, options=options))


def _freezing(setup: Setup) -> Step:
    return _weft(setup, freezing=True)


def _exported(setup: Setup) -> Path:
    """The model as an ONNX file, exported once."""
    path = setup.folder / "model.onnx"
    if not path.exists():
        setup.folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(setup.model, setup.inputs, path, dynamo=True, verbose=False)
    return path


def _onnxruntime(setup: Setup) -> Step:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = setup.threads
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    session = runtime.InferenceSession(_exported(setup), options, providers=providers)
    arrays = [x.numpy() for x in setup.inputs]
    feeds = dict(zip([item.name for item in session.get_inputs()], arrays, strict=True))
    return lambda: session.run(None, feeds)


def _openvino(setup: Setup) -> Step:
    runtime = importlib.import_module("openvino")
    path = setup.folder / "model.xml"
    if not path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                converted = runtime.convert_model(setup.model, example_input=setup.inputs)
            except Exception:  # an operator that its own front end does not know
                converted = runtime.convert_model(_exported(setup))
            converted.reshape({k: list(x.shape) for k, x in enumerate(setup.inputs)})
            runtime.save_model(converted, path, compress_to_fp16=False)
    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": setup.threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = runtime.Core().compile_model(path, "CPU", config)
    request = compiled.create_infer_request()
    arrays = [x.numpy() for x in setup.inputs]
    return lambda: list(request.infer(arrays, share_inputs=True, share_outputs=True).values())


SYSTEMS: dict[str, Callable[[Setup], Step]] = {
    "eager": _eager,
    "torch.compile": _torch,
    "weft": _weft,
    "weft freezing": _freezing,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
NEEDED = {"onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino",)}


def installed(systems: Iterable[str]) -> list[str]:
    """Return the systems whose packages are there; say which are not."""
    found = []
    for system in systems:
        missing = [name for name in NEEDED.get(system, ()) if not _is_there(name)]
        if missing:
            print(f"{system} is left out: pip install {' '.join(missing)}", file=sys.stderr)
        else:
            found.append(system)
    return found


def _is_there(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


class Inline:
    """One system in this process, with the interface of compare.Worker."""

    def __init__(self, system: str, setup: Setup, clock: Callable[[], float]) -> None:
        self.step, self.clock = SYSTEMS[system](setup), clock

    def seconds(self, calls: int) -> float:
        """Return the time that so many calls take."""
        start = self.clock()
        for _ in range(calls):
            self.step()
        return self.clock() - start


def difference(step: Step, setup: Setup) -> float:
    """Return the largest difference from eager, relative to eager's largest element."""
    worst = 0.0
    for got, want in zip(_listed(step()), _listed(_eager(setup)()), strict=True):
        scale = want.abs().max().clamp(min=1e-6)
        worst = max(worst, ((torch.as_tensor(got) - want).abs().max() / scale).item())
    return worst


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


@dataclass
class Row:
    """One model and batch: eager's seconds a call, and figures by system."""

    name: str
    batch: int
    call: float
    speed: dict[str, float]
    difference: dict[str, float]
    cold: dict[str, float]
    warm: dict[str, float]
    memory: dict[str, float]


def inline(name: str, batch: int, systems: list[str], options: argparse.Namespace) -> Row:
    """Measure all systems in this process."""
    model, inputs = make(name, options.layers, batch)
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(model, inputs, options.threads, Path(folder))
        clock = time.process_time if options.cpu_time else time.perf_counter
        workers = {system: Inline(system, setup, clock) for system in systems}
        far = {system: difference(worker.step, setup) for system, worker in workers.items()}
        for worker in workers.values():
            worker.seconds(8)  # weft's graphs prove themselves in their first calls
        speed, call = steady(workers, options.rounds)
    return Row(name, batch, call, speed, far, {}, {}, {})


def apart(name: str, batch: int, systems: list[str], options: argparse.Namespace) -> Row:
    """Measure each system in a process of its own."""
    row = Row(name, batch, 0.0, {}, {}, {}, {}, {})
    with tempfile.TemporaryDirectory() as folder:
        workers: dict[str, Worker] = {}
        try:
            for figures in (row.cold, row.warm):
                for worker in workers.values():
                    worker.close()
                for system in systems:
                    told = (name, str(options.layers), str(batch), str(options.threads), folder)
                    words = [__file__, "--worker", system, *told]
                    workers[system] = Worker(words, Path(folder))
                    figures[system] = workers[system].first
            row.speed, row.call = steady(workers, options.rounds)
            for system, worker in workers.items():
                told = worker.ask("peak")
                row.memory[system], row.difference[system] = told["bytes"], told["difference"]
        finally:
            for worker in workers.values():
                worker.close()
    return row


def work(system: str, name: str, layers: str, batch: str, threads: str, folder: str) -> None:
    """Be the process of one system (see systems.serve).

    Memory is what the process grew by since the model and its inputs were there, and the model,
    where the system reads its weights.
    """
    torch.set_num_threads(int(threads))
    model, inputs = make(name, int(layers), int(batch))
    setup = Setup(model, inputs, int(threads), Path(folder) / system)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = _resident("VmRSS")
    weights = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    start = time.perf_counter()
    step = SYSTEMS[system](setup)
    step()
    first = time.perf_counter() - start

    def peak() -> dict[str, float]:
        grown = _resident("VmHWM") - before
        used = grown if system in NEEDED else grown + weights
        return {"bytes": used, "difference": difference(step, setup)}

    serve(step, first, peak)


def _resident(name: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def table(rows: list[Row], systems: list[str], threads: int, how: str) -> str:
    """Return the figures as Markdown."""
    heads = ["model", "batch", "eager", *systems[1:], "weft / best other"]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    ratios = []
    for row in rows:
        ratios.append(ratio := _against_others(row.speed))
        cells = [f"{row.call * 1e3:.3g} ms", *(f"{row.speed[s]:.2f}x" for s in systems[1:])]
        lines.append(f"| {row.name} | {row.batch} | {' | '.join(cells)} | {ratio:.2f} |")
    mean = [f"{geometric_mean([row.speed[s] for row in rows]):.2f}x" for s in systems[1:]]
    lines.append(f"| **mean** | | | {' | '.join(mean)} | {geometric_mean(ratios):.2f} |")
    for title, figures, unit in (
        ("first result, cold", "cold", 1), ("first result, warm", "warm", 1), ("MB", "memory", 1e6)
    ):  # fmt: skip
        if getattr(rows[0], figures):
            lines += ["", f"| {title} | batch | " + " | ".join(systems) + " |"]
            lines.append("|---" + "|--:" * (len(systems) + 1) + "|")
            for row in rows:
                values = [f"{getattr(row, figures)[s] / unit:.2f}" for s in systems]
                lines.append(f"| {row.name} | {row.batch} | " + " | ".join(values) + " |")
    far = {f"{r.name} {s}": d for r in rows for s, d in r.difference.items() if not d < 1e-3}
    versions = {name: sys.modules[name].__version__ for name in NEEDED if name in sys.modules}
    note = f"Speed over eager's, {how}, {threads} threads of {_cpu()}; torch {torch.__version__}, "
    note += ", ".join(f"{name} {version.split('-')[0]}" for name, version in versions.items())
    note += f"; {datetime.date.today()}. Further than 0.001 from eager: {far or 'none'}."
    lines += ["", note]
    return "\n".join(lines)


def _against_others(speed: dict[str, float]) -> float:
    """The faster of weft's two over the fastest of the others."""
    own = max((s for name, s in speed.items() if name.startswith("weft")), default=1.0)
    return own / max(s for name, s in speed.items() if not name.startswith("weft"))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "a CPU")
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="eager has to be among them")
    parser.add_argument("--batches", default="1", help="sizes of batches: --batches 1,8")
    parser.add_argument("--layers", type=int, default=2, help="layers of each model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="of this process, not of the clock")
    parser.add_argument("--apart", action="store_true", help="a process a system")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--write", action="store_true", help=f"replace the table in {PAGE.name}")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for, and print the table."""
    options = arguments()
    torch.set_grad_enabled(False)
    if options.worker:
        work(*options.worker)
        return 0
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    systems = installed(options.systems.split(","))
    measure = apart if options.apart else inline
    rows = []
    for name in options.only.split(","):
        for batch in map(int, options.batches.split(",")):
            rows.append(measure(name, batch, systems, options))
            print(json.dumps(vars(rows[-1])), file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(json.dumps([vars(row) for row in rows], indent=1))
    how = "apart" if options.apart else "in one process"
    text = table(rows, systems, options.threads, how + ", processor time" * options.cpu_time)
    print(text)
    if options.write:
        write_figures(text, PAGE, BEGIN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
