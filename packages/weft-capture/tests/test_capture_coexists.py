"""Captured code beside the rest of Python: threads, fork, tracing, profilers, debuggers, memory."""

import bdb
import gc
import io
import os
import pdb
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import nn
from weft_guards import CacheRules
from weft_guards.config import settings


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gain = 2.0

    def forward(self, x):
        return self.layer(x).relu() * self.gain


def shapes(x, factor):
    y = x.sin() * factor
    return y.sum(0) if x.shape[0] > 4 else y.cos()


def branches(x, flag):
    y = x + 1
    if flag:
        y = y * 2
    return y - x


# ---- threads and processes


@pytest.mark.slow
def test_eight_threads_with_mixed_shapes_and_resets():
    net, barrier = Net(), threading.Barrier(8)
    with settings.patch(recompile_limit=64):
        compiled = [
            weft_capture.capture(function, eager_backend)
            for function in (shapes, branches, net.forward)
        ]

        def work(index):
            barrier.wait()
            for step in range(24):
                x = torch.full((2 + (step * (index + 1)) % 7, 3), float(index))
                for actual, expected in (
                    (compiled[0](x, 1.5), shapes(x, 1.5)),
                    (compiled[1](x, step % 2 == 0), branches(x, step % 2 == 0)),
                    (compiled[2](x), net.forward(x)),
                ):
                    assert torch.equal(actual, expected)
                if index == 0 and step % 8 == 7:
                    weft_capture.reset()
            return index

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == list(range(8))


def test_a_thread_that_compiles_does_not_stop_others():
    started, go_on = threading.Event(), threading.Event()

    def slow_backend(graph, inputs):
        started.set()
        assert go_on.wait(30)
        return graph.forward

    slow = weft_capture.capture(branches, slow_backend)
    ready = weft_capture.capture(shapes, eager_backend)
    x = torch.ones(2, 3)
    ready(x, 2.0)
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(slow, x, True)
        assert started.wait(30)
        assert torch.equal(ready(x, 2.0), shapes(x, 2.0))
        go_on.set()
        assert torch.equal(compiling.result(), branches(x, True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_after_compiling_while_another_thread_compiles():
    compiled, x = weft_capture.capture(shapes, eager_backend), torch.ones(2, 3)
    compiled(x, 2.0)
    started, go_on = threading.Event(), threading.Event()

    def slow_backend(graph, inputs):
        started.set()
        go_on.wait(30)
        return graph.forward

    thread = threading.Thread(target=weft_capture.capture(branches, slow_backend), args=(x, True))
    thread.start()
    assert started.wait(30)
    child = os.fork()
    if child == 0:
        hit = torch.equal(compiled(x, 2.0), shapes(x, 2.0))
        fresh = torch.equal(compiled(x[:1], 3.0), shapes(x[:1], 3.0))
        os._exit(0 if hit and fresh else 1)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- memory


@pytest.mark.slow
def test_a_dropped_module_frees_everything():
    seen = []

    def backend(graph, inputs):
        seen.append(weakref.ref(graph))
        return graph.forward

    for _ in range(3):
        net = Net()
        for _ in range(2):  # one model, compiled again
            compiled = weft_capture.capture(net.forward, backend)
            compiled(torch.ones(2, 3))
            compiled(torch.ones(4, 3))
        seen += [weakref.ref(net), weakref.ref(net.layer.weight)]
        del net, compiled
    for _ in range(3):  # what the first pass finalises, the next ones free
        gc.collect()
    assert len(seen) == 18
    assert [reference() for reference in seen] == [None] * 18


@pytest.mark.slow
def test_entries_of_modules_that_died_are_evicted():
    def call(net, x):
        return net(x) * 2

    compiled = weft_capture.capture(call, eager_backend)
    for _ in range(12):  # more than the recompile limit
        kind = type("Net", (Net,), {})
        assert compiled(kind(), torch.ones(2, 3)).shape == (2, 3)
        del kind
        gc.collect()
    (cache,) = [c for c in compiled._weft_capture.caches.values() if "call" in c.name]
    assert len(cache.entries) <= 1
    assert cache.skip_reason is None


def test_after_the_limit_entries_still_serve_and_one_warning_lists_guards():
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(1)
            return graph(*args)

        return run

    with settings.patch(recompile_limit=2):
        compiled = weft_capture.capture(branches, backend, rules=CacheRules(dynamic=False))
        compiled(torch.ones(2), True)
        compiled(torch.ones(3), True)
        with pytest.warns(UserWarning, match=r"weft\.mark_dynamic\(x, 0\)"):
            compiled(torch.ones(4), True)
        compiled(torch.ones(5), True)  # a second warning would be an error
        assert len(calls) == 2
        compiled(torch.ones(2), True)
        assert len(calls) == 3


def steps(x):
    for limit in range(4, 64, 4):  # each answer is an assumption about the symbolic size
        if x.shape[0] < limit:
            return x * limit
    return x


def test_symbolic_variants_obey_the_limit():
    compiled = weft_capture.capture(steps, eager_backend)
    told = []
    for size in range(2, 62):
        x = torch.ones(size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(compiled(x), steps(x))
        told += [str(warning.message) for warning in caught]
    state = compiled._weft_capture
    assert len(state.graphs) == settings.recompile_limit
    assert len(told) == 1 and "recompile-limit" in told[0] and "size" in told[0]
    (cache,) = state.caches.values()
    assert any("s" in str(guard) for entry in cache.entries for guard in entry.guards)


# ---- tracing, profilers, debuggers


def breaks_and_fails(x, parts):
    first = x + 1
    parts.append(sys._getframe().f_locals.copy())
    second = first * 2
    parts.append(sys._getframe().f_locals["second"])
    return second.view(parts[0]["first"].numel() + 1)


def test_locals_and_lines_are_the_users_after_a_region():
    compiled = weft_capture.capture(breaks_and_fails, eager_backend)
    lines = []
    for function in (breaks_and_fails, compiled, compiled):
        parts = []
        with pytest.raises(RuntimeError, match="shape") as caught:
            function(torch.ones(2), parts)
        assert torch.equal(parts[0]["first"], torch.full((2,), 2.0))
        frame = traceback.extract_tb(caught.tb)[-1]
        lines.append((frame.filename, frame.lineno, frame.line))
        assert torch.equal(parts[1], torch.full((2,), 4.0))
    assert lines[0] == lines[1] == lines[2]


def inner_that_fails(y, how):
    doubled = y * 2
    unused = doubled + 1
    if how == "raise":
        raise ValueError(how)
    return unused.view(7)


def calls_what_fails(x, how):
    first = x + 1
    text = "kept"  # noqa: F841
    second = first * 2
    if how == "here":
        second.view(7)
    return inner_that_fails(second, how)


@pytest.mark.parametrize("how", ["raise", "inside", "here"])
def test_an_exception_shows_the_variables_of_its_frames(how):
    """Also those that nothing would have used any more, for a debugger after the fact."""

    def shown(function):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            function(torch.ones(3), how)
        return [
            (frame.f_code.co_name, line, name, str(frame.f_locals[name]))
            for frame, line in traceback.walk_tb(caught.tb)
            if frame.f_code.co_name in (calls_what_fails.__name__, inner_that_fails.__name__)
            for name in sorted(frame.f_locals)
            if not name.startswith("_weft_")
        ]

    compiled = weft_capture.capture(calls_what_fails, eager_backend)
    want = shown(calls_what_fails)
    assert len(want) >= 4
    assert shown(compiled) == want
    assert shown(compiled) == want


def test_a_debugger_sees_all_variables_of_the_frames_below():
    seen = []

    def look():
        seen.append({name: str(v) for name, v in sys._getframe(1).f_locals.items()})

    def program(x):
        first = x + 1
        text = "kept"  # noqa: F841
        second = first * 2
        look()
        return second - 3

    x = torch.ones(3)
    assert torch.equal(program(x), torch.ones(3))
    debugger, before = bdb.Bdb(), sys.gettrace()
    debugger.reset()
    sys.settrace(debugger.trace_dispatch)
    try:
        weft_capture.capture(program, eager_backend)(x)
    finally:
        sys.settrace(before)
    for name in ("first", "second", "text", "x"):
        assert seen[1][name] == seen[0][name]


def stops_in_a_debugger(x):
    first = x + 1
    second = first * 2
    breakpoint()
    return second - 3


def test_breakpoint_sees_all_variables(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: seen.append(sorted(sys._getframe(1).f_locals))
    )
    for function in (stops_in_a_debugger, weft_capture.capture(stops_in_a_debugger, eager_backend)):
        assert torch.equal(function(torch.ones(3)), torch.ones(3))
    names = [[name for name in names if not name.startswith("_weft_")] for names in seen]
    assert names == [["first", "second", "x"]] * 2


def looks_at_its_frame(debugger, x):
    first, n = x + 1, 3
    debugger.set_trace()
    second = first * n
    third = not_compiled(second)
    return third + n


def test_a_debugger_that_the_program_calls_goes_on_line_by_line():
    commands = ["p first", "next", "!n = 5", "step", "step", "args", "continue", ""]
    compiled = weft_capture.capture(looks_at_its_frame, eager_backend)
    shown, before = [], sys.gettrace()
    sys.settrace(None)
    try:
        for function in (looks_at_its_frame, compiled, compiled):
            out = io.StringIO()
            debugger = pdb.Pdb(stdin=io.StringIO("\n".join(commands)), stdout=out, nosigint=True)
            shown.append((function(debugger, torch.ones(2)).tolist(), out.getvalue()))
    finally:
        sys.settrace(before)
    assert shown[0] == shown[1] == shown[2]
    assert "not_compiled()" in shown[0][1]


@pytest.mark.slow
def test_results_that_tracers_have_seen_can_be_looked_at():
    compiled, seen, x = weft_capture.capture(with_a_callback, eager_backend), [], torch.ones(2)

    def watch(frame, event, argument):
        seen.append(argument)
        return watch

    for get, put in ((sys.gettrace, sys.settrace), (sys.getprofile, sys.setprofile)):
        before = get()
        put(watch)
        try:
            compiled(x, gc.collect)
            compiled(x, gc.collect)
        finally:
            put(before)
    tails = [list(one) for one in seen if type(one).__name__ == "TailCall"]
    assert [tail[1:] for tail in tails] == [[None] * 3] * 4
    assert watch.__code__ not in compiled._weft_capture.caches


def not_compiled(x):
    y = x * 2
    return y


def with_a_callback(x, callback):
    y = x + 1
    callback()
    return y * 2


def traced(function, event_of):
    """Run a function under sys.settrace; return the lines of the functions named."""
    seen = []

    def trace(frame, event, argument):
        if event == "line" and frame.f_code.co_name in event_of:
            seen.append((frame.f_code.co_name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = function()
    finally:
        sys.settrace(before)
    return result, seen


def test_tracers_still_see_what_is_not_compiled():
    compiled = weft_capture.capture(with_a_callback, eager_backend)
    x, first = torch.ones(2), not_compiled.__code__.co_firstlineno
    weft_capture.disable(not_compiled)

    def program():
        return compiled(x, lambda: disabled(x)), not_compiled(x)

    disabled = weft_capture.disable(not_compiled)
    program()
    (result, plain), seen = traced(program, {"not_compiled"})
    assert torch.equal(result, torch.full((2,), 4.0))
    assert torch.equal(plain, x * 2)
    assert seen == [("not_compiled", first + 1), ("not_compiled", first + 2)] * 2


def test_tracing_a_first_call_changes_nothing():
    compiled = weft_capture.capture(shapes, eager_backend)
    x = torch.ones(2, 3)
    result, _ = traced(lambda: compiled(x, 2.0), {"shapes"})
    assert torch.equal(result, shapes(x, 2.0))
    assert len(compiled._weft_capture.graphs) == 1


def test_profilers_see_calls_in_pairs():
    compiled = weft_capture.capture(with_a_callback, eager_backend)
    x, balance, names = torch.ones(2), [0], []

    def profile(frame, event, argument):
        if event in ("call", "return"):
            balance[0] += 1 if event == "call" else -1
            names.append(frame.f_code.co_name)

    compiled(x, lambda: None)
    before = sys.getprofile()

    def run():
        sys.setprofile(profile)
        try:
            return compiled(x, lambda: None)
        finally:
            sys.setprofile(before)

    assert torch.equal(run(), torch.full((2,), 4.0))
    assert "<lambda>" in names
    assert balance[0] == 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")
def test_monitoring_sees_what_is_not_compiled():
    monitoring = sys.monitoring
    compiled, x, seen = weft_capture.capture(with_a_callback, eager_backend), torch.ones(2), []
    monitoring.use_tool_id(4, "weft test")
    try:
        monitoring.register_callback(
            4, monitoring.events.PY_START, lambda code, offset: seen.append(code.co_name)
        )
        monitoring.set_events(4, monitoring.events.PY_START)
        result = compiled(x, lambda: None)
        monitoring.set_events(4, 0)
    finally:
        monitoring.free_tool_id(4)
    assert torch.equal(result, torch.full((2,), 4.0))
    assert "<lambda>" in seen


@pytest.mark.slow
def test_torch_compile_inside_a_captured_frame_keeps_its_frames():
    """torch's hook is put over this one; neither captures the other, nor do they go in circles."""
    code = """if True:
        import torch, weft_capture

        def fails(x):
            raise torch.unknown

        good, bad = torch.compile(torch.sin, backend="eager"), torch.compile(fails, fullgraph=True)

        def program(x, function):
            y = x + 1
            weft_capture.graph_break()
            return function(y) * 2

        run = weft_capture.capture(program, lambda graph, inputs: graph.forward)
        x = torch.ones(3)
        for function in (good, bad, good, bad, good):
            try:
                assert torch.equal(run(x, function), (x + 1).sin() * 2)
            except (AttributeError, torch._dynamo.exc.TorchDynamoException):
                assert function is bad
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == 0


@pytest.mark.slow
def test_modules_and_optimizers_once_dynamo_is_loaded():
    """Dynamo wraps `Module.__init__` and `_init_group`, which cannot be undone in a process."""
    code = """if True:
        import torch, weft_capture
        from torch import nn

        def makes(x):
            layer = nn.Linear(3, 2)
            with torch.no_grad():
                for weight in net.parameters():
                    weight.grad = torch.ones_like(weight)
                torch.optim.Adam(net.parameters()).step()
            return layer(x) + nn.Dropout(0.5).eval()(x).sum()

        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        captured = weft_capture.capture(makes, lambda graph, inputs: graph.forward, fullgraph=True)
        results, net = [], nn.Linear(3, 2)
        for function in (makes, captured):
            torch.manual_seed(0)
            results.append(function(torch.ones(1, 3)))
        assert "mutation_guard" in nn.Module.__init__.__code__.co_filename
        assert torch.equal(*results)
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["mark_static(x, 0)", "is_compiling()", "config.suppress_errors", "reset"]
)
def test_names_of_dynamo_before_it_is_loaded(call):
    """They import it, as in eager."""
    code = f"""if True:
        import sys, torch, weft_capture

        def program(x):
            torch._dynamo.{call}
            return x + 1

        run = weft_capture.capture(program, lambda graph, inputs: graph.forward, fullgraph=True)
        assert "torch._dynamo" not in sys.modules
        assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == 0
