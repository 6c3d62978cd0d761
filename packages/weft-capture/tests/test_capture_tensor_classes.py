"""What programs do with tensors of other classes, and with attributes of tensors."""

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from mode_programs import check_same, whole
from torch import nn


class Scaled(nn.Parameter):
    """A parameter with data of its own, a property and a method."""

    unit = 3

    def __new__(cls, data, tag=1):
        made = super().__new__(cls, data)
        made.tag = tag
        return made

    @property
    def scale(self):
        return self.tag * self.unit

    def twice(self):
        return self * 2


class Layer(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.shift = nn.Buffer(torch.ones(3))
        self.register_buffer("other", torch.zeros(3))

    def forward(self, x):
        kinds = [
            isinstance(one, kind)
            for one in (self.weight, self.shift, self.other, x)
            for kind in (nn.Parameter, nn.Buffer, torch.Tensor, Scaled)
        ]
        return x * self.weight + self.shift, kinds, type(self.weight).__name__


@pytest.mark.parametrize("kind", [nn.Parameter, Scaled])
def test_parameters_and_buffers_of_a_module(kind):
    layer = Layer(kind(torch.ones(3)))
    check_same(whole(layer)(torch.ones(3)), layer(torch.ones(3)))


def test_a_property_of_a_parameter_class_is_guarded():
    class Local(Scaled):
        pass

    weight = Local(torch.ones(3), tag=2)

    def function():
        return weight.twice() * weight.scale

    optimised = whole(function)
    check_same(optimised(), function())
    weight.tag = 5
    check_same(optimised(), function())
    Local.scale = property(lambda self: 7)
    check_same(optimised(), function())


@pytest.mark.parametrize("name", ["tag", "_is_buffer", "_is_param"])
def test_an_attribute_that_comes_later_is_noticed(name):
    def function(x):
        kinds = isinstance(x, nn.Buffer), isinstance(x, nn.Parameter)
        return x * (2 if hasattr(x, "tag") else 3), kinds, getattr(x, "tag", None)

    optimised, x = whole(function), torch.ones(2)
    for value in (None, True, False):
        if value is not None:
            setattr(x, name, value)
        found, expected = optimised(x), function(x)
        assert found[1:] == expected[1:]
        assert torch.equal(found[0], expected[0])
    delattr(x, name)
    check_same(optimised(x), function(x))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_elements_of_foreach_functions_share_their_history():
    def function(a, b):
        apart = [a * 1, b * 1]
        torch._foreach_add_(apart, [b, b])
        together = torch._foreach_mul([a * 1, b], [b, b])
        return [one.requires_grad for one in (*apart, *together)], together

    args = torch.ones(2, requires_grad=True), torch.ones(2)
    found = weft_capture.capture(function, eager_backend)(*args)
    check_same(found, function(*args))


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_a_number_out_of_a_transformed_tensor_breaks(transform):
    def function(x):
        return transform(lambda row: row * row.sum().item())(x)

    def outcome(run):
        try:
            return run(torch.ones(3, 2)).tolist()
        except RuntimeError as error:
            return str(error)

    optimised = weft_capture.capture(function, eager_backend)
    assert outcome(optimised) == outcome(function)
    assert optimised._weft_capture.breaks[0].code == "data-dependent-value"


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_parameters_that_are_made_in_the_first_call():
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()), torch.ones(4, 3)
    optimised = weft_capture.capture(layer, eager_backend)
    first = optimised(x)
    layer[1].reset_running_stats()
    check_same(first, layer(x))
    layer.eval()
    check_same(optimised(x), layer(x))


class Handling(nn.Parameter):
    """A parameter whose functions add one to what `mul` gives."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + 1 if func is torch.Tensor.mul else result


def test_a_parameter_with_a_handler():
    layer = Layer(Handling(torch.ones(3)))
    optimised = whole(layer)
    grads = []
    for run in (layer, optimised):
        layer.zero_grad()
        result = run(torch.arange(3.0))
        result[0].sum().backward()
        grads.append((result, layer.weight.grad))
    check_same(grads[1], grads[0])
