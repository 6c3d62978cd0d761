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


def test_span_closes_on_error(caplog):
    with pytest.raises(ZeroDivisionError), events.span("stage"):
        raise ZeroDivisionError
    assert events.current_stage() is None
    assert events.timings["stage"].count == 1


def test_timings_are_logged_once_as_a_tree(caplog):
    events.set_logs(timings=True)
    for _ in range(2):
        with events.span("outer"), events.span("inner", "detail"):
            pass
    with events.span("inner"):
        pass
    assert caplog.messages == []
    events.set_logs(timings=False)
    text = caplog.messages[0]
    rows = [line.split() for line in text.splitlines()[1:]]
    expected = [("outer", "2x"), ("inner", "2x"), ("inner", "1x")]
    assert [(row[0], row[-1]) for row in rows] == expected
    assert text.splitlines()[2].startswith("    inner")
    events.set_logs(timings=logging.DEBUG)
    with events.span("outer", "f"):
        pass
    assert "outer f" in caplog.messages[-1]


def run(program, **environment):
    done = subprocess.run(
        [sys.executable, "-c", f"from weft_core import events\n{program}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_timings_are_logged_at_the_end_of_the_process():
    program = "with events.span('capture'): pass"
    assert run(program, WEFT_LOGS="timings").count("compile time") == 1


def test_all_but_one_and_help():
    program = (
        "print(*(events.enabled(n) for n in ('graph', 'guards')), file=__import__('sys').stderr)"
    )
    assert run(program, WEFT_LOGS="all,-guards").strip() == "True False"
    shown = run(program, WEFT_LOGS="help")
    assert all(f"  {name} " in shown for name in events.ARTIFACTS) and "False False" in shown
    events.set_logs(all=True, graph=False)
    assert not events.enabled("graph") and events.enabled("guards")


def test_logs_go_to_a_file_in_a_format(tmp_path):
    path = tmp_path / "weft.log"
    program = "events.logger('s', 'guards').info('hello')"
    given = {"WEFT_LOGS": "guards", "WEFT_LOGS_FORMAT": "%(levelname)s: %(message)s"}
    assert run(program, WEFT_LOGS_OUT=str(path), **given) == ""
    assert path.read_text() == "INFO: hello\n"
    said = run(program, WEFT_LOGS_OUT=str(tmp_path / "no" / "folder"), **given)
    assert "logs go to stderr" in said and "INFO: hello" in said
    said = run(program, WEFT_LOGS="guards", WEFT_LOGS_FORMAT="%(nonsense")
    assert "WEFT_LOGS_FORMAT" in said and "[weft.s.guards] hello" in said


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
