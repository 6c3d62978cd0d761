"""What a failing backend turns into."""

import gc
import logging
from pathlib import Path

import pytest
import torch
import weft
from torch import fx
from weft import failures
from weft_core.errors import BackendCompilerError, CompilerNotFound


@pytest.fixture
def graph():
    gm = fx.symbolic_trace(lambda x: x + 1)
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = (
            '  File "user.py", line 7, in step\n    return x + 1\n'
            f'  File "{torch.nn.functional.__file__}", line 1, in linear\n'
        )
    gm.graph.find_nodes(op="placeholder")[0].meta["example_value"] = torch.ones(2, 3)
    return gm


def fail_with(error):
    def compile_graph():
        raise error

    return compile_graph


def test_a_working_backend_is_left_alone(graph):
    assert failures.compile_or_fallback(lambda: len, graph) is len


def test_the_error_names_stage_line_and_repro(graph):
    with pytest.raises(BackendCompilerError, match="ValueError: broken") as caught:
        failures.compile_or_fallback(fail_with(ValueError("broken")), graph)
    assert caught.value.user_line == "user.py:7"
    path = str(caught.value).split("reproduces the failure: ")[1].split(" (`")[0]
    source = Path(path).read_text()
    compile(source, path, "exec")
    made = "torch.empty_strided((2, 3), (3, 1), dtype=torch.float32).uniform_()"
    assert f"{made},  # x" in source
    assert "weft.compile(module)(*inputs)" in source
    graph.graph.find_nodes(op="placeholder")[0].meta["example_value"].requires_grad_()
    with pytest.raises(BackendCompilerError) as caught:
        failures.compile_or_fallback(fail_with(ValueError("broken")), graph)
    path = str(caught.value).split("reproduces the failure: ")[1].split(" (`")[0]
    assert f"{made}.requires_grad_(),  # x" in Path(path).read_text()


def test_a_stage_that_knows_more_is_believed(graph):
    known = BackendCompilerError("codegen.lower", "no rule", op="aten.foo", user_line="other.py:1")
    with pytest.raises(BackendCompilerError) as caught:
        failures.compile_or_fallback(fail_with(known), graph)
    error = caught.value
    assert (error.stage, error.op, error.user_line) == ("codegen.lower", "aten.foo", "other.py:1")


@pytest.mark.filterwarnings("ignore")
def test_eager_instead_with_one_warning(graph, caplog):
    with weft.config.patch(on_compile_error="eager"), caplog.at_level(logging.WARNING, "weft"):
        for _ in range(2):
            run = failures.compile_or_fallback(fail_with(ValueError("broken")), graph)
            assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert len(caplog.records) == 1


@pytest.mark.filterwarnings("ignore")
def test_no_compiler_is_always_eager(graph, caplog):
    run = failures.compile_or_fallback(fail_with(CompilerNotFound(["cc"])), graph)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert "apt install gcc" in caplog.text


def test_describe_counts_calls(graph):
    assert failures.describe(graph) == "a graph of 1 calls from user.py:7"


def without_a_compiler(function, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    return weft.compile(function)


def with_a_backend_that_fails(function, monkeypatch):
    def fails(gm, inputs):
        raise ZeroDivisionError("broken backend")

    monkeypatch.setattr(weft.settings.umbrella, "on_compile_error", "eager")
    return weft.compile(function, backend=fails)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [without_a_compiler, with_a_backend_that_fails])
@pytest.mark.parametrize("kept", [True, False])
def test_the_report_says_what_stderr_says(make, kept, monkeypatch, caplog):
    weft.reset()
    compiled = make(lambda x: x.sin() * 2 + 1, monkeypatch)
    with caplog.at_level("WARNING", "weft"):
        compiled(torch.ones(3))
    if not kept:
        del compiled
        gc.collect()
    report = weft.report()
    (said,) = caplog.messages
    assert "1 frames partly or wholly eager" in str(report)
    assert said.splitlines()[0] in str(report) and report.lost[0].name.endswith("<lambda>")


@pytest.mark.filterwarnings("ignore")
def test_the_report_tells_of_functions_that_are_gone():
    weft.reset()

    def function(x):
        return x.cos() + 1

    for size in (3, 4):
        weft.compile(function)(torch.ones(size))
    gc.collect()
    (frame,) = weft.report().frames
    assert frame.graphs == 2 and "function" in frame.name
    weft.reset()
    assert weft.report().frames == ()
