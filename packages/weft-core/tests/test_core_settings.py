"""Settings check names and types, and patches are undone."""

from dataclasses import dataclass
from typing import Literal

import pytest
from weft_core.errors import InvalidOption
from weft_core.settings import Settings


@dataclass
class Group(Settings):
    limit: int = 8
    rate: float = 0.5
    name: str | None = None
    mode: Literal["a", "b"] = "a"


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(InvalidOption, match="did you mean 'limit'"):
        Group().limi = 3


@pytest.mark.parametrize(
    ("name", "value"), [("limit", "3"), ("limit", True), ("rate", "x"), ("mode", "c"), ("name", 1)]
)
def test_wrong_type_is_refused(name, value):
    group = Group()
    with pytest.raises(InvalidOption, match=name):
        setattr(group, name, value)
    assert group == Group()


@pytest.mark.parametrize(("name", "value"), [("rate", 1), ("name", "x"), ("name", None)])
def test_allowed_values(name, value):
    group = Group()
    setattr(group, name, value)
    assert getattr(group, name) == value


def test_patch_restores_as_block_and_decorator():
    group = Group()

    @group.patch(limit=2)
    def inside():
        return group.limit

    assert inside() == 2
    assert inside() == 2
    with pytest.raises(ZeroDivisionError), group.patch(limit=3, mode="b"):
        assert group.as_dict() == {"limit": 3, "rate": 0.5, "name": None, "mode": "b"}
        raise ZeroDivisionError
    assert group == Group()


def test_failed_patch_changes_nothing():
    group = Group()
    with pytest.raises(InvalidOption), group.patch(limit=3, nonsense=1):
        pytest.fail("the block must not run")
    assert group == Group()


def test_reset():
    group = Group()
    group.limit = 1
    group.reset()
    assert group.limit == 8
