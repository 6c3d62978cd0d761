"""`weft.report()` as a page: its data, its links, and what a browser makes of it."""

import html.parser
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
import weft
from weft.__main__ import main
from weft.reports import Report
from weft_capture import FrameReport
from weft_core import recording

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(autouse=True)
def reset():
    weft.reset()
    yield
    weft.config.record = False
    weft.reset()


class _Scripts(html.parser.HTMLParser):
    """The JSON parts of a page by id, as an HTML parser sees them."""

    def __init__(self, text):
        super().__init__()
        self.parts, self.current, self.links = {}, None, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[name] for name in ("src", "href") if name in given]
        self.current = given.get("id") if tag == "script" else None

    def handle_endtag(self, tag):
        self.current = None

    def handle_data(self, data):
        if self.current:
            self.parts[self.current] = json.loads(data)


def parts_of(report):
    return _Scripts(report.html).parts


def program(x, w):
    y = torch.nn.functional.gelu(x @ w)
    if y.sum() > 0:  # "</script><b>" must stay text
        y = y + 1
    return y.softmax(-1)


LINE = program.__code__.co_firstlineno


def run():
    compiled = weft.compile(program)
    w = torch.ones(4, 4, requires_grad=True)
    compiled(torch.ones(3, 4), w).sum().backward()
    compiled(torch.ones(5, 4), w)
    return weft.report()


def place(offset):
    return f"{__file__}:{LINE + offset}"


def test_a_recorded_frame_shows_the_code_that_replaces_it():
    assert parts_of(run())["f0"]["code"] == ""
    weft.config.record = True
    weft.reset()
    report = run()  # holds no code alive
    compiled = weft.compile(program)
    compiled(torch.ones(3, 4), torch.ones(4, 4))
    code = parts_of(weft.report())["f0"]["code"]
    assert "def program(x, w):" in code and f"return __resume_at_{LINE + 3}(y)" in code
    assert "def __resume_at_" in code and report.frames


def test_a_frame_with_its_break_source_and_guards():
    parts = parts_of(run())
    name, file, line, graphs, ops, breaks, recompiles, *_ = parts["summary"]["frames"][0]
    assert (name, file, line) == ("program", __file__, LINE)
    assert (graphs, breaks, recompiles) == (4, 2, 2) and ops >= 8
    frame = parts["f0"]
    (stop,) = frame["breaks"]
    assert (stop["code"], stop["line"], stop["count"]) == ("data-dependent-branch", LINE + 2, 2)
    assert stop["why"] and stop["remedy"]
    assert frame["sources"][0]["first"] == LINE
    assert frame["sources"][0]["lines"][0] == "def program(x, w):"
    guards = [text for entry in frame["guards"] for _, text, _ in entry]
    assert any("L['x'] is a Tensor" in text for text in guards)
    assert any("size of dim 0" in text and "3 -> 5" in text for text in frame["recompiles"])


def test_nothing_is_kept_until_it_is_asked_for():
    report = run()
    assert recording.current() is None and report.recording is None
    parts = parts_of(report)
    assert parts["f0"]["graphs"] == [] and not parts["summary"]["recorded"]
    assert {stage for stage, _, _ in parts["summary"]["stages"]} >= {"capture", "codegen"}


def test_graphs_are_kept_from_capture_to_code():
    weft.config.record = True
    parts = parts_of(run())
    first = parts["f0"]["graphs"][0]
    assert any("gelu(matmul" in text and line == place(1) for text, line in first["rows"])
    titles = {child["title"]: child for child in first["children"]}
    assert set(titles) == {"joint graph", "forward graph", "backward graph"}
    forward = titles["forward graph"]
    assert parts["summary"]["bandwidth"] > 1e6
    assert any("aten.mm.default" in text and line == place(1) for text, line in forward["rows"])
    kinds = {child["kind"]: child for child in forward["children"]}
    made, source, times = kinds["program"], kinds["source"], kinds["timed"]["seconds"]
    kernels = [step for step in made["steps"] if step["kind"] == "kernel"]
    assert kernels and all(place(1) in s["lines"] or place(2) in s["lines"] for s in kernels)
    assert all(step["bytes"] > 0 for step in kernels)
    assert all(t > 0 for t, s in zip(times, made["steps"], strict=True) if s["kind"] == "kernel")
    for step in kernels:
        symbol, text = source["kernels"][step["name"]]
        assert f"void {symbol}(" in text and symbol in source["host"]
    assert 'data-step="0"' in made["diagram"] and "for i0 in 0.." in made["schedule"]
    assert {buffer["memory"] for buffer in made["buffers"]} >= {"input", "owned"}
    assert place(1) in json.dumps(titles["backward graph"])


def test_recompiles_have_times_and_remedies():
    weft.config.record = True
    events = parts_of(run())["summary"]["recompiles"]
    assert [event["frame"][0] for event in events] == ["program", "program"]
    (miss,) = events[0]["misses"]
    assert (miss["what"], miss["old"], miss["new"]) == ("size of dim 0 of L['x']", "3", "5")
    assert miss["fix"] == "weft.mark_dynamic(x, 0)"
    assert 0 < events[0]["seconds"] < events[1]["seconds"]


def test_the_page_needs_no_other_file():
    weft.config.record = True
    report = run()
    assert _Scripts(report.html).links == []
    addresses = set(re.findall(r"https?://[^\s\"'<>\\]+", report.html))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert report._repr_html_().startswith("<iframe srcdoc=")


def test_graphs_compiled_without_a_frame_are_shown_too():
    import weft_codegen  # noqa: PLC0415

    weft.config.record = True
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Tanh()))
    weft_codegen.compile_graph(graph, [torch.ones(3)])
    parts = parts_of(weft.report())
    assert parts["summary"]["other"] == 1
    (graph,) = parts["other"]["graphs"]
    assert any("aten.tanh.default" in text for text, _ in graph["rows"])
    assert [child["kind"] for child in graph["children"]] == ["program", "source", "timed"]


def test_the_trace_nests(tmp_path):
    weft.config.record = True
    path = run().save_trace(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    by_name = {event["name"]: event for event in events}
    outer, inner = by_name["backend"], by_name["aot.joint"]
    last = max(event["ts"] + event["dur"] for event in events if event["name"] == "backend")
    assert outer["ph"] == "X" and inner["ts"] + inner["dur"] <= last
    assert {"capture", "codegen.emit", "guards"} <= set(by_name)


def test_reset_drops_what_was_kept():
    weft.config.record = True
    run()
    weft.reset()
    assert weft.report().recording.records == []


_SCRIPT = """
import sys, torch, weft
weft.compile(lambda x: x.sin() * 2)(torch.ones(int(sys.argv[1])))
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "status"), [("SystemExit(3)", 3), ("KeyError(1)", 1), ("SystemExit", 0)]
)
def test_the_command_writes_the_page_of_a_script(error, status, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script, page = tmp_path / "run.py", tmp_path / "page.html"
    script.write_text(_SCRIPT.format(error=error))
    trace = tmp_path / "trace.json"
    given = ["report", str(script), "-o", str(page), "--trace", str(trace), "--", "7"]
    assert main(given) == status
    parts = _Scripts(page.read_text()).parts
    assert parts["summary"]["frames"][0][3] == 1
    assert "float32[7]" in json.dumps(parts["f0"]["graphs"])
    assert json.loads(trace.read_text())["traceEvents"]


# ---- in a browser


def dom_of(path):
    """The page as Chromium has it once its scripts have run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@needs_chromium
@pytest.mark.slow
def test_a_browser_shows_the_break_beside_its_line(tmp_path):
    weft.config.record = True
    dom = dom_of(run().save(tmp_path / "page.html"))
    assert "graph break: data-dependent-branch ×2" in dom
    stop = dom.index('class="l link stop"')
    assert "data-dependent-branch" in dom[stop : stop + 1500]
    assert "matmul" in dom and ">backward</button>" in dom


@needs_chromium
@pytest.mark.slow
def test_ten_thousand_frames_make_few_elements(tmp_path):
    frames = tuple(FrameReport(f"f{k}", f"/project/m{k % 50}.py", k + 1) for k in range(10_000))
    dom = dom_of(Report(frames).save(tmp_path / "page.html"))
    assert "<b>10000</b> frames" in dom
    assert 10 < dom.count('class="row ') < 200
