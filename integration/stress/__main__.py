"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import sys

from . import faults, kills, threads


def main() -> int:
    """Run one of the searches; the exit status says whether something went wrong."""
    parser = argparse.ArgumentParser("python -m integration.stress", description=__doc__)
    parser.add_argument("what", choices=("threads", "kills", "faults"))
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--times", type=int, default=1000)
    options = parser.parse_args()
    if options.what == "threads":
        failures, count = threads.run(options.threads, options.minutes)
    elif options.what == "kills":
        failures, count = kills.run(options.times)
    else:
        failures, count = faults.run()
    print(*failures, sep="\n")
    print(f"{options.what}: {count} run, {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
