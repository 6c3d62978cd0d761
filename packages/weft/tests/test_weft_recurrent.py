"""Recurrent networks: an LSTM stays one operator a layer on a CPU, long sequences break."""

import copy

import pytest
import torch
import weft
from torch import nn

KINDS = {
    "plain": {},
    "both_ways": {"num_layers": 2, "bidirectional": True},
    "without_biases": {"bias": False, "batch_first": True},
    "projected": {"proj_size": 5},
    "dropout": {"num_layers": 2, "dropout": 0.5},
}


def run(model, x, hidden=None):
    torch.manual_seed(3)
    out, (h, c) = model(x, hidden)
    (out.square().sum() + h.sin().sum() + c.cos().sum()).backward()
    grads = [p.grad.clone() for p in (x, *model.parameters())]
    x.grad = None
    model.zero_grad()
    return [out, h, c, *grads]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
def test_an_lstm_is_eagers(kind):
    torch.manual_seed(0)
    model = nn.LSTM(8, 16, **KINDS[kind])
    options = {"fallback_random": True}
    whole = kind != "projected"  # that one warns
    compiled = weft.compile(copy.deepcopy(model), fullgraph=whole, options=options)
    for batch in (3, 3, 5):
        x = torch.randn(3, batch, 8, requires_grad=True)
        torch.testing.assert_close(run(compiled, x), run(model, x))
    hidden = [state.detach() * 2 for state in run(model, x)[1:3]]
    torch.testing.assert_close(run(compiled, x, hidden), run(model, x, hidden))
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(x), model.eval()(x))
    torch.testing.assert_close(run(compiled, x), run(model, x))


def test_an_lstm_of_many_steps_is_one_graph():
    model = nn.LSTM(4, 4)
    # Isolated, because an equal request of another test may have seen the number of steps vary.
    compiled = weft.compile(copy.deepcopy(model), fullgraph=True, isolate_recompiles=True)
    x = torch.randn(2000, 2, 4, requires_grad=True)
    torch.testing.assert_close(run(compiled, x), run(model, x))


@pytest.mark.parametrize("reverse", [False, True])
def test_an_lstm_of_varying_sizes_is_one_operator_a_layer(reverse):
    model = nn.LSTM(4, 4, num_layers=2, bidirectional=reverse)
    compiled = weft.compile(copy.deepcopy(model), fullgraph=True, isolate_recompiles=True)
    graphs, before = weft.counters["stats"]["unique_graphs"], weft.counters["extern"].copy()
    for steps, batch in ((3, 2), (3, 5), (3, 4), (6, 4), (9, 3)):
        x = torch.randn(steps, batch, 4, requires_grad=True)
        torch.testing.assert_close(run(compiled, x), run(model, x))
    assert weft.counters["stats"]["unique_graphs"] - graphs <= 3
    called = weft.counters["extern"] - before
    assert called["weft_core.lstm_layer_backward.default"] > 0 == called["aten.addmm.default"]


def test_a_copy_of_what_an_lstm_layer_keeps_does_as_well():
    layer = torch.ops.weft_core.lstm_layer, torch.ops.weft_core.lstm_layer_backward
    sizes = (5, 3, 2), (16, 2), (16, 4), (16,), (16,), (3, 4), (3, 4)
    given = [torch.randn(size) for size in sizes]
    *made, kept = layer[0](*given, False, True)
    grads = [torch.randn_like(one) for one in made]
    whole, copied = (
        layer[1](*given, *made, workspace, *grads, False) for workspace in (kept, kept.clone())
    )
    torch.testing.assert_close(whole, copied)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_networks_of_many_steps_run_as_they_are(kind):
    model = kind(4, 4, batch_first=True)
    x = torch.randn(2, 300, 4)

    def step(x):
        return model(x.sin())[0].cos()

    torch.testing.assert_close(weft.compile(step)(x), step(x))
    [reason] = weft.explain(step)(x).breaks
    assert reason.code == "unrolled" and "300 steps" in str(reason)
    with weft.config.patch(unrolled_steps=2), pytest.raises(weft.WeftError, match="unrolled_steps"):
        weft.compile(step, fullgraph=True)(x[:, :5])
