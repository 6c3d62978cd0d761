"""torch.compile's interface, row by row (docs/coverage/interface.md)."""

import subprocess
import sys
import types

import pytest
import torch
import weft
import weft.compiler
from weft_core import events
from weft_core.errors import InvalidArgument


@pytest.fixture(autouse=True)
def reset():
    weft.reset()
    yield
    weft.set_default_backend(None)
    weft.config.reset()
    weft.reset()


def f(x):
    return x.sin() + 1


X = torch.arange(4.0)


class Recorder:
    """A backend that runs graphs op by op and keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, gm, inputs, **keywords):
        self.calls.append(keywords)
        return gm.forward


# ---- backends


def test_no_backend_is_the_default_backend():
    torch.testing.assert_close(weft.compile(f, backend=None)(X), f(X))
    assert weft.counters["codegen"]["graphs"] == 1
    assert weft.get_default_backend() == "codegen"
    seen = Recorder()
    weft.set_default_backend(seen)
    weft.compile(f, backend=None)(X)
    weft.compile(lambda x: x * 2)(X)
    assert weft.get_default_backend() is seen and len(seen.calls) == 2
    with pytest.raises(weft.InvalidBackend, match="did you mean 'eager'"):
        weft.set_default_backend("eagr")
    weft.set_default_backend(None)
    assert weft.get_default_backend() == "codegen"


def test_options_and_mode_reach_another_backend_as_they_are():
    for given, expected in (
        ({"options": {"device": "CPU", "max_autotune": 3}},) * 2,
        ({"mode": "reduce-overhead"},) * 2,
        ({"mode": "whatever"},) * 2,
        ({"mode": "default"}, {}),
        ({"options": {}}, {}),
    ):
        seen = Recorder()
        weft.compile(f, backend=seen, **given)(X)
        assert seen.calls == [expected]
    weft.register_backend(seen := Recorder(), "recorder")
    filtered = []
    options = {"guard_filter_fn": lambda e: filtered.append(e) or [True] * len(e), "a": 1}
    weft.compile(f, backend="recorder", options=options)(X)
    assert seen.calls == [{"options": {"a": 1}}] and filtered


def test_a_name_of_torchs_registry_is_found_when_that_is_loaded(monkeypatch):
    seen = Recorder()
    registry = types.SimpleNamespace(
        list_backends=lambda tags: ["theirs", "eager"], lookup_backend={"theirs": seen}.__getitem__
    )
    with pytest.raises(weft.InvalidBackend):
        weft.compile(f, backend="theirs")
    monkeypatch.setitem(sys.modules, "torch._dynamo.backends.registry", registry)
    assert "theirs" in weft.list_backends()
    torch.testing.assert_close(weft.compile(f, backend="theirs")(X), f(X))
    assert seen.calls == [{}]


# ---- options

_OPTIONS = """
import torch._inductor, json
print(json.dumps(torch._inductor.list_options()))
"""


@pytest.mark.filterwarnings("ignore:.option. ")
def test_an_option_without_effect_is_told_once():
    options = {"epilogue_fusion": False, "coordinate_descent_tuning": True, "cpp.threads": 4}
    torch.testing.assert_close(weft.compile(f, options=options)(X), f(X))
    weft.compile(lambda x: x * 3, options=options)(X)
    told = [text for text in weft.report().told if text.startswith("[option]")]
    assert len(told) == 2
    assert "[option] cpp.threads has no effect: it steers Inductor's C++" in told[1]
    with pytest.raises(weft.InvalidOption, match="did you mean 'epilogue_fusion'"):
        weft.compile(f, options={"epilog_fusion": True})


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="other releases have other options")
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="other releases have other options")
def test_every_option_of_torch_compile_is_known():
    done = subprocess.run(
        [sys.executable, "-c", _OPTIONS], capture_output=True, text=True, check=True
    )
    names = __import__("json").loads(done.stdout)
    assert len(names) > 500
    unknown = [n for n in names if n not in weft.list_options() and not weft.options.why_inert(n)]
    assert unknown == []


# ---- overrides


def test_single_graphs_get_another_backend():
    seen = Recorder()
    weft.register_backend(seen, "seen")
    weft.config.overrides = "1:seen,3-:seen"
    for factor in range(5):
        scope = {}
        exec(f"def f(x): return x * {factor}", scope)
        compiled = weft.compile(scope["f"], backend="aot_eager", options={"epilogue_fusion": False})
        torch.testing.assert_close(compiled(X), X * factor)
    assert len(seen.calls) == 3 and seen.calls[0] == {}


def test_overrides_that_cannot_be_read():
    weft.config.overrides = "eager"
    with pytest.raises(weft.InvalidOption, match="entries like 3:eager"):
        weft.compile(f)(X)


def test_overrides_come_from_the_environment(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv("WEFT_OVERRIDES", "0:eager")
        weft.config.reset()
    torch.testing.assert_close(weft.compile(f)(X), f(X))
    assert weft.counters["codegen"]["graphs"] == 0


# ---- settings


def test_settings_are_saved_and_loaded():
    weft.config.recompile_limit = 3
    saved = weft.config.save_config()
    assert weft.config.codegen_config() == "weft.config.recompile_limit = 3"
    weft.config.reset()
    assert weft.config.recompile_limit == 8 and weft.config.codegen_config() == ""
    weft.config.load_config(saved)
    assert weft.config.recompile_limit == 3
    weft.config.load_config({"recompile_limit": 5})
    assert weft.config.recompile_limit == 5
    with pytest.raises(weft.InvalidOption):
        weft.config.load_config({"no_such_setting": 1})
    assert not hasattr(weft.config, "no_such_setting")


# ---- weft.compiler


def test_the_namespace_has_torch_compilers_names():
    missing = set(torch.compiler.__all__) - set(dir(weft.compiler))
    # The last two are new in torch 2.14.
    assert missing <= {"load_compiled_function", "precompile", "PrecompileError"}
    assert weft.compiler.cudagraph_mark_warmup_incomplete() is None
    for name in set(torch.compiler.__all__) - missing:
        assert getattr(weft.compiler, name) is not None
    assert weft.compiler.compile is weft.compile and weft.compiler.config is weft.config
    torch.testing.assert_close(weft.compiler.compile(f)(X), f(X))
    assert not weft.compiler.is_compiling() and not weft.compiler.is_exporting()
    filters = weft.compiler.skip_guard_on_globals_unsafe
    weft.compile(f, options={"guard_filter_fn": filters})(X)


def test_a_disabled_function_says_why():
    @weft.disable(reason="it talks to a server")
    def ask(x):
        return x * 2

    def g(x):
        return ask(x + 1) - 1

    torch.testing.assert_close(weft.compile(g)(X), g(X))
    (record,) = weft.explain(g)(X).breaks
    assert record.code == "disabled" and "it talks to a server" in record.detail


@pytest.mark.filterwarnings("ignore:.skip-frame. ")
def test_a_skipped_frame_runs_eagerly_as_a_whole():
    def inner(x):
        y = x * 2
        weft.skip_frame("no good")
        return y + weft.is_compiling()

    def g(x):
        return inner(x + 1) * 3

    assert weft.skip_frame() is None
    torch.testing.assert_close(weft.compile(g)(X), g(X))
    counts = weft.explain(g)(X)
    assert [record.code for record in counts.breaks] == ["skip-frame"]
    assert counts.op_count == 2 and "no good" in counts.breaks[0].detail
    weft.reset()
    torch.testing.assert_close(weft.compile(inner)(X), inner(X))
    assert weft.counters["stats"]["unique_graphs"] == 0


def test_run_uses_what_is_compiled_and_compiles_nothing():
    compiled = weft.compile(f)
    compiled(X)
    run = weft.compiler.run(compiled)
    torch.testing.assert_close(run(X), f(X))
    assert weft.report().frames[0].hits == 1
    longer = torch.arange(9.0)
    torch.testing.assert_close(run(longer), f(longer))
    assert weft.counters["stats"]["unique_graphs"] == 1
    compiled(longer)
    assert weft.counters["stats"]["unique_graphs"] == 2


def test_a_nonstrict_function_is_one_node_with_any_structure():
    @weft.nonstrict_trace
    def pair(pairs, scale):
        return {"sum": pairs[0] + pairs[1] * scale, "first": (pairs[0],)}

    def g(x):
        made = pair((x, x * 2), 3)
        return made["sum"] * 2 + made["first"][0]

    graphs = []
    keep = lambda gm, _: graphs.append(gm) or gm.forward  # noqa: E731
    torch.testing.assert_close(weft.compile(g, backend=keep, fullgraph=True)(X), g(X))
    (graph,) = graphs
    assert sum(node.op == "call_function" for node in graph.graph.nodes) <= 7


def test_a_static_address_is_a_mark_without_effect():
    weight = torch.ones(4)
    assert weft.mark_static_address(weight) is None
    torch.testing.assert_close(weft.compile(lambda x: x * weight)(X), X)
    with pytest.raises(InvalidArgument):
        weft.mark_static_address(3)


def test_events_are_counted_by_graph():
    assert events.counters["capture"]["graphs"] == 0
    weft.compile(f)(X)
    assert events.counters["capture"]["graphs"] == 1


def test_skipped_guards_leave_those_by_which_entries_differ():
    owner = types.SimpleNamespace(scale=2.0)

    def g(x, flag):
        return x * owner.scale + (1 if flag else 0)

    compiled = weft.compile(g)
    for flag in (True, False):
        compiled(X, flag)
    owner.scale = 3.0
    with weft.set_stance(skip_guard_eval_unsafe=True):
        torch.testing.assert_close(compiled(X, True), X * 2 + 1)  # nothing looks at `owner`
        torch.testing.assert_close(compiled(X, False), X * 2)
        assert weft.counters["stats"]["unique_graphs"] == 2
    torch.testing.assert_close(compiled(X, True), X * 3 + 1)
    assert weft.counters["stats"]["unique_graphs"] == 3


def test_a_wrapped_numpy_function_is_captured():
    double = weft.compiler.wrap_numpy(lambda a, b: (a * 2, [b.sum()]))
    compiled = weft.compile(double, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X, X), (X * 2, [X.sum()]))
    torch.testing.assert_close(double(X, X), (X * 2, [X.sum()]))


def test_a_substitute_needs_the_same_signature():
    def original(x, scale=1):
        raise AssertionError("not called with tensors")

    with pytest.raises(InvalidArgument, match="has not the parameters of"):
        weft.substitute_in_graph(original)(lambda x: x)
    weft.substitute_in_graph(original, skip_signature_check=True)(lambda x: x * 5)
    torch.testing.assert_close(weft.compile(lambda x: original(x) + 1)(X), X * 5 + 1)

    def factor(n, power=2):
        return n**power

    @weft.substitute_in_graph(factor, can_constant_fold_through=True)
    def traced(n, power=2):
        raise AssertionError("folded")

    torch.testing.assert_close(weft.compile(lambda x: x * factor(3), fullgraph=True)(X), X * 9)
