"""Guards and caches as `weft.compile` and `weft.config` steer them; docs/coverage/guards.md."""

import functools
import gc
import inspect
import subprocess
import sys
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import weft
from torch import nn

SCALE = 2.0


@pytest.fixture(autouse=True)
def clean():
    weft.reset()
    yield
    weft.reset()


class Counting:
    """A backend that keeps the graphs it is given and runs them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def __len__(self):
        return len(self.graphs)


def make(function, **arguments):
    backend = Counting()
    return weft.compile(function, backend=backend, **arguments), backend


def scaled(x):
    return x * SCALE


def static(x, n):
    return x + n * x.shape[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.gain = 1.0

    def forward(self, x):
        return self.fc(x) * self.gain


class Asked:
    def __init__(self, n=1):
        pass

    def asked(self, a, b=2):
        pass


def signatures(x):
    of = Asked, Asked.asked, Asked().asked, functools.wraps(Asked.asked)(lambda *a: None)
    return x + 1, [str(inspect.signature(one)) for one in of]


def test_signatures_are_guarded(monkeypatch):
    function, backend = make(signatures)
    other = inspect.signature(lambda q: q)
    changes = [("__defaults__", (3,)), ("__signature__", other), ("__annotations__", {"a": int})]
    owners = [Asked.__init__, Asked.asked]
    for owner, name, value in [(None, "", 0), *((o, *c) for c in changes for o in owners)]:
        if owner is not None:
            monkeypatch.setattr(owner, name, value, raising=False)
        for _ in range(2):
            assert function(torch.ones(2))[1] == signatures(torch.ones(2))[1]
    assert len(backend) == 7


# ---- limits


def test_recompile_limit_of_one_call():
    f, graphs = make(static, recompile_limit=2, dynamic=False, name="steps")
    x = torch.ones(3)
    f(x, 2)
    f(x, 3)
    with pytest.warns(UserWarning, match=r"steps: static .* was compiled 2 times(.|\n)*limit=4"):
        assert torch.equal(f(x, 5), static(x, 5))
    assert len(graphs) == 2
    other, more = make(static, dynamic=False)
    for n in range(2, 6):
        other(x, n)
    assert len(more) == 4


def test_recompile_limit_with_fullgraph_is_an_error():
    f, _ = make(static, recompile_limit=1, dynamic=False, fullgraph=True)
    f(torch.ones(3), 2)
    with pytest.raises(weft.RecompileLimit, match="compiled 1 times"):
        f(torch.ones(3), 3)
    assert torch.equal(f(torch.ones(3), 2), static(torch.ones(3), 2))


@pytest.mark.parametrize("limit", [None, 1])
def test_the_limit_can_be_an_error(limit):
    f, _ = make(static, dynamic=False, recompile_limit=limit)
    with weft.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
        f(torch.ones(3), 2)
        with pytest.raises(weft.RecompileLimit, match=r"L\['n'\]: 2 -> 3"):
            f(torch.ones(3), 3)


def test_any_recompile_can_be_an_error():
    f, graphs = make(static)
    with weft.config.patch(error_on_recompile=True):
        f(torch.ones(3), 2)
        f(torch.ones(3), 2)
        with pytest.raises(weft.RecompileLimit, match="size of dim 0") as caught:
            f(torch.ones(4), 2)
    assert "error_on_recompile is set" in str(caught.value)
    assert "recompile_limit =" not in str(caught.value) and "eagerly" not in str(caught.value)
    f(torch.ones(4), 2)
    assert len(graphs) == 2


# ---- what calls of compile share


def test_equal_calls_share_what_they_compile():
    backend = Counting()
    for size in (3, 4, 5, 3):
        assert weft.compile(scaled, backend=backend)(torch.ones(size)).tolist() == [2.0] * size
    assert len(backend) == 2


@pytest.mark.parametrize(
    "other", [{"fullgraph": True}, {"dynamic": False}, {"isolate_recompiles": True}, {"name": "x"}]
)
def test_calls_with_other_flags_share_nothing(other):
    backend = Counting()
    first = weft.compile(scaled, backend=backend)
    second = weft.compile(scaled, backend=backend, **other)
    for function in (first, second, first, second):
        function(torch.ones(3))
    assert len(backend) == 2


def test_calls_under_other_settings_share_nothing():
    backend = Counting()
    weft.compile(scaled, backend=backend)(torch.ones(3))
    with weft.config.patch(specialize_float=True):
        weft.compile(scaled, backend=backend)(torch.ones(3))
    assert len(backend) == 2


def test_isolated_calls_share_nothing_with_each_other():
    backend = Counting()
    for _ in range(2):
        weft.compile(scaled, backend=backend, isolate_recompiles=True)(torch.ones(3))
    assert len(backend) == 2


def test_functions_of_one_code_object_each_have_the_recompile_limit():
    def make_one(scale):
        return lambda x: x * len(scale)

    backend = Counting()
    static = functools.partial(weft.compile, backend=backend, recompile_limit=2, dynamic=False)
    compiled = [static(make_one("s" * n)) for n in range(6)]
    for function in compiled:
        function(torch.ones(3))
    assert len(backend) == 6


def test_a_call_after_the_limit_compiles_again():
    backend = Counting()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = weft.compile(static, backend=backend, recompile_limit=1, dynamic=False)
        for n in (2, 3):
            first(torch.ones(3), n)
    assert len(backend) == 1
    second = weft.compile(static, backend=backend, recompile_limit=1, dynamic=False)
    assert torch.equal(second(torch.ones(3), 4), static(torch.ones(3), 4))
    assert len(backend) == 2


def test_backends_made_anew_do_not_pile_up():
    backends = []
    for _ in range(12):
        backend = Counting()
        weft.compile(scaled, backend=backend)(torch.ones(3))
        backends.append(weakref.ref(backend))
        del backend
    gc.collect()
    assert sum(ref() is not None for ref in backends) <= 8


@pytest.mark.slow
def test_functions_and_their_code_take_what_was_compiled_along():
    body = "\n    for _ in range(3):\n        x = x + 1\n        print(end='')\n    return x"
    source = "def function(x):" + body
    graphs = []

    def backend(graph, inputs):
        graphs.append(weakref.ref(graph))
        return graph.forward

    for _ in range(3):
        namespace = {}
        exec(source, namespace)
        weft.compile(namespace["function"], backend=backend)(torch.ones(3))
    del namespace
    for _ in range(2):  # the function and its globals, then what was kept for its code
        gc.collect()
    assert len(graphs) >= 3
    assert not any(ref() for ref in graphs)


# ---- filters


def filtered(function, keep, **arguments):
    return make(function, options={"guard_filter_fn": keep}, **arguments)


def test_a_filter_is_shown_each_guard():
    seen = []

    def keep(entries):
        seen.extend(entries)
        return [True] * len(entries)

    f, _ = filtered(scaled, keep)
    x = torch.ones(3)
    f(x)
    by_name = {(entry.name, entry.guard_type): entry for entry in seen}
    tensor = by_name["L['x']", "TENSOR_MATCH"]
    assert tensor.has_value
    assert tensor.value is x
    assert not tensor.is_global
    number = by_name["G['SCALE']", "EQUALS_MATCH"]
    assert number.is_global
    assert number.value == SCALE
    assert number.orig_guard.guard.kind == "CONST"


def test_globals_can_be_left_out(monkeypatch):
    f, graphs = filtered(scaled, torch.compiler.skip_guard_on_globals_unsafe)
    f(torch.ones(3))
    monkeypatch.setattr("test_weft_guards.SCALE", 3.0)
    assert torch.equal(f(torch.ones(3)), torch.full([3], 2.0))  # stale, as asked for
    assert torch.equal(f(torch.ones(4)), torch.full([4], 3.0))
    assert len(graphs) == 2


def test_tensors_alone_can_be_kept():
    net = Net()
    f, graphs = filtered(net, torch.compiler.keep_tensor_guards_unsafe)
    x = torch.ones(2, 4)
    f(x)
    net.gain = 5.0
    net.requires_grad_(False)
    with torch.no_grad():
        f(x)
    assert len(graphs) == 1
    f(torch.ones(3, 4))
    assert len(graphs) == 2


def test_modules_can_be_left_out():
    x = torch.ones(2, 4)
    for keep, changes in (
        (torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe, 1),
        (torch.compiler.skip_guard_on_all_nn_modules_unsafe, 0),
    ):
        net = Net()
        f, graphs = filtered(net, keep)
        f(x)
        net.fc.register_forward_hook(lambda *_: None)
        f(x)
        assert len(graphs) == 1
        net.gain = 5.0
        f(x)
        assert len(graphs) == 1 + changes


def test_portable_guards_can_be_kept():
    net = Net()
    f, graphs = filtered(net, torch.compiler.keep_portable_guards_unsafe, dynamic=True)
    f(torch.ones(2, 4))
    net.gain = 5.0
    f(torch.ones(3, 4))
    assert len(graphs) == 1
    with torch.no_grad():
        f(torch.ones(3, 4))
    assert len(graphs) == 2


def test_nothing_is_checked_without_guards():
    f, graphs = filtered(scaled, torch.compiler.skip_all_guards_unsafe)
    f(torch.ones(3))
    with torch.no_grad():
        assert torch.equal(f(torch.ones(3, dtype=torch.float64)).float(), torch.full([3], 2.0))
    assert len(graphs) == 1
    (cache,) = f._weft_capture.caches.values()
    assert cache.entries[0].guards == ()
    assert getattr(cache.entries[0].check, "program", ()) == ()  # no rows: nothing runs in C


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        (lambda entries: [True], "gave 1 answers for"),
        (lambda entries: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_filters_that_fail(keep, text):
    f, _ = filtered(scaled, keep)
    with pytest.raises(weft.InvalidOption, match=text):
        f(torch.ones(3))


def test_a_filter_is_a_function():
    with pytest.raises(weft.InvalidOption, match="guard_filter_fn takes a function"):
        weft.compile(scaled, options={"guard_filter_fn": True})


# ---- marks


def branching(x):
    return x.sin() if x.shape[0] <= 100 else x.cos()


def test_a_range_settles_branches_and_is_guarded():
    f, graphs = make(branching)
    x = torch.ones(6)
    weft.mark_dynamic(x, 0, min=4, max=50)
    for size in (6, 4, 50, 17):
        y = x.new_ones(size)
        y = x if size == 6 else y
        assert torch.equal(f(y), branching(y))
    assert len(graphs) == 1
    guards = [str(guard) for e in _entries(f) for guard in e.guards if guard.kind == "SHAPE"]
    assert guards == ["4 <= L['x'].size(0) <= 50"]
    for size in (51, 3, 200, 101):
        y = torch.ones(size)
        assert torch.equal(f(y), branching(y))
    assert len(graphs) == 3


def _entries(f):
    return [entry for cache in f._weft_capture.caches.values() for entry in cache.entries]


def test_ranges_of_programs_written_for_torch_compile():
    f, graphs = make(branching)
    x = torch.ones(6)
    x._dynamo_dynamic_indices = {0}
    x._dynamo_dynamic_range = [SimpleNamespace(dim=0, min=2, max=8)]
    f(x)
    f(torch.ones(8))
    assert len(graphs) == 1
    f(torch.ones(9))
    assert len(graphs) == 2


def rowwise(x):
    return (x.sin() * 2).sum(0), x.reshape(-1).softmax(0) + x.shape[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "codegen"])
def test_one_graph_for_all_unbacked_sizes_but_0_and_1(backend):
    f = weft.compile(rowwise, backend=backend)
    for size, graphs in ((5, 1), (7, 1), (2, 1), (0, 2), (1, 3), (9, 3), (1, 3)):
        x = torch.randn(size, 3)
        weft.mark_unbacked(x, 0)
        for got, wanted in zip(f(x), rowwise(x), strict=True):
            torch.testing.assert_close(got, wanted)
        if backend != "codegen":  # which captures again what is between numbers
            assert weft.counters["stats"]["unique_graphs"] == graphs


def test_nothing_may_depend_on_an_unbacked_size():
    f, graphs = make(branching)
    for size in (6, 0, 1, 200):
        x = torch.randn(size)
        weft.mark_unbacked(x, 0)
        assert torch.equal(f(x), branching(x))
    assert weft.counters["graph_break"] == {"data-dependent-branch": 1}
    strict, _ = make(branching, fullgraph=True)
    x = torch.ones(6)
    weft.mark_unbacked(x, 0)
    with pytest.raises(weft.Unsupported, match="data-dependent-branch"):
        strict(x)
    weft.mark_unbacked(x, 0, min=2, max=100)
    assert torch.equal(strict(x), branching(x))


def test_what_an_operation_assumes_of_an_unbacked_size_is_checked():
    f, _ = make(lambda x, y: x + y)
    x, y = torch.ones(3), torch.ones(3)
    weft.mark_unbacked(x, 0)
    assert torch.equal(f(x, y), x + y)
    with pytest.raises(RuntimeError):
        f(torch.ones(4), y)
    assert torch.equal(f(x, y), x + y)


def test_wrong_marks():
    x = torch.ones(6)
    with pytest.raises(ValueError, match="size 6 is not in 7 to None"):
        weft.mark_dynamic(x, 0, min=7)
    with pytest.raises(IndexError, match="dimension 1"):
        weft.mark_dynamic(x, 1)


def test_named_sources_are_dynamic_at_once():
    f, graphs = make(static, dynamic=False)
    with weft.config.patch(dynamic_sources="L['x'], L['n']"):
        for size in (3, 4, 5):
            assert torch.equal(f(torch.ones(size), size), static(torch.ones(size), size))
    assert len(graphs) == 1


def test_floats_can_be_constants():
    with weft.config.patch(specialize_float=True):
        f, graphs = make(static)
        for n in (0.5, 0.25, 0.75):
            f(torch.ones(3), n)
        assert len(graphs) == 3
    f, graphs = make(static)
    for n in (0.5, 0.25, 0.75):
        f(torch.ones(3), n)
    assert len(graphs) == 2


# ---- what varies, from process to process

LEARNING = """
import torch, weft
weft.config.automatic_dynamic_local_pgo = {on}
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

@weft.compile(backend=backend)
def f(x, n):
    y = x * n
    weft.graph_break()
    return y.sum() + n

for size in {sizes}:
    x = torch.ones(size)
    assert f(x, size).item() == size * size + size
print(len(graphs))
"""


def graphs_in_a_new_process(tmp_path, sizes, on=True):
    file = tmp_path / "program.py"
    file.write_text(LEARNING.format(sizes=sizes, on=on))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_the_next_process_compiles_what_varies_dynamic_at_once(tmp_path):
    assert graphs_in_a_new_process(tmp_path, [4, 5, 6]) == 4
    assert graphs_in_a_new_process(tmp_path, [7, 8, 9]) == 2
    assert graphs_in_a_new_process(tmp_path, [7, 8], on=False) == 4


# ---- what is guarded whatever is asked


def test_hooks_are_guarded():
    net = Net()
    f, graphs = make(net)
    x = torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(x)
        handle = net.fc.register_forward_hook(lambda module, args, out: out + 1)
        assert torch.equal(f(x), net(x))
        handle.remove()
        assert torch.equal(f(x), net(x))
    assert len(graphs) == 2


def test_deterministic_algorithms():
    ask = torch.is_deterministic_algorithms_warn_only_enabled

    def fn(x):
        made = torch.empty_like(x), torch.empty(2, dtype=torch.int8), x.new_empty(3).add(1)
        return *made, x.clone().resize_(9)[6:], ask()

    def put(x):
        return x.clone().put_(torch.tensor([0]), x[:1])

    def unpool(x):
        indices = torch.arange(6).reshape(1, 2, 3)
        return torch.nn.functional.max_unpool2d(x.reshape(1, 2, 3), indices, 1)

    x, compiled = torch.ones(6), weft.compile(fn)
    varying = (("put_", weft.compile(put)), ("max_unpooling2d_forward_out", weft.compile(unpool)))
    try:
        for on, warn_only in ((False, False), (True, False), (True, True), (True, False)):
            torch.use_deterministic_algorithms(on, warn_only=warn_only)
            ours, eager = compiled(x), fn(x)
            assert ours[-1] == eager[-1] == warn_only
            if on:
                torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
            for name, function in varying if on else ():
                caught = pytest.warns(UserWarning) if warn_only else pytest.raises(RuntimeError)
                with caught as seen:
                    function(x)
                said = str(seen.list[0].message if warn_only else seen.value)
                assert f"{name} does not have a deterministic" in said
    finally:
        torch.use_deterministic_algorithms(False)


def test_settings_that_a_module_computes(monkeypatch):
    def fn(x):
        return x + torch.backends.cudnn.benchmark + deterministic.fill_uninitialized_memory

    deterministic = torch.utils.deterministic
    f, graphs = make(fn)
    assert f(torch.ones(2)).tolist() == [2, 2]
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", False)
    assert f(torch.ones(2)).tolist() == [1, 1]
    with torch.backends.cudnn.flags(benchmark=True):
        assert f(torch.ones(2)).tolist() == [2, 2]
    assert len(graphs) == 3
