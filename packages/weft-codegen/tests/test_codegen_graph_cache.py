"""Graphs whose program is on disk are loaded without lowering; damaged entries are made again."""

import pickle
import stat

import pytest
import torch
from codegen_check import trace
from weft_codegen import compile as pipeline
from weft_codegen import graph_cache
from weft_codegen.compile import compile_graph
from weft_codegen.config import Options, settings
from weft_core import events
from weft_core.cachedir import read_checked, write_checked

X, W = torch.randn(64, 64), torch.randn(64, 64)


def layer(x, w):
    return torch.softmax(torch.relu(x @ w) * 2, 1)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    with settings.patch(verify_ir=False):
        yield tmp_path


@pytest.fixture
def lowered(monkeypatch):
    """The graphs that were lowered."""
    seen = []
    make = pipeline.make_program

    def record(gm, *args):
        seen.append(gm)
        return make(gm, *args)

    monkeypatch.setattr(pipeline, "make_program", record)
    return seen


def run(function=layer, inputs=(X, W), options=Options()):
    compiled = compile_graph(trace(function, inputs), list(inputs), options=options)
    torch.testing.assert_close(compiled(*inputs)[0], function(*inputs))
    return compiled


def entry(folder):
    (path,) = (folder / "lowered").iterdir()
    return path


def test_a_known_graph_is_not_lowered(lowered, folder):
    first = run()
    counted = []
    for _ in range(2):
        events.counters.clear()
        second = run()
        counted.append({name: dict(counts) for name, counts in events.counters.items()})
    assert len(lowered) == 1 and second.path == first.path
    assert counted[0] == counted[1]
    assert counted[0]["codegen"]["kernels"] >= 1 and counted[0]["codegen"]["known_graphs"] == 1
    assert counted[0]["extern"] == {"aten.mm.default": 1}
    assert stat.S_IMODE((folder / "lowered").stat().st_mode) == 0o700


def test_constants_are_the_new_graphs_own(lowered):
    for scale in (2.0, 3.0):
        constant = torch.full((64,), scale)
        run(lambda x, c=constant: x.sin() * c, (X,))
    assert len(lowered) == 1


def test_mutation_and_failing_operators_survive(lowered):
    def bump(x, i):
        x.copy_(x + 1)
        return torch.index_reduce(x, 0, i, x, "prod")

    wrong, index = torch.arange(64) + 4, torch.arange(64)
    for _ in range(2):
        x = X.clone()
        compiled = compile_graph(trace(bump, (x, index)), [x, index])
        compiled(x, index)
        torch.testing.assert_close(x, X + 1)
        assert x._version == 1
        with pytest.raises((IndexError, RuntimeError)) as expected:
            bump(X.clone(), wrong)
        with pytest.raises(expected.type, match=str(expected.value).splitlines()[0]):
            compiled(X.clone(), wrong)
    assert len(lowered) == 1


DIFFERENT = {
    "shape": (layer, (torch.randn(9, 64), W)),
    "strides": (layer, (torch.randn(64, 64).t(), W)),
    "dtype": (layer, (X.double(), W.double())),
    "number": (lambda x, w: torch.softmax(torch.relu(x @ w) * 2.5, 1), (X, W)),
    "operator": (lambda x, w: torch.softmax(torch.tanh(x @ w) * 2, 1), (X, W)),
    "argument": (lambda x, w: torch.softmax(torch.relu(w @ w) * 2, 1), (X, W)),
    "options": (layer, (X, W), Options(epilogue_fusion=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_lowered(what, lowered):
    run()
    run(*DIFFERENT[what])
    assert len(lowered) == 2


def test_minus_zero_is_not_zero(lowered):
    for zero in (0.0, -0.0):
        made = run(lambda x, z=zero: torch.full_like(x, z), (X,))(X)[0]
        assert torch.signbit(made).all() == (str(zero) == "-0.0")


@pytest.mark.parametrize("damage", ["bytes", "another key", "not ours", "no program"])
def test_a_damaged_entry_is_made_again(damage, lowered, folder):
    run()
    path = entry(folder)
    good = path.read_bytes()
    if damage == "bytes":
        path.write_bytes(good[:-3] + b"abc")
    elif damage == "another key":
        payload = pickle.loads(read_checked(path))
        write_checked(path, pickle.dumps(("0" * 64, payload[1])))
    elif damage == "not ours":
        write_checked(path, pickle.dumps("hello"))
    else:
        next((folder / "programs").iterdir()).unlink()
    run()
    assert len(lowered) == 2
    run()
    assert len(lowered) == 2


def test_symbolic_sizes_are_lowered_each_time():
    from weft_core.fake import fake_mode, make_shape_env, to_fake
    from weft_core.tracing import trace_aten

    fake = to_fake(fake_mode(make_shape_env()), X, dynamic_dims=[0], source_name="x")
    assert graph_cache.graph_key(trace_aten(torch.sin, [fake]), Options()) is None


@pytest.mark.parametrize("artifact", events.ARTIFACTS)
def test_an_artifact_shows_as_much_when_the_program_is_on_disk(artifact, caplog):
    """A new artifact that is written while a graph is lowered needs `skipped_by="graphs"`."""
    shown = []
    for _ in range(2):
        caplog.clear()
        events.set_logs(**{artifact: True})
        try:
            run(with_a_declined_operator, (X, W))
        finally:
            events.set_logs(**{artifact: False})
        shown.append([r.name for r in caplog.records if r.name.endswith(f".{artifact}")])
    if events.ARTIFACTS[artifact].skipped_by == "graphs":
        assert f"weft.codegen.{artifact}" in shown[0]
    assert shown[0] == shown[1]


def with_a_declined_operator(x, w):
    return layer(x, w).roll(1) + torch.linalg.inv(w + torch.eye(64) * 64)
