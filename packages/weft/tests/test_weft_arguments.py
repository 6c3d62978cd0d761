"""Every argument of the public interface is checked, and the message says what it takes."""

import pickle

import numpy as np
import pytest
import torch
import weft
from weft_core.errors import InvalidArgument, UnknownSetting


def function(x):
    return x + 1


class Odd:
    """Nothing takes one."""

    def __repr__(self):
        return "an odd thing"


BAD = {
    "fullgraph": ("yes", 1, None),
    "dynamic": (2, "x", np.int64(1)),
    "mode": (3, b"default", ["default"]),
    "options": ("x", {1: 2}, [("freezing", True)], {"freezing": "x"}, 3),
    "name": (3, b"x"),
    "disable": ("x", None, 0),
    "recompile_limit": (-1, 0, "3", 2.5, True),
    "isolate_recompiles": ("x", 2),
    "backend": (3, b"eager"),
}
ROWS = [(name, value) for name, values in BAD.items() for value in (*values, Odd())]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "value"), ROWS, ids=lambda part: repr(part)[:20])
@pytest.mark.parametrize("decorates", [False, True])
def test_a_wrong_argument_of_compile(name, value, decorates):
    with pytest.raises(weft.WeftError, match="takes|no option") as caught:
        weft.compile(*(() if decorates else (function,)), **{name: value})
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("value", [3, "x", int, torch.ones(2), Odd()])
def test_what_is_no_function(value):
    calls = [
        weft.compile, weft.explain, weft.disable, weft.allow_in_graph, weft.disallow_in_graph,
        weft.assume_constant_result, weft.substitute_in_graph, weft.substitute_in_graph(len),
        weft.register_backend, weft.watch_stages, weft.compiled_autograd.enable,
        lambda f: weft.aot_autograd(fw_compiler=f),
    ]  # fmt: skip
    for call in calls[:1] if value is int else calls:
        with pytest.raises(TypeError, match="takes a function"):
            call(value)


X = torch.ones(2, 3)
CALLS = {
    "mark_dynamic of a text": lambda: weft.mark_dynamic("x", 0),
    "mark_dynamic at a text": lambda: weft.mark_dynamic(X, "0"),
    "mark_dynamic at no ints": lambda: weft.mark_dynamic(X, [0, "1"]),
    "mark_dynamic to a text": lambda: weft.mark_dynamic(X, 0, max="9"),
    "mark_static of None": lambda: weft.mark_static(None),
    "mark_unbacked": lambda: weft.mark_unbacked(X, 1.5),
    "varying": lambda: weft.varying(min="2"),
    "register_backend": lambda: weft.register_backend(function, 3),
    "list_mode_options": lambda: weft.list_mode_options(3),
    "set_stance": lambda: weft.set_stance(3),
    "set_stance skip": lambda: weft.set_stance(skip_guard_eval_unsafe="x"),
    "set_logs": lambda: weft.set_logs(guards="x"),
    "load_cache_artifacts": lambda: weft.load_cache_artifacts("x"),
    "setting": lambda: setattr(weft.config, "recompile_limit", "3"),
    "setting beyond its limits": lambda: setattr(weft.config, "recompile_limit", -1),
    "patch": lambda: weft.config.patch(compiler_timeout=-1).__enter__(),
    "flag": lambda: setattr(weft.config, "progress", 1),
    "choice": lambda: setattr(weft.config, "on_compile_error", "ignore"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_wrong_argument(call):
    before = weft.config.as_dict()
    with pytest.raises(InvalidArgument, match="takes"):
        call()
    assert weft.config.as_dict() == before


def test_what_numpy_calls_an_int_is_one():
    weft.mark_dynamic(X.clone(), np.int64(0))
    with weft.config.patch(recompile_limit=np.int64(3)):
        assert weft.config.recompile_limit == 3


def test_a_setting_that_is_not_there():
    assert not hasattr(weft.config, "nope")
    assert getattr(weft.config, "nope", 3) == 3
    for call in (lambda: weft.config.recompile_limi, lambda: setattr(weft.config, "nope", 1)):
        with pytest.raises(UnknownSetting, match="Known"):
            call()


def test_wrong_counts_of_arguments_read_as_pythons():
    with pytest.raises(TypeError, match=r"list_mode_options\(\) takes from 0 to 1 positional"):
        weft.list_mode_options(1, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dump_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere"):
        weft.reset()
        monkeypatch.setenv("WEFT_DUMP", str(place))
        assert torch.equal(weft.compile(lambda x: x.sin() + 1)(X), X.sin() + 1)
        assert "is not written to" in str(weft.report())


@pytest.mark.filterwarnings("ignore")
def test_a_variable_of_the_environment_that_is_not_read_is_told(monkeypatch):
    from weft_core.settings import environment_flag

    weft.reset()
    for text, on in {"0": False, "1": True, "": True, "off": True}.items():
        monkeypatch.setenv("WEFT_PGO", text)
        assert environment_flag("WEFT_PGO") is on
    assert "WEFT_PGO=off is not read" in str(weft.report())
