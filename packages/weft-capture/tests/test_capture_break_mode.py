"""`error_on_graph_break`: breaks are errors, or not, in a block or a function."""

import importlib

import pytest
import torch
import weft_capture
from capture_check import X, eager_backend
from weft_capture import error_on_graph_break, graph_break
from weft_core.errors import Unsupported


def breaks_twice(x):
    y = x + 1
    with error_on_graph_break(False):
        y = y * 2
        graph_break()
        y = y.sin()
        graph_break()
        y = y + 3
    return y * 2


def breaks_behind(x):
    with error_on_graph_break(False):
        graph_break()
        y = x + 1
    graph_break()
    return y


@error_on_graph_break(True)
def strict(x):
    graph_break()
    return x + 1


def calls_strict(x):
    graph_break()
    return strict(x * 2)


def nested(x):
    with error_on_graph_break(True), error_on_graph_break(False):
        graph_break()
        return x + 1


@pytest.mark.parametrize("function", [breaks_twice, nested])
def test_breaks_are_allowed_in_a_block(function):
    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(optimised(X), function(X))


@pytest.mark.parametrize(("function", "fullgraph"), [(breaks_behind, True), (calls_strict, False)])
def test_breaks_are_errors_outside_or_inside_of_a_block(function, fullgraph):
    optimised = weft_capture.capture(function, eager_backend, fullgraph=fullgraph)
    for _ in range(2):
        with pytest.raises(Unsupported, match="graph-break"):
            optimised(X)
    plain = weft_capture.capture(function, eager_backend)
    if function is breaks_behind:  # no block is left over from the error
        assert torch.equal(plain(X), X + 1)


def test_a_block_around_a_compiled_function():
    optimised = weft_capture.capture(lambda x: graph_break() or x + 1, eager_backend)
    with error_on_graph_break(True), pytest.raises(Unsupported):
        optimised(X)
    assert torch.equal(optimised(X), X + 1)


def test_blocks_of_torchs_own_compiler_have_no_effect():
    theirs = importlib.import_module("torch._dynamo").decorators

    def blocks(x):
        with theirs.dont_skip_tracing(), theirs.error_on_graph_break(False):
            y = x + 1
        with theirs.patch_dynamo_config(recompile_limit=3):
            return y * 2

    optimised = weft_capture.capture(blocks, eager_backend, fullgraph=True)
    assert torch.equal(optimised(X), (X + 1) * 2)
