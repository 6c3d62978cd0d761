"""`WEFT_TRACE`: a profile of a program without changing it."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """\
import sys
import torch, weft

@weft.compile
def layer(x):
    return torch.nn.functional.gelu(x).softmax(-1)

print("weft.program_trace" in sys.modules)
layer(torch.randn(8, 16))
layer(torch.randn(8, 16))
print("weft.program_trace" in sys.modules)
"""


def run(tmp_path, **environment):
    script = tmp_path / "traced.py"
    script.write_text(PROGRAM)
    # What is in the cache on disk is not compiled again.
    given = {**os.environ, "WEFT_CACHE_DIR": str(tmp_path / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, str(script)], env=given, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.cc
def test_a_trace_has_the_stages_and_the_compiled_kernels(tmp_path):
    path = tmp_path / "trace.json"
    assert run(tmp_path, WEFT_TRACE=str(path)) == ["True", "True"]
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    assert any(name.startswith("weft capture layer") for name in names)
    assert any(name.startswith("weft codegen") for name in names)
    kernels = [name for name in names if "kernel" in name and "traced.py" in name]
    assert kernels, sorted(names)


@pytest.mark.slow
@pytest.mark.cc
def test_nothing_is_loaded_without_the_variable(tmp_path):
    assert run(tmp_path) == ["False", "False"]
