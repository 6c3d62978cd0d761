"""A short run of each search of integration/stress."""

import pytest

from integration.stress import faults, kills, threads


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch):
    """The searches set the cache folder themselves: put the setting back."""
    monkeypatch.setenv("WEFT_CACHE_DIR", "unset")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_threads_get_the_results_of_eager(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    failures, calls = threads.run(threads=3, minutes=0.1)
    assert not failures and calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_killed_compiles_leave_a_cache_that_works():
    failures, killed = kills.run(times=5)
    assert not failures and killed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", [faults.file_in_its_place, faults.swapped_entries])
def test_cache_faults_lose_nothing(fault):
    assert faults.run({fault: faults.FAULTS[fault]}) == ([], 1)
