"""`fallback_random=False`: the backward has the forward's mask, a seed gives the same step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import weft

LOOPS = {"fallback_random": False}


def _step(function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    out = function(x)
    out.sum().backward()
    return out.detach(), x.grad


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients_have_the_forwards_mask(dynamic: bool | None) -> None:
    weft.reset()

    def fn(x):
        return F.dropout(x, 0.4) * 3

    compiled = weft.compile(fn, options=LOOPS, dynamic=dynamic)
    for rows in (50, 70):
        out, grad = _step(compiled, torch.ones(rows, 40))
        assert torch.equal(out, grad)  # both 3 / 0.6 where kept
        assert 0.5 < (grad != 0).float().mean() < 0.7


@pytest.mark.slow
def test_two_layers_of_dropout_in_a_model() -> None:
    weft.reset()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(2)]
    first, second = layers

    def fn(x):
        hidden = F.dropout(F.relu(first(x)), 0.5)
        return F.dropout(second(hidden), 0.25).square()

    compiled = weft.compile(fn, options=LOOPS)
    x = torch.randn(16, 32)
    steps = []
    for _ in range(2):
        torch.manual_seed(7)
        steps.append(_step(compiled, x))
    assert torch.equal(steps[0][0], steps[1][0])
    assert torch.equal(steps[0][1], steps[1][1])
    other, _ = _step(compiled, x)
    assert not torch.equal(other, steps[0][0])
    # Differences of the loss, with the same numbers drawn, are the gradient.
    moved = x.double() + 1e-3 * torch.eye(16, 32)
    torch.manual_seed(7)
    ahead = compiled(moved.float()).sum()
    torch.manual_seed(7)
    slope = (ahead - compiled(x).sum()) / 1e-3
    expected = (steps[0][1] * torch.eye(16, 32)).sum()
    torch.testing.assert_close(slope, expected, rtol=0.05, atol=0.05)


def test_graphs_of_a_model_in_training_and_inference() -> None:
    weft.reset()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    compiled = weft.compile(model, options=LOOPS)
    x = torch.randn(4, 8)
    compiled(x).sum().backward()
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))
