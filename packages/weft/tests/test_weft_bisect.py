"""`weft.bisect`: bugs planted in each stage are found, with the operator and a script."""

import math
import textwrap
from dataclasses import replace

import pytest
import torch
import weft
from weft.__main__ import main
from weft.judge import Outcome, difference
from weft.minimise import Candidate, first, minimise
from weft_capture import convert  # noqa: F401  fills the tables of rules
from weft_capture.functions import table
from weft_capture.model.constant import constant
from weft_codegen.loops.lower import decompose, lowering
from weft_codegen.loops.ops import OPS

F = torch.nn.functional


def program(x, w):
    y = F.gelu(x @ w)
    z = torch.tanh(y) * 2 + y
    return F.silu(z).sum(-1)


LINE = program.__code__.co_firstlineno


@pytest.fixture
def args():
    torch.manual_seed(0)
    return torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


def run(script):
    """Run a script that a finding has, with nothing read from the disk cache."""
    with weft.config.patch(verify_ir=True):
        exec(compile(script, "found.py", "exec"), {})


def plant_lowering(monkeypatch):
    monkeypatch.setitem(lowering.LOWERINGS, "aten.tanh", lowering.LOWERINGS["aten.sigmoid"])


@pytest.mark.slow
@pytest.mark.cc
def test_a_wrong_lowering_is_found_with_its_operator_and_a_script(monkeypatch, args):
    plant_lowering(monkeypatch)
    found = weft.bisect(program, args)
    assert (found.stage, found.graph) == ("lowering", "captured graph 0, forward")
    assert found.operators == ("torch.ops.aten.tanh.default",) and len(found.kernels) == 1
    assert found.where == f"{__file__}:{LINE + 2}"
    assert "torch.tensor([[" in found.script and found.script.count("torch.ops") == 2
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(found.script)
    monkeypatch.undo()
    run(found.script)


@pytest.mark.slow
@pytest.mark.cc
def test_a_wrong_decomposition_is_found(monkeypatch, args):
    right = decompose._table

    def wrong():
        return {**right(), torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(1.01 * x)}

    monkeypatch.setattr(decompose, "_table", wrong)
    found = weft.bisect(program, args)
    assert (found.stage, found.graph) == ("decompositions", "captured graph 0")
    assert found.operators == ("torch.nn.functional.silu",)
    assert found.where == f"{__file__}:{LINE + 3}"
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(found.script)
    monkeypatch.undo()
    run(found.script)


def broken(x, n):
    y = x * 2
    if x.sum() > -1e9:
        y = y + math.hypot(3.0, n)
    return y * math.sqrt(n)


@pytest.mark.slow
@pytest.mark.cc
def test_a_wrong_capture_rule_is_found_behind_a_graph_break(monkeypatch):
    monkeypatch.setitem(table.ROWS, math.hypot, lambda tx, a, b: constant(7.0))
    found = weft.bisect(broken, (torch.ones(4), 4.0))
    assert (found.stage, found.operators) == ("capture", ("math.hypot(3.0, n)",))
    assert found.where == f"{__file__}:{broken.__code__.co_firstlineno + 3}"
    assert "tensor + 1, math.hypot(3.0, n)" in found.script and "    4.0," in found.script
    with pytest.raises(AssertionError):
        run(found.script)
    monkeypatch.undo()
    run(found.script)  # which passes once the rule is right


@pytest.mark.slow
def test_a_script_of_a_wrong_capture_rule_takes_tensors(monkeypatch):
    def wrong(tx, x, *args):
        return tx.graph.emit("call_function", torch.sin, [x], {})

    monkeypatch.setitem(table.ROWS, torch.special.expit, wrong)
    found = weft.bisect(lambda x, k: torch.special.expit(x * k) + 1, (torch.ones(4), 2.0))
    assert found.stage == "capture" and "torch.special.expit(x * k)" in found.script
    with pytest.raises(AssertionError):
        run(found.script)


@pytest.mark.slow
@pytest.mark.cc
def test_a_wrong_kernel_is_found(monkeypatch, args):
    right = OPS["tanh"]
    monkeypatch.setitem(OPS, "tanh", replace(right, c="({0})"))
    found = weft.bisect(program, args)
    assert found.stage == "kernel" and found.operators == ("torch.ops.aten.tanh.default",)


@pytest.mark.slow
@pytest.mark.cc
def test_a_wrong_backward_is_found(monkeypatch):
    monkeypatch.setitem(lowering.LOWERINGS, "aten.cos", lowering.LOWERINGS["aten.exp"])
    x = torch.linspace(-2, 2, 9, requires_grad=True)
    found = weft.bisect(lambda x: torch.sin(x * 2) + 1, (x,))
    assert (found.stage, found.graph) == ("lowering", "captured graph 0, backward")
    assert found.operators == ("torch.ops.aten.cos.default",)


@pytest.mark.slow
@pytest.mark.cc
def test_a_failing_stage_is_found(monkeypatch, args):
    def fails(call, x):
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(lowering.LOWERINGS, "aten.tanh", fails)
    found = weft.bisect(program, args)
    assert found.stage == "lowering" and "planted" in found.difference
    assert found.operators == ("torch.ops.aten.tanh.default",)
    with pytest.raises(weft.BackendCompilerError, match="planted"):
        run(found.script)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layers(x).tanh() + self.calls


@pytest.mark.slow
@pytest.mark.cc
def test_nothing_is_found_where_nothing_differs_and_state_stays(args):
    assert not weft.bisect(program, args)
    net, x = Net(), torch.randn(4, 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = weft.bisect(weft.compile(net), (x,))
    assert not found and "no stage" in str(found)
    assert net.calls == 0 and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(x):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.slow
@pytest.mark.cc
def test_a_training_step_is_bisected_on_copies_of_its_state(monkeypatch):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not weft.bisect(step, (torch.ones(2, 4),))
    plant_lowering(monkeypatch)
    found = weft.bisect(step, (torch.ones(2, 4),))
    assert found.stage == "lowering" and found.operators == ("torch.ops.aten.tanh.default",)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.cc
def test_the_command_bisects_what_a_script_compiles(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(
            """\
            import sys
            import torch, weft
            from weft_codegen.loops.lower import lowering, rows

            @weft.compile
            def right(x):
                return x + 1

            net = weft.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
            table, good = lowering.LOWERINGS, lowering.LOWERINGS["aten.tanh"]
            for step in range(3):
                if step == 2 and sys.argv[1:] == ["wrong"]:
                    table["aten.tanh"] = table["aten.sigmoid"]
                try:
                    assert right(net(torch.ones(4, 4))).shape == (4, 4)
                finally:
                    table["aten.tanh"] = good
            """
        )
    )
    assert main(["bisect", str(path), "--", "wrong"]) == 1
    out = capsys.readouterr().out
    assert "lowering makes a result that differs" in out and "torch.ops.aten.tanh.default" in out
    assert main(["bisect", str(path), "--", "right"]) == 0
    assert "no compiled call differs" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.cc
def test_the_repro_file_of_a_failure_becomes_smaller(monkeypatch, args, capsys):
    def fails(call, x):
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(lowering.LOWERINGS, "aten.tanh", fails)
    with weft.config.patch(verify_ir=True), pytest.raises(weft.BackendCompilerError) as caught:
        weft.compile(program)(*args)
    path = str(caught.value).split("python -m weft bisect ")[1].split("`")[0]
    assert main(["bisect", path]) == 1
    assert "torch.ops.aten.tanh.default" in capsys.readouterr().out


def chain(x, w):
    y = (x @ w).relu().view(8, 4, 4)
    return torch.cat([y, y.tanh()], 1), x.double().sum()


def test_the_minimiser_drops_operators_shapes_and_outputs():
    graph = torch.fx.symbolic_trace(chain)
    seen = []

    def fails(candidate):
        result = candidate.graph(*candidate.fresh_inputs())
        seen.append(candidate.size)
        assert result is not None
        return "tanh" * any("tanh" in str(node.target) for node in candidate.calls)

    smallest = minimise(Candidate(graph, (torch.randn(8, 16), torch.randn(16, 16))), fails)
    assert smallest.size == (1, 1) and [n.name for n in smallest.calls] == ["tanh"]
    assert seen[0][0] < 8 and smallest.inputs[0].dtype is torch.float32


def test_the_minimiser_keeps_what_the_failure_needs():
    graph = torch.fx.symbolic_trace(lambda x: (x.exp().sum(0) + 1).log())

    def fails(candidate):
        kinds = [node.target for node in candidate.calls]
        return "both" * ({"exp", "log"} <= set(kinds) and candidate.inputs[0].shape[-1] >= 3)

    smallest = minimise(Candidate(graph, (torch.randn(6, 12, dtype=torch.float64),)), fails)
    assert {"exp", "log"} <= {n.target for n in smallest.calls} and len(smallest.calls) <= 3
    assert smallest.inputs[0].shape == (1, 3) and smallest.inputs[0].dtype is torch.float32


def outcome(*values):
    return Outcome({f"result {i}": value for i, value in enumerate(values)})


def test_the_judge_allows_rounding_and_nothing_else():
    exact = torch.linspace(1, 2, 5, dtype=torch.float64)
    eager = exact.float()
    near = eager + 1e-6
    assert not difference(outcome(near), outcome(eager), outcome(exact))
    assert "error" in difference(outcome(near + 0.01), outcome(eager), outcome(exact))
    assert "dtype" in difference(outcome(exact), outcome(eager), None)
    assert "shape" in difference(outcome(eager[:2]), outcome(eager), None)
    nan = torch.tensor([1.0, float("nan"), float("inf")])
    assert not difference(outcome(nan), outcome(nan), None)
    assert difference(outcome(nan.nan_to_num()), outcome(nan), None)
    assert difference(outcome(torch.tensor([1, 2])), outcome(torch.tensor([1, 3])), None)
    assert difference(outcome(3), outcome(4), None) and not difference(outcome(4), outcome(4), None)
    assert "raises ValueError" in difference(Outcome(error=ValueError("x")), outcome(4), None)
    assert not difference(Outcome(error=ValueError("x")), Outcome(error=ValueError("y")), None)


def test_the_first_number_that_fails():
    for culprit in (1, 2, 7, 9):
        assert first(9, lambda n: n >= culprit) == culprit
