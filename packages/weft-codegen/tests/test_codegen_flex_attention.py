"""Kernels of flex_attention: in Triton's interpreter against all scores, and as machine code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

_COMMON = """
import sys
sys.path.insert(0, {here!r})
from flex_programs import CASES, check, cubins
"""


def _run(program: str, interpret: bool) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-c", (_COMMON + program).format(here=str(HERE))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_interpreted_kernels_equal_all_scores() -> None:
    printed = _run("for name in CASES: check(name); print(name)", interpret=True)
    assert len(printed.split("\n")) == 8


@pytest.mark.slow
def test_kernels_compile_to_cubin_without_a_gpu() -> None:
    printed = _run("print(*cubins())", interpret=False)
    assert printed.split() == ["attend", "attend_queries", "attend_keys"]
