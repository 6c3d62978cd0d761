"""The first call in a new process: cold, with a warm cache, and with what was captured kept too.

Each figure is the wall time of the first call alone, in a process of its own; torch.compile stands
beside it with its warm cache. The median of a few rounds, which take all systems in turn.

    python benchmarks/precompiled.py --rounds 5
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import sys, time
import torch
import torch.nn.functional as F
from pathlib import Path
name, system = sys.argv[1:]
sys.path.insert(0, str(Path({examples!r})))
torch.manual_seed(0)

def ops(x, w, b):
    return F.layer_norm(F.gelu(x @ w + b), (64,)).sum(-1)

if name == "ops":
    function, args = ops, (torch.randn(64, 64), torch.randn(64, 64), torch.randn(64))
else:
    from train_gpt import GPT
    function, args = GPT(64, 64, 4, 2), (torch.randint(0, 64, (2, 32)),)
if system == "torch":
    compiled = torch.compile(function)
else:
    import weft
    weft.config.caching_precompile = system == "precompiled"
    compiled = weft.compile(function)
begin = time.perf_counter()
compiled(*args)
print(time.perf_counter() - begin)
"""


def first_call(name: str, system: str, caches: Path) -> float:
    """Return the seconds that the first call takes in a new process."""
    folder = caches / name
    folder.mkdir(exist_ok=True)
    script = folder / "program.py"
    script.write_text(PROGRAM.format(examples=str(Path(__file__).parent.parent / "examples")))
    environment = {
        **os.environ,
        "WEFT_CACHE_DIR": str(folder / ("weft" if system != "precompiled" else "precompiled")),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
    }
    command = [sys.executable, str(script), name, system]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-torch", action="store_true")
    chosen = parser.parse_args()
    systems = ["weft", "precompiled"] + ["torch"] * (not chosen.without_torch)
    print("| program | weft cold | weft warm | weft precompiled | torch.compile warm |")
    print("|---|---|---|---|---|")
    for name in ("ops", "gpt"):
        with tempfile.TemporaryDirectory() as folder:
            caches = Path(folder)
            cold = {system: first_call(name, system, caches) for system in systems}
            times: dict[str, list[float]] = {system: [] for system in systems}
            for _ in range(chosen.rounds):
                for system in systems:
                    times[system].append(first_call(name, system, caches))
        row = [statistics.median(times[system]) for system in systems]
        print("|", name, "|", " | ".join(f"{t:.2f} s" for t in (cold["weft"], *row)), "|")


if __name__ == "__main__":
    main()
