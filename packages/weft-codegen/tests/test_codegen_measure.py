"""Graphs that are slower than eager are replaced by it; verdicts outlive the process."""

import threading

import pytest
import torch
from codegen_check import trace
from torch import fx
from weft_codegen.compile import compile_graph
from weft_codegen.config import Options, settings
from weft_codegen.measure import Trial

X = torch.randn(8, 8)


class Recorder:
    """Counts calls; each waits a while (a timing, but only its order of magnitude matters)."""

    def __init__(self, seconds: float) -> None:
        self.calls = 0
        self.seconds = seconds

    def __call__(self, x):
        self.calls += 1
        threading.Event().wait(self.seconds)
        return [x]


@pytest.fixture(autouse=True)
def on(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    with settings.patch(measure=True):
        yield


def run_trial(compiled, eager, calls=10):
    verdicts = []
    trial = Trial(compiled, eager, verdicts.append)
    for _ in range(calls):
        assert trial(X)[0] is X
    return verdicts


def test_a_slow_graph_is_replaced():
    compiled, eager = Recorder(0.02), Recorder(0)
    assert run_trial(compiled, eager) == [False]
    assert (compiled.calls, eager.calls) == (7, 9)


def test_a_fast_graph_stays():
    compiled, eager = Recorder(0), Recorder(0.02)
    assert run_trial(compiled, eager) == [True]
    assert (compiled.calls, eager.calls) == (10, 6)


def test_a_long_graph_is_not_run_twice():
    eager = Recorder(0)
    assert run_trial(Recorder(0.06), eager, calls=3) == []
    assert eager.calls == 0


def test_eager_failing_keeps_the_compiled_graph():
    def broken(x):
        raise RuntimeError("out of memory")

    compiled = Recorder(0)
    assert run_trial(compiled, broken) == []
    assert compiled.calls == 10


def compiled_graph(fn, *args, **options):
    return compile_graph(trace(fn, args), args, options=Options(**options))


def test_results_are_right_during_and_after_the_trial():
    run = compiled_graph(lambda x: (x * 2 + 1).sin(), X)
    assert isinstance(run, Trial)
    for _ in range(10):
        torch.testing.assert_close(run(X), [(X * 2 + 1).sin()])
    again = compiled_graph(lambda x: (x * 2 + 1).sin(), X)
    assert not isinstance(again, Trial)
    torch.testing.assert_close(again(X), [(X * 2 + 1).sin()])


def test_only_what_may_run_twice_is_measured():
    assert not isinstance(compiled_graph(torch.bernoulli, X.abs().clamp(0, 1)), Trial)
    assert not isinstance(compiled_graph(lambda x: x * 2, X, measure=False), Trial)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    doubled.meta["val"] = X
    graph.output((graph.call_function(torch.ops.aten.copy_.default, (x, doubled)),))
    graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)[0].meta["val"] = X
    assert not isinstance(compile_graph(fx.GraphModule({}, graph), [X]), Trial)


class Owner(Recorder):
    """A compiled graph that takes its arguments out of the list."""

    def call_owning(self, args):
        return [args.pop()]


def test_arguments_are_given_away_when_the_compiled_graph_has_won():
    trial = Trial(Owner(0), Recorder(0.02), lambda pays: None)
    given = [X]
    assert trial.call_owning(given)[0] is X
    assert given == [X], "the trial needs them twice"
    for _ in range(10):
        trial(X)
    assert trial.call_owning(given)[0] is X
    assert given == []
