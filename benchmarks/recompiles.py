"""How many graphs programs take whose values differ from call to call, and torch.compile's number.

python benchmarks/recompiles.py              weft
python benchmarks/recompiles.py --torch      also torch.compile, in a process of its own
python benchmarks/recompiles.py -k numpy     only programs whose name contains this
python benchmarks/recompiles.py --varying -k str/argument   a table of values and uses
"""

import argparse
import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "integration"))

from recompiles import PROGRAMS, varying  # noqa: E402

CALLS = 12


def counted(compiler: Callable[..., Any], name: str) -> int:
    """Return how many graphs a program takes with a compiler."""
    graphs = []

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    with contextlib.redirect_stdout(io.StringIO()):
        PROGRAMS[name][0](partial(compiler, backend=backend), CALLS)
    return len(graphs)


def by_weft(names: list[str]) -> dict[str, str]:
    """Count weft's graphs; a star where a piece of the program ran eagerly in the end."""
    import weft  # noqa: PLC0415 - not in the process of torch.compile

    found = {}
    for name in names:
        weft.reset()
        try:
            count = counted(weft.compile, name)
            limited = weft.counters["guards"]["recompile_limit"]
            found[name] = f"{count}{'*' if limited else ''}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:60]
    return found


def by_torch(names: list[str]) -> dict[str, str]:
    """Count torch.compile's graphs."""
    found = {}
    for name in names:
        torch._dynamo.reset()
        try:
            count = counted(torch.compile, name)
            limited = bool(torch._dynamo.utils.counters["unimplemented"])
            found[name] = f"{count}{'*' if limited else ''}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:60]
    return found


def main() -> None:
    """Print a row a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--only-torch", action="store_true")
    parser.add_argument("-k", default="")
    parser.add_argument("--varying", action="store_true")
    given = parser.parse_args()
    if given.varying:
        PROGRAMS.clear()
        for program in varying.programs():
            PROGRAMS["/".join(program)] = (partial(varying.run, *program), varying.MOST)
    names = [name for name in PROGRAMS if given.k in name]
    logging.disable(logging.ERROR)
    if given.only_torch:
        print(json.dumps(by_torch(names)))
        return
    rows = {"weft": by_weft(names)}
    if given.torch:
        command = [sys.executable, __file__, "--only-torch", "-k", given.k]
        command += ["--varying"] * given.varying
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        rows["torch"] = json.loads(output.splitlines()[-1])
    print(f"{'program':<44}{''.join(f'{one:>10}' for one in rows)}{'at most':>10}")
    for name in names:
        cells = "".join(f"{row[name]:>10}" for row in rows.values())
        print(f"{name:<44}{cells}{PROGRAMS[name][1]:>10}")


if __name__ == "__main__":
    main()
