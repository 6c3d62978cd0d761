"""`weft.config` over settings groups: owners, errors, patches."""

from dataclasses import dataclass

import pytest
import weft
from weft.settings import Config, umbrella
from weft_core.settings import Settings


@dataclass
class Stage(Settings):
    depth: int = 3
    name: str = "stage"


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(Config, "_groups", lambda self: iter((umbrella, self.stage)))
    monkeypatch.setattr(Config, "stage", Stage(), raising=False)
    return Config()


def test_a_setting_reaches_its_owner(config):
    config.depth = 5
    assert config.stage.depth == 5
    assert config.as_dict()["depth"] == 5
    assert config.on_compile_error == "raise"
    config.reset()
    assert config.depth == 3


@pytest.mark.parametrize("name", ["dept", "on_compile_eror"])
def test_unknown_settings_suggest_the_nearest(config, name):
    with pytest.raises(weft.InvalidOption, match="did you mean"):
        setattr(config, name, 1)
    with pytest.raises(weft.InvalidOption):
        getattr(config, name)


def test_patch_changes_several_owners_and_restores_all(config):
    with config.patch(depth=9, on_compile_error="eager"):
        assert (config.depth, config.on_compile_error) == (9, "eager")
    assert (config.depth, config.on_compile_error) == (3, "raise")
    with pytest.raises(weft.InvalidOption), config.patch(depth=9, on_compile_error="nonsense"):
        pass
    assert config.depth == 3


def test_compiled_autograd_is_switched_once_a_change(config, monkeypatch):
    switched = []
    module = type("module", (), {"switch": staticmethod(switched.append)})
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    with config.patch(compiled_autograd=True):
        config.compiled_autograd = True
        assert switched == [True]
    assert switched == [True, False]
