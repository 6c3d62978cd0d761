"""What codegen shows of its work: logs, the trace folder, the diagram."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from codegen_check import program_of, with_lines
from weft_codegen import Options, compile_graph
from weft_codegen.compile import make_program
from weft_codegen.diagram import svg_of
from weft_core.events import set_logs

X = torch.randn(8, 64)
W = torch.randn(64, 64)


def block(x, w):
    h = F.gelu(x @ w)
    return h.softmax(-1), h.sum(0)


@pytest.fixture
def logs(caplog):
    names = ("output_code", "fusion", "schedule", "perf_hints")
    set_logs(**dict.fromkeys(names, True))
    yield caplog
    set_logs(**dict.fromkeys(names, False))


def test_output_code_names_the_source_line_above_each_loop(logs):
    compile_graph(with_lines(block), [X, W])
    code = next(r.getMessage() for r in logs.records if r.name.endswith("output_code"))
    notes = re.findall(r"/\* (test_codegen_show.py:\d+: .*) \*/\n *(.*)", code)
    assert any("h.softmax(-1)" in note and "sub.Tensor, exp, sum" in note for note, _ in notes)
    assert any("h = F.gelu(x @ w)" in note for note, _ in notes)
    assert "for i0 in 0..8 parallel:" in code  # the loop program stands above its C


def test_comments_are_no_part_of_a_kernels_identity():
    from weft_codegen.kernels import emit_program

    plain, noted = (
        emit_program(program)[0].kernels
        for program in (program_of(block, X, W), make_program(with_lines(block), [X, W]))
    )
    assert set(plain) == set(noted)
    assert not any("test_codegen_show.py" in text for text in plain.values())
    assert any("test_codegen_show.py" in text for text in noted.values())


def test_fusion_log_says_why_not(logs):
    compile_graph(with_lines(block), [X, W])
    lines = [r.getMessage() for r in logs.records if r.name.endswith("fusion")]
    assert any(line.startswith("fused:") for line in lines)
    assert any(re.match(r"not fused \(they reduce different axes\): buf", line) for line in lines)
    between = program_of
    logs.clear()
    between(lambda x, w: (x.exp() * 2, (x.exp() @ w) + x.exp()), X, W)
    assert any(r.name.endswith("schedule") for r in logs.records)


@pytest.mark.slow
def test_trace_writes_every_stage(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_DUMP", str(tmp_path))
    run = compile_graph(with_lines(block), [X, W], options=Options(trace_graph_diagram=True))
    names = sorted(path.name for path in tmp_path.iterdir())
    stages = "graph.py loops.txt program.txt diagram.svg kernels.c host.c build.sh".split()
    assert names == [f"{k:03}-codegen.{stage}" for k, stage in enumerate(stages)]
    graph = subprocess.run(
        [sys.executable, str(tmp_path / names[0])], capture_output=True, text=True
    )
    assert graph.returncode == 0 and "tensor(" in graph.stdout, graph.stderr
    subprocess.run(["sh", names[-1]], cwd=tmp_path, check=True)
    assert (tmp_path / "program.so").exists()
    torch.testing.assert_close(run(X, W)[0], block(X, W)[0])


def test_nothing_is_written_without_being_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("WEFT_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    compile_graph(with_lines(block), [X, W])
    assert list(tmp_path.iterdir()) == []


def test_the_diagram_has_a_box_a_step():
    program = program_of(block, X, W)
    root = ElementTree.fromstring(svg_of(program))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "aten.mm.default" in texts
    assert {name for name in texts if name.startswith("kernel")} == set(program.kernels)
    boxes = len(list(root.iter("{http://www.w3.org/2000/svg}rect")))
    assert boxes == len(program.inputs) + len(program.steps) + len(program.outputs)
