"""Keep the user's disk cache out of the tests, and the umbrella's tables clean."""

import pytest
import weft.backends
from weft_core import events


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def clean_tables(monkeypatch):
    monkeypatch.setattr(weft.backends, "_registered", {})
    events.notified.clear()
