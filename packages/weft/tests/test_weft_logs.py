"""Every log artifact says something, under names that people can read."""

import re

import pytest
import torch
import weft
from torch import nn
from weft_core import events


@pytest.fixture
def logs(caplog):
    weft.reset()
    yield caplog
    weft.set_logs(all=False)
    weft.reset()


seen: list[int] = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = nn.functional.gelu(self.layers[0](x))
        seen.append(x.shape[0])
        print("rows", x.shape[0])
        if h.sum() > 1e9:
            h = h * 2
        return self.layers[1](h).softmax(-1)


def run():
    net = weft.compile(Net(), options={"max_autotune": True})
    for rows in (3, 4):
        net(torch.randn(rows, 16)).sum().backward()
    with weft.config.patch(compiled_autograd=True):
        for rows in (3, 4, 5):
            net(torch.randn(rows, 16)).sum().backward()
    with torch.no_grad():
        weft.compile(torch.sin, options={"triton.cudagraphs": True})(torch.randn(100))


def texts(logs):
    """What each artifact logged."""
    found = {name: [] for name in events.ARTIFACTS}
    for record in logs.records:
        found.get(record.name.rsplit(".", 1)[-1], []).append(record.getMessage())
    return found


@pytest.mark.slow
def test_every_artifact_says_something(logs):
    weft.set_logs(all=True)
    run()
    weft.set_logs(timings=False)
    found = texts(logs)
    silent = {name for name, lines in found.items() if not lines}
    assert silent <= {"autotuning"}  # the sizes may leave nothing to tune
    assert any("original bytecode of Net.forward" in text for text in found["bytecode"])
    assert any("rewritten bytecode of Net.forward" in text for text in found["bytecode"])
    effects = "\n".join(found["side_effects"])
    assert "write L['self'] (Net): calls" in effects and "write G['seen'] (list)" in effects
    assert "call print after the graph" in effects or "call print before the graph" in effects
    assert any("self.layers[1](h).softmax(-1)" in text for text in found["trace_source"])
    assert any("bytes moved less" in text for text in found["fusion"])
    assert all("weft_run" not in text for text in found["kernel_code"])
    assert any("weft_run" in text for text in found["output_code"])
    assert any("not-on-a-gpu" in text for text in found["cudagraphs"])
    (tree,) = found["timings"]
    assert re.search(r"^ +capture .*\n", tree, re.MULTILINE)
    assert re.search(r"^ +backend .*\n +codegen |^ +backend .*\n +aot", tree, re.MULTILINE)


def test_inputs_of_graphs_have_short_names(logs):
    weft.set_logs(graph_code=True)
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 2))
    weft.compile(net, backend="eager")(torch.randn(2, 4))
    (code,) = texts(logs)["graph_code"]
    names = re.search(r"def forward\((.*)\)", code)[1].split(", ")[1:]
    assert names[1:5] == ["_0_0_weight", "_0_0_bias", "_0_1_weight", "_0_1_bias"]


def test_a_long_name_keeps_its_end():
    graphs = []
    net = nn.Linear(2, 2)
    for depth in range(4):
        net = nn.ModuleDict({f"a_module_with_a_long_name_{depth}": net})

    def forward(x):
        inner = net
        for depth in reversed(range(4)):
            inner = inner[f"a_module_with_a_long_name_{depth}"]
        return inner(x)

    weft.compile(forward, backend=lambda gm, _: graphs.append(gm) or gm.forward)(torch.ones(1, 2))
    names = [node.name for node in graphs[0].graph.find_nodes(op="placeholder")]
    assert max(map(len, names)) < 40 and any(name.endswith("name_0_weight") for name in names)
