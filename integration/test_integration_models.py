"""Every model of the zoo, inference and training, through every backend."""

import accuracy
import pytest
import torch
import weft
from models import ZOO
from models.case import loss_of

BACKENDS = ["eager", "aot_eager", "codegen"]


@pytest.mark.every(5)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ZOO)
def test_model_matches_eager(name, backend, training):
    case = ZOO[name]
    results = {}
    for dtype in (torch.float32, torch.float64):
        model = case.model(dtype, training=training)
        results[dtype] = accuracy.run(case, model, model, dtype, training)
    model = case.model(training=training)
    compiled = weft.compile(model, backend=backend)
    got = accuracy.run(case, model, compiled, torch.float32, training)
    assert accuracy.worst(got, results[torch.float32], results[torch.float64]) == []
    assert weft.counters["stats"]["unique_graphs"] >= 1
    assert weft.counters["stats"]["eager_fallbacks"] == 0
    assert backend != "codegen" or weft.counters["codegen"]["kernels"] >= 1
    # The second call runs from the cache, and training must not depend on the first one.
    model.zero_grad()
    if training:
        model.load_state_dict(case.model(training=True).state_dict())
    again = accuracy.run(case, model, compiled, torch.float32, training)
    assert accuracy.worst(again, results[torch.float32], results[torch.float64]) == []


@pytest.mark.parametrize("name", [name for name in ZOO if name != "branch"])
def test_model_is_one_graph(name):
    case = ZOO[name]
    model = weft.compile(case.model(), backend="eager", fullgraph=True)
    args, kwargs = case.inputs()
    with torch.no_grad():
        model(*args, **kwargs)
    assert weft.counters["stats"]["unique_graphs"] == 1


@pytest.mark.every(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt", "resnet", "bert"])
def test_a_training_step_is_one_graph(name, backend):
    case = ZOO[name]
    losses = {}
    for compiled in (False, True):
        model = case.model(torch.float64, training=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(model, optimizer, args, kwargs):
            optimizer.zero_grad()
            loss = loss_of(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            return loss

        call = weft.compile(step, backend=backend, fullgraph=True) if compiled else step
        args, kwargs = case.inputs(torch.float64)
        losses[compiled] = [call(model, optimizer, args, kwargs).detach() for _ in range(4)]
        with pytest.raises(RuntimeError, match="second time"):
            call(model, optimizer, args, kwargs).backward()
        losses[compiled] += [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-5, atol=1e-7)
    assert weft.counters["stats"]["unique_graphs"] == 2  # the first one makes the state


def test_training_follows_eager_for_many_steps():
    case = ZOO["gpt"]
    (tokens, targets), _ = case.inputs()
    losses = {}
    for name in ("eager", "weft"):
        model = case.model(training=True)
        call = weft.compile(model) if name == "weft" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[name] = []
        for _ in range(20):
            loss = call(tokens, targets)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["weft"][-1] < losses["weft"][0] - 1
    torch.testing.assert_close(
        torch.tensor(losses["weft"]), torch.tensor(losses["eager"]), rtol=1e-3, atol=1e-4
    )
