"""Logs are switched by artifact; spans charge each stage its own time."""

import logging
import subprocess
import sys

import pytest
from weft_core import events
from weft_core.errors import InvalidOption


@pytest.fixture(autouse=True)
def quiet():
    yield
    events.set_logs(**dict.fromkeys(events.ARTIFACTS, False))
    events.reset()


def test_artifact_is_silent_until_enabled(caplog):
    log = events.logger("guards", "recompiles")
    assert log.name == "weft.guards.recompiles"
    log.info("unseen")
    events.set_logs(recompiles=True)
    assert events.enabled("recompiles")
    log.info("seen")
    log.debug("detail")
    events.set_logs(recompiles=logging.DEBUG)
    log.debug("more detail")
    events.set_logs(recompiles=False)
    log.info("unseen again")
    assert caplog.messages == ["seen", "more detail"]


def test_unknown_artifact_is_an_error():
    with pytest.raises(InvalidOption, match="did you mean 'guards'"):
        events.set_logs(guard=True)


def test_environment_goes_to_stderr():
    program = "from weft_core import events; events.logger('s', 'guards').debug('hello')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"WEFT_LOGS": "+guards,nonsense"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "[weft.s.guards] hello" in done.stderr
    assert "nonsense" in done.stderr


def test_spans_charge_self_time(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 10.0])  # outer opens, inner opens, inner closes, outer closes
    monkeypatch.setattr(events.time, "perf_counter", lambda: next(clock))
    with events.span("outer"):
        assert events.current_stage() == "outer"
        with events.span("inner", "detail"):
            assert events.current_stage() == "inner"
    assert events.current_stage() is None
    assert events.timings["outer"].seconds == 7.0
    assert events.timings["inner"].seconds == 3.0
    assert "outer" in events.timings_table()


def test_watched_stages():
    seen = []
    stop = events.watch_stages(lambda *event: seen.append(event))
    with events.span("outer", "f"), events.span("inner"):
        pass
    stop()
    with events.span("unseen"):
        pass
    begun = [("outer", "f", None), ("inner", "", None)]
    assert seen[:2] == begun
    assert [event[:2] for event in seen[2:]] == [("inner", ""), ("outer", "f")]
    assert 0 <= seen[2][2] <= seen[3][2]


def test_span_closes_on_error_and_logs(caplog):
    events.set_logs(timings=True)
    with pytest.raises(ZeroDivisionError), events.span("stage"):
        raise ZeroDivisionError
    assert events.current_stage() is None
    assert any("stage" in message for message in caplog.messages)


def test_reset_clears_counters():
    events.counters["stats"]["unique_graphs"] += 1
    events.reset()
    assert not events.counters


def test_an_artifact_says_which_cache_it_bypasses():
    assert {artifact.skipped_by for artifact in events.ARTIFACTS.values()} == {
        "",
        "captures",
        "graphs",
    }
    assert not events.bypasses("graphs")
    events.set_logs(schedule=True, guards=True)
    assert events.bypasses("graphs") and not events.bypasses("captures")
