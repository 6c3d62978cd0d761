"""compile_graph and the torch.compile backend: the public interface."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from codegen_check import with_lines
from torch import fx
from weft_codegen import compile_graph
from weft_codegen.config import Options, settings
from weft_core import events
from weft_core.errors import InvalidOption

README = Path(__file__).parents[1] / "README.md"


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(torch.relu(x) * 2, 1).sum(0)


GRAPH = fx.symbolic_trace(Model())
X = torch.randn(8, 16)


def test_a_torch_level_graph_compiles():
    events.counters.clear()
    run = compile_graph(GRAPH, [X])
    torch.testing.assert_close(run(X)[0], Model()(X))
    assert events.counters["codegen"]["graphs"] == 1


def test_the_interpreter_can_stand_in_for_the_compiler():
    with settings.patch(interpret=True):
        run = compile_graph(GRAPH, [X])
    torch.testing.assert_close(run(X)[0], Model()(X))


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(InvalidOption, match="epilogue_fusion"):
        Options.parse({"epilog_fusion": True})


def test_options_turn_fusion_off():
    events.counters.clear()
    compile_graph(GRAPH, [X], options=Options(epilogue_fusion=False))
    assert events.counters["codegen"]["launches"] > 1


def test_without_a_compiler_the_graph_runs_eagerly(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.warns(UserWarning, match="install one"):
        run = compile_graph(GRAPH, [X])
    torch.testing.assert_close(run(X)[0], Model()(X))


def test_dynamic_sizes_serve_every_size():
    from weft_core.fake import fake_mode, make_shape_env, to_fake
    from weft_core.tracing import trace_aten

    mode = fake_mode(make_shape_env())
    fake = to_fake(mode, X, dynamic_dims=[0], source_name="x")
    run = compile_graph(trace_aten(Model(), [fake]), [fake])
    for rows in (8, 3, 21):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(run(x)[0], Model()(x))


def _python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_readme_blocks_run():
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S):
        done = _python(block)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_nothing_of_torchs_compiler_is_imported():
    done = _python(
        "import sys, torch\n"
        "from torch import fx\n"
        "from weft_codegen import compile_graph\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x): return x.sin().sum(0)\n"
        "x = torch.randn(4, 4)\n"
        "compile_graph(fx.symbolic_trace(M()), [x])(x)\n"
        "bad = [m for m in sys.modules if m.startswith(('torch._dynamo', 'torch._inductor'))]\n"
        "assert not bad, bad\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_written_complex_input():
    def step(x, y):
        x.mul_(2)
        y.copy_(x)
        return x.real

    args = [torch.randn(3, 4, dtype=torch.complex64) for _ in range(2)]
    copies = [arg.clone() for arg in args]
    (real,) = compile_graph(with_lines(step), args)(*args)
    torch.testing.assert_close(real, step(*copies))
    torch.testing.assert_close(args, copies)


def test_labels_after_a_minus_one_do_not_count():
    def loss(x, labels):
        return torch.nn.functional.multilabel_margin_loss(x, labels)

    args = [torch.randn(4, 5), torch.tensor([[1, -1, 2, 0, 3]] * 4)]
    (found,) = compile_graph(with_lines(loss), args)(*args)
    torch.testing.assert_close(found, loss(*args))
