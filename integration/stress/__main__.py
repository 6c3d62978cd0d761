"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys

# Autograd starts threads for each GPU, and a process that has them cannot be forked.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from . import faults, kills, threads


def main() -> int:
    """Run one of the searches; the exit status says whether something went wrong."""
    parser = argparse.ArgumentParser("python -m integration.stress", description=__doc__)
    parser.add_argument("what", choices=("threads", "kills", "faults"))
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--faults", nargs="*", choices=[f.__name__ for f in faults.FAULTS])
    options = parser.parse_args()
    if options.what == "threads":
        failures, count = threads.run(options.threads, options.minutes)
    elif options.what == "kills":
        failures, count = kills.run(options.times)
    else:
        every, wanted = faults.FAULTS, options.faults
        chosen = {f: n for f, n in every.items() if not wanted or f.__name__ in wanted}
        failures, count = faults.run(chosen)
    print(*failures, sep="\n")
    print(f"{options.what}: {count} run, {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
