"""Families of rules that do not fit the torch that is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib
import torch
import weft_capture

real = importlib.import_module


def load(name):
    if name == "weft_capture.{family}":
        raise AttributeError("torch has no such thing")
    return real(name)


importlib.import_module = load
graphs = []


def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward


f = weft_capture.capture(lambda x: torch.relu(x) + 1, backend)
x = torch.randn(3)
for _ in range(2):
    assert torch.equal(f(x), torch.relu(x) + 1)
assert len(graphs) == 1
"""


FAMILIES = ("functions.torch.gradients", "libraries.attention", "libraries.triton")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_fails_to_load_is_told_and_left_out(family):
    program = [sys.executable, "-c", PROGRAM.format(family=family)]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (told,) = [line for line in ended.stderr.splitlines() if "switched off" in line]
    assert family in told
