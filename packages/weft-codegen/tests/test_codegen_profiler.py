"""Compiled graphs under torch.profiler: an event for the graph and for each step."""

import threading

import pytest
import torch
import torch.nn.functional as F
from codegen_check import trace
from torch.profiler import ProfilerActivity, profile
from weft_codegen import compile_graph
from weft_codegen.kernels import CompiledGraph
from weft_core import recording

X, W = torch.randn(200, 256), torch.randn(256, 256)  # too large for a loop


def block(x, w):
    h = F.gelu(x @ w)
    return h.softmax(-1)


def compiled(function=block, *inputs):
    graph = trace(function, inputs or (X, W))
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = f'  File "/home/me/model.py", line 7, in f\n    {node.name}\n'
    return compile_graph(graph, inputs or (X, W), inference=True)


def events_of(run, *args):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        result = run(*args)
    return [event.name for event in seen.events()], result


def test_every_step_is_an_event_with_its_line(monkeypatch):
    monkeypatch.setenv("WEFT_MEASURE", "0")
    run = compiled()
    names, (result,) = events_of(run, X, W)
    torch.testing.assert_close(result, block(X, W))
    ours = [name for name in names if "model.py:7" in name]
    assert sum(name.startswith("weft graph") for name in ours) == 1
    assert any(name.startswith("aten.mm.default model.py:7") for name in ours)
    assert any(name.startswith("kernel0 model.py:7") for name in ours)
    assert ours[0].startswith("weft graph")  # it begins before its steps


def test_a_graph_from_the_disk_cache_has_the_lines_of_this_program():
    compiled()
    graph = trace(block, (X, W))
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = '  File "/home/me/other.py", line 9, in f\n    other\n'
    names, _ = events_of(compile_graph(graph, (X, W), inference=True), X, W)
    assert any("other.py:9" in name for name in names)
    assert not any("model.py" in name for name in names)


def test_nothing_is_told_without_a_profiler(monkeypatch):
    run = compiled()
    program = getattr(run, "_program", None) or run._compiled._program
    told = []
    program.listener = lambda step, state: told.append(step)
    run(X, W)
    assert told == [] and not program.always
    events_of(run, X, W)
    assert told[0] == -2 and told[-1] == -1 and sorted(told[1:-1]) == told[1:-1]


def test_an_error_of_an_operator_passes_the_listener():
    def index(x, i):
        return x[i].sin()

    run = compiled(index, X, torch.tensor([1, 2]))
    with pytest.raises(IndexError), profile(activities=[ProfilerActivity.CPU]):
        run(X, torch.tensor([1, 200]))
    (result,) = run(X, torch.tensor([1, 3]))
    torch.testing.assert_close(result, X[[1, 3]].sin())


def test_threads_keep_their_events_apart():
    run = compiled()
    results = []
    with profile(activities=[ProfilerActivity.CPU]):
        threads = [threading.Thread(target=lambda: results.append(run(X, W))) for _ in range(4)]
        for thread in threads:
            thread.start()
        run(X, W)
        for thread in threads:
            thread.join()
    names, _ = events_of(run, X, W)
    assert sum(name.startswith("weft graph") for name in names) == 1
    assert len(results) == 4


def test_a_recording_takes_times_of_the_steps():
    recording.switch(True)
    try:
        run = compiled()
        for _ in range(3):
            run(X, W)
        (record,) = [r for r in recording.current().records if r.kind == "timed"]
        (program,) = [r for r in recording.current().records if r.kind == "program"]
    finally:
        recording.switch(False)
    kinds = [step["kind"] for step in program.data["steps"]]
    assert len(record.data["seconds"]) == len(kinds) >= 2
    for kind, seconds in zip(kinds, record.data["seconds"], strict=True):
        assert seconds is None if kind == "view" else seconds > 0
    assert isinstance(getattr(run, "_compiled", run), CompiledGraph)
