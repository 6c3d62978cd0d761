"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from . import REGISTRY, generator
from .hunt import hunt
from .pool import SANITIZERS

say = partial(print, flush=True)


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last or int(first) + 1))


def main() -> int:
    """Run programs; the exit status says whether one failed."""
    parser = argparse.ArgumentParser("python -m integration.fuzz", description=__doc__)
    parser.add_argument("--generator", default="all", help=f"all, or of {', '.join(REGISTRY)}")
    parser.add_argument("--seeds", type=_seeds, default=range(1_000_000), help="first:end")
    parser.add_argument("--minutes", type=float, default=1e9, help="in all, over the generators")
    parser.add_argument("--backend", default="codegen", help="codegen, aot_eager or eager")
    parser.add_argument("--device", default="cpu", help="where the tensors are: cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--sanitizer", choices=SANITIZERS, default="", help="of generated code")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--reduce", type=float, default=90.0, help="seconds to reduce a failure")
    parser.add_argument("--show", type=int, help="print the program of a seed and run nothing")
    options = parser.parse_args()
    names = list(REGISTRY) if options.generator == "all" else options.generator.split(",")
    if options.show is not None:
        for name in names:
            program = generator(name)(options.show)
            say(program.source, *program.calls, f"{program.order=} {program.dynamic=}", sep="\n")
        return 0
    failed = 0
    for name in names:
        tally = hunt(
            name,
            options.seeds,
            backend=options.backend,
            sanitizer=options.sanitizer,
            device=options.device,
            jobs=options.jobs,
            minutes=options.minutes / len(names),
            folder=options.out,
            reduce_seconds=options.reduce,
            say=say,
        )
        failed += len(tally.failures)
        say(f"{name} ({options.backend}): {tally}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
