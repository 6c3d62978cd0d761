"""Backends by name, by callable, and by registration."""

import pytest
import torch
import weft
from weft import backends


def test_built_in_names_are_listed():
    assert {"eager", "aot_eager", "codegen", "inductor", "cudagraphs"} <= set(weft.list_backends())
    assert "weft" not in weft.list_backends()


@pytest.mark.parametrize("wrong", ["codgen", 7])
def test_unknown_backend_is_named(wrong):
    with pytest.raises(weft.InvalidBackend) as caught:
        weft.lookup_backend(wrong)
    assert str(wrong) in str(caught.value)
    assert "codegen" in str(caught.value)


def test_unknown_backend_suggests_the_nearest():
    with pytest.raises(weft.InvalidBackend, match="did you mean 'inductor'"):
        weft.lookup_backend("indcutor")


def test_a_callable_is_its_own_backend():
    def mine(gm, inputs):
        return gm.forward

    assert weft.lookup_backend(mine) is mine


@pytest.mark.parametrize("name", [None, "other"])
def test_register_plainly_and_as_decorator(name):
    def mine(gm, inputs):
        return gm.forward

    assert weft.register_backend(mine, name) is mine
    assert weft.lookup_backend(name or "mine") is mine

    @weft.register_backend(name="decorated")
    def other(gm, inputs):
        return gm.forward

    assert weft.lookup_backend("decorated") is other
    assert {name or "mine", "decorated"} <= set(weft.list_backends())


def test_entry_points_are_loaded_on_use(monkeypatch):
    class Point:
        name = "theirs"

        def load(self):
            return "loaded"

    monkeypatch.setattr(backends, "_entry_points", lambda: {"theirs": Point()})
    assert "theirs" in weft.list_backends()
    assert weft.lookup_backend("theirs") == "loaded"


def test_a_stance_forces_a_backend_by_its_name():
    calls = []

    def counting(graph, inputs):
        calls.append("own")
        return graph.forward

    compiled = weft.compile(lambda x: x.cos(), backend=counting)
    with weft.set_stance(force_backend="eager"):
        assert torch.equal(compiled(torch.ones(2)), torch.ones(2).cos())
    assert calls == []
    with weft.set_stance("aot_eager_then_compile"):
        compiled(torch.ones(2))
        assert calls == []
        compiled(torch.ones(2))
    assert calls == ["own"]
    with pytest.raises(weft.InvalidBackend):
        weft.set_stance(force_backend="egaer")
