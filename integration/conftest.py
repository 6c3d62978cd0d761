"""Fixtures of the integration tests: a cache of their own, and a clean slate for each test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import `models`


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """Keep the user's disk cache out of the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def clean():
    """Start with empty counters and caches (other suites share the process), and leave none."""
    import weft

    weft.reset()
    yield
    weft.reset()
