"""Subclasses of tensors and parameters: those that leave operations alone are captured."""

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import nn
from weft_core.errors import Unsupported
from weft_core.fake import is_plain


class Weight(nn.Parameter):
    """A parameter that knows more than others, as loaders of checkpoints make them."""

    kind = "dense"

    def __new__(cls, data, scale=1.0):
        made = super().__new__(cls, data)
        made.scale = scale
        return made

    def scaled(self, by):
        return self * self.scale * by


class Moving(nn.Parameter):
    """An operation of its own in the place of a tensor's."""

    def sum(self):
        return super().sum() * 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight(torch.arange(4.0).reshape(2, 2), 3.0)

    def forward(self, x):
        w = self.weight
        assert isinstance(w, Weight) and isinstance(w, nn.Parameter)
        return x @ w.scaled(2.0), type(w).__name__, w.kind, type(w * 1).__name__


def test_a_parameter_that_knows_more():
    layer, x = Layer(), torch.ones(3, 2)
    optimised = weft_capture.capture(layer, eager_backend, fullgraph=True)
    found, expected = optimised(x), layer(x)
    assert found[1:] == expected[1:] == ("Weight", "dense", "Tensor")
    grads = [torch.autograd.grad(out[0].sum(), layer.weight)[0] for out in (found, expected)]
    assert torch.equal(found[0], expected[0]) and torch.equal(*grads)
    layer.weight.scale = 5.0
    assert torch.equal(optimised(x)[0], layer(x)[0])


def test_what_its_class_says_is_guarded():
    class Changing(nn.Parameter):
        gain = 2.0

        def times(self):
            return self * self.gain

    w = Changing(torch.ones(2))
    optimised = weft_capture.capture(lambda w: w.times() + 1, eager_backend, fullgraph=True)
    assert torch.equal(optimised(w), torch.full((2,), 3.0))
    Changing.gain = 4.0
    assert torch.equal(optimised(w), torch.full((2,), 5.0))
    Changing.times = lambda self: self * 0
    assert torch.equal(optimised(w), torch.ones(2))


def test_an_instance_of_another_class_is_not_taken_for_it():
    optimised = weft_capture.capture(lambda w: (w + 1, type(w).__name__), eager_backend)
    for w in (Weight(torch.ones(2)), nn.Parameter(torch.ones(2)), Weight(torch.ones(2))):
        assert optimised(w)[1] == type(w).__name__


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_what_changes_operations_is_refused_and_right():
    assert not is_plain(Moving)
    x = Moving(torch.ones(3))

    def function(x):
        return x.sum() + 1, type(x * 2).__name__

    with pytest.raises(Unsupported, match="tensor subclass"):
        weft_capture.capture(function, eager_backend, fullgraph=True)(x)
    found, expected = weft_capture.capture(function, eager_backend)(x), function(x)
    assert found == expected
