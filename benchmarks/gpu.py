"""weft on an NVIDIA GPU beside eager and torch.compile, in turn in one process.

    python benchmarks/gpu.py [--only NAME ...] [--modes default reduce-overhead max-autotune]
                             [--kinds inference training] [--no-patterns]

Models (gpu_models.py; bfloat16 autocast where a row names no dtype): a cell holds the figures of
eager, weft and torch.compile. Caches are as they are: for cold ones name empty folders in
WEFT_CACHE_DIR, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR. Patterns: what a kernel moves a second.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import weft
from gpu_models import ROWS, Row
from torch.nn import functional as F
from torch.utils.benchmark import Timer

# Figures of `measure`, by position, with their digits.
COLUMNS = ((1, 3), (0, 1), (2, 0))
SHAPE = (16384, 4096)
PATTERNS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "gelu": (F.gelu, [SHAPE]),
    "softmax": (lambda x: torch.softmax(x, -1), [SHAPE]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4096,), w, b), [SHAPE, (4096,), (4096,)]),
    "x + y.t": (lambda x, y: x + y.t(), [(8192, 8192), (8192, 8192)]),
    "sum of columns": (lambda x: x.sum(0), [SHAPE]),
    "sum of odd columns": (lambda x: x.sum(0), [(16383, 4099)]),
    "sum": (lambda x: x.sum(), [SHAPE]),
    "chain": (lambda x, y: (x * y).sin() + x.exp() * 2, [SHAPE, SHAPE]),
    "batch norm, relu": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True).relu(),
        [(64, 64, 112, 112), (64,), (64,)],
    ),
    "cat, relu": (lambda x, y: torch.cat([x, y], 1).relu(), [(16384, 2048), (16384, 2048)]),
}
COMPILERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda program: program,
    "weft": weft.compile,
    "torch": torch.compile,
}


def milliseconds(run: Callable[[], Any]) -> float:
    """The median time of a call among many, launches included."""
    return float(
        Timer("run()", globals={"run": run}).blocked_autorange(min_run_time=0.4).median * 1e3
    )


def measure(
    row: Row, compile_: Callable[[Any], Any], training: bool
) -> tuple[float, float, float, torch.Tensor]:
    """Seconds to the first result, milliseconds a call, peak MiB, and the result."""
    torch.manual_seed(0)
    model, inputs = row.make().cuda(), row.inputs()
    model = model if row.dtype is None else model.to(row.dtype)
    model = model if training else model.eval()
    compiled = compile_(model)

    def run() -> torch.Tensor:
        model.zero_grad()
        autocast = torch.autocast("cuda", torch.bfloat16, enabled=row.dtype is None)
        with torch.set_grad_enabled(training), autocast:
            result = compiled(*inputs)
        if training:
            result.backward()
        return result.detach()

    began = time.perf_counter()
    result = run().float()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    for _ in range(3):
        run()
    torch.cuda.reset_peak_memory_stats()
    used = milliseconds(run)
    return first, used, torch.cuda.max_memory_allocated() / 2**20, result


def models(only: list[str], modes: list[str], kinds: list[str]) -> None:
    """Print a row a model and mode: each cell eager / weft / torch.compile."""
    print("| model | mode | ms | first call, s | peak MiB | off |\n|---|---|---|---|---|---|")
    systems = {"eager": None, "weft": weft.compile, "torch": torch.compile}
    for name, kind in itertools.product(ROWS, kinds):
        row, known = ROWS[name], {}
        if (only and name not in only) or (kind == "training" and not row.trains):
            continue
        for mode in modes:
            cells = []
            for system, compile_ in systems.items():
                if system == "eager" and "eager" in known:
                    cells.append(known["eager"])
                    continue
                weft.reset()  # another model's sizes would make these dynamic
                torch.compiler.reset()
                gc.collect()
                torch.cuda.empty_cache()
                make = (lambda m: m) if compile_ is None else partial(compile_, mode=mode)
                try:
                    cells.append(measure(row, make, kind == "training"))
                except Exception as error:  # one system's failure hides no other's figure
                    print(f"{name} {kind} {mode} {system}: {type(error).__name__}: {error}"[:300])
                    cells.append((float("nan"),) * 3 + (torch.tensor(float("nan")),))
                known[system] = cells[-1]
            columns = [" / ".join(f"{cell[k]:.{p}f}" for cell in cells) for k, p in COLUMNS]
            off = float((cells[1][3] - cells[0][3]).abs().max())
            print(f"| {name} {kind} | {mode} | {' | '.join(columns)} | {off:.1e} |", flush=True)


def patterns(only: list[str]) -> None:
    """Print a row a pattern: GB/s by compiler (inputs read once, the result written once)."""
    source = torch.randn(SHAPE, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6
    print(f"\nGB/s (a copy: {copied:.0f})   " + "  ".join(f"{name:>6}" for name in COMPILERS))
    for name in [name for name in PATTERNS if not only or name in only]:
        function, shapes = PATTERNS[name]
        inputs = [torch.randn(shape, device="cuda") for shape in shapes]
        expected = function(*inputs)
        moved = sum(t.nbytes for t in (*inputs, expected))
        cells = []
        for compile_ in COMPILERS.values():
            compiled = compile_(function)
            torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-4, atol=1e-1)
            cells.append(moved / milliseconds(lambda run=compiled, xs=inputs: run(*xs)) / 1e6)
        print(f"{name:22} " + "  ".join(f"{cell:6.0f}" for cell in cells))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--modes", nargs="*", default=["default", "reduce-overhead"])
    parser.add_argument("--kinds", nargs="*", default=["inference", "training"])
    parser.add_argument("--no-patterns", action="store_true")
    options = parser.parse_args()
    models(options.only, options.modes, options.kinds)
    if not options.no_patterns:
        patterns(options.only)


if __name__ == "__main__":
    main()
