"""A fixed sample of every registered generator, and what the harness itself promises."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration.fuzz import REGISTRY, Program, generator
from integration.fuzz.alone import write
from integration.fuzz.hunt import hunt
from integration.fuzz.minimise import minimise, split
from integration.fuzz.pool import Worker
from integration.fuzz.roundings import Roundings
from integration.fuzz.runner import run

ROOT = Path(__file__).parent.parent
SAMPLE = 4  # programs of each generator
KNOWN: dict[str, set[int]] = {}  # fail, to be mended


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
def test_sample_of_each_generator(name):
    seeds = set(range(SAMPLE)) - KNOWN.get(name, set())
    assert hunt(name, sorted(seeds), say=lambda text: None).failures == []


@pytest.mark.parametrize("name", REGISTRY)
def test_a_seed_makes_the_same_program_each_time(name):
    make = generator(name)
    assert [make(seed) for seed in range(3)] == [make(seed) for seed in range(3)]


WRONG = Program(
    source=(
        "def f(x, y):\n"
        "    z = x * 2\n"
        "    z = z + y\n"
        "    if isinstance(f.__globals__['wrong'], list):\n"
        "        return z, z * 0\n"
        "    return z, z\n"
    ),
    calls=(
        "wrong = [1]\n(tensor((3,)), tensor((3,), seed=1))",
        "(tensor((2,)), tensor((2,), seed=1))",
    ),
    order=1,
)


def test_minimise_drops_what_is_not_needed():
    def fails(program):
        return "z * 0" in program.source and "wrong = [1]" in program.calls[0]

    smaller = minimise(WRONG, fails)
    assert len(smaller.calls) == 1 and smaller.order == 0
    assert "y" not in smaller.source and "z + y" not in smaller.source


def test_a_function_is_split_into_its_programs():
    program = Program(
        "def f(a, b):\n"
        "    v1 = a + 1\n"
        "    v2 = b * 2\n"
        "    v1.add_(3)\n"
        "    v3 = v2 + a\n"
        "    return v1, v3, torch.stack([v1.sum(), v3.sum()]),\n",
        ("(tensor((3,)), tensor((3,), seed=1))",),
    )
    bodies = [part.source.splitlines()[1:] for part in split(program)]
    assert bodies == [
        ["    v1 = a + 1", "    v1.add_(3)", "    return (v1,)"],
        ["    v2 = b * 2", "    v3 = v2 + a", "    return (v3,)"],
    ]


def test_a_graph_that_raises_alone_is_seen():
    """Its frame runs in eager instead, with the right result."""
    source = "import weft\ndef f(x, i):\n    return x.take(i + 9 * weft.is_compiling())\n"
    calls = ("(tensor((3,)), indices((2,), 3))",)
    assert run(Program(source, calls)).kind == "run again"
    assert run(Program(source.replace("9", "0"), calls)).kind == "pass"
    assert run(Program(source.replace("i + 9", "i + 9 + 9"), calls)).kind == "pass"  # both raise


def test_a_hang_and_a_crash_are_results():
    worker = Worker(timeout=120)
    good = Program("def f(): return 1\n", ("()",))
    try:
        assert worker.program(good).kind == "pass"
        both = Program("import os\ndef f(): return 1\n", ("os.abort()\n()",))
        assert worker.program(both).kind == "eager fails"
        crash = Program(
            "import os\nimport weft\ndef f():\n    weft.is_compiling() and os.abort()\n", ("()",)
        )
        assert worker.program(crash).kind == "crash"
        hang = crash.source.replace("os.abort()", "time.sleep(60)").replace("os\n", "time\n")
        assert worker.program(good).kind == "pass"  # starts a process, which takes its time
        worker.timeout = 8
        assert worker.program(Program(hang, ("()",))).kind == "hang"
    finally:
        worker.close()


def test_what_differs_is_seen():
    """Values, dtypes, strides, aliases, writes, gradients and exceptions each have a verdict."""
    seen = "import torch.compiler\nimport weft\n" + "def f(x):\n    return g(x)\n"
    other = "def g(x):\n    if weft.is_compiling():\n        {}\n    return x * 2\n"
    for line, kind in [
        ("return x * 3", "values"),
        ("return (x * 2).double()", "type"),
        ("return (x.t().contiguous() * 2).t()", "strides"),
        ("return x.mul_(2)", "mutation"),
        ("raise KeyError(1)", "exception None -> KeyError"),
        ("return x * 2, x", "result"),
    ]:
        program = Program(seen + other.format(line), ("(tensor((3, 4)),)",))
        assert run(program, "eager").kind == kind, line


def test_roundings_show_where_terms_overflow():
    """A product alone, which eager adds up at once, or the first terms of a product of matrices."""
    huge, found = torch.tensor([[3e38, -3e38, 3e38]]), set()
    for seed in range(8):
        with Roundings(seed):
            assert torch.full((3,), -3e38).addcmul_(huge[0], torch.tensor(2.0))[0].isinf()
            found.add(bool((huge @ torch.ones(3, 1)).isfinite()))
            assert int(torch.ones(1, 2).long() @ torch.ones(2).long()) == 2
            close = torch.addmm(torch.ones(1, 1), huge / 3e38, torch.ones(3, 1), alpha=0.5)
            torch.testing.assert_close(close, torch.full((1, 1), 1.5))
    assert found == {True, False}


def test_the_file_of_a_failure_runs_alone(tmp_path):
    program = Program("def f(x):\n    '''a\\n'''\n    return x.sin()\n", ("(tensor((3, 4)),)",), 0)
    path = tmp_path / "alone.py"
    write(path, program, run(program, "eager"), "eager", "test")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "as eager"), done.stderr
    assert str(ROOT) not in path.read_text()
