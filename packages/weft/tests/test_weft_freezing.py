"""`options={"freezing": True}` from the user's side."""

import pytest
import torch
import weft
from torch import nn

OPTIONS = {"freezing": True}


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )
    with torch.no_grad():
        model(torch.randn(8, 3, 6, 6))
    return model.eval()


def test_batchnorm_and_weights_are_folded():
    model, x = make(0), torch.randn(2, 3, 6, 6)
    compiled = weft.compile(model, options=OPTIONS)
    weft.counters.clear()
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    assert weft.counters["extern"]["mkldnn._convolution_pointwise.default"] == 1


def test_each_instance_and_each_state_gives_its_own_results():
    @weft.compile(options=OPTIONS)
    def run(model, x):
        return model(x)

    models, x = [make(1), make(2)], torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        for _ in range(2):
            for model in models:
                torch.testing.assert_close(run(model, x), model(x), rtol=1e-4, atol=1e-4)
                model[0].weight.mul_(1.5)
        with torch.inference_mode():
            torch.testing.assert_close(run(models[0], x), models[0](x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_another_batch_size():
    model = make(3)
    compiled = weft.compile(model, options=OPTIONS)
    with torch.no_grad():
        for batch in (2, 5, 7, 1):
            x = torch.randn(batch, 3, 6, 6)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_training_is_refused():
    compiled = weft.compile(make(4), options=OPTIONS)
    with pytest.raises(weft.BackendCompilerError, match="no_grad"):
        compiled(torch.randn(2, 3, 6, 6))
