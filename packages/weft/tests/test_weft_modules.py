"""The compiled module: one state with the original, no prefix, hooks, copies."""

import copy
import inspect
import pickle

import pytest
import torch
import weft
from torch import nn
from weft.modules import original_of, wrap_module


def compile_again(module):
    return wrap_module(
        module, lambda forward: lambda *args: ("compiled", forward(*args)), compile_again
    )


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU())


def test_one_state_and_no_prefix(model):
    twin = compile_again(model)
    assert isinstance(twin, nn.Sequential)
    assert type(twin).__name__ == "Sequential"
    assert list(twin.state_dict()) == ["0.weight", "0.bias"]
    assert twin[0] is model[0]
    twin.eval()
    twin.note = "seen by both"
    assert not model.training
    assert model.note == "seen by both"
    assert original_of(twin) is model
    assert original_of(model) is model


def test_forward_is_compiled_and_hooks_run_around_it(model):
    twin = compile_again(model)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    assert twin(torch.ones(1, 2))[0] == "compiled"
    assert seen == ["compiled"]


def test_a_forward_in_the_instance_is_the_one_compiled(model):
    model.forward = lambda x: "own"
    twin = compile_again(model)
    assert twin(1) == ("compiled", "own")
    twin.forward = lambda x: "newer"
    assert twin(1) == ("compiled", "newer")


def test_the_class_shows_the_forward_of_the_original():
    class Scaled(nn.Module):
        def forward(self, x, labels=None):
            return x * 2

    twin = compile_again(Scaled())
    assert list(inspect.signature(type(twin).forward).parameters) == ["self", "x", "labels"]
    assert type(twin).forward(twin, 2) == 4
    assert twin.forward(2) == ("compiled", 4)


def test_inside_another_module_names_stay(model):
    parent = nn.Module()
    parent.inner = compile_again(model)
    assert list(parent.state_dict()) == ["inner.0.weight", "inner.0.bias"]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_compiled_and_apart(model, clone):
    twin = clone(compile_again(model))
    assert twin(torch.ones(1, 2))[0] == "compiled"
    assert twin[0].weight is not model[0].weight
    assert torch.equal(twin[0].weight, model[0].weight)


def test_compiling_a_compiled_module_compiles_the_original(model):
    twin = compile_again(compile_again(model))
    assert original_of(twin) is model
    assert isinstance(twin(torch.ones(1, 2))[1], torch.Tensor)


def test_a_forward_replaced_later_is_the_one_that_runs(model):
    twin = compile_again(model)
    assert twin(torch.ones(1, 2))[0] == "compiled"
    model.forward = lambda x: "own"
    assert twin(1) == ("compiled", "own")
    del model.forward
    assert twin(torch.ones(1, 2))[1].shape == (1, 3)


def test_a_forward_replaced_in_the_class_is_the_one_that_runs():
    class Add(nn.Module):
        def forward(self, x):
            return x + 1

    twin = compile_again(Add())
    assert twin(1) == ("compiled", 2)
    Add.forward = lambda self, x: x * 10
    assert twin(1) == ("compiled", 10)


class Weight(torch.nn.Parameter):
    """A parameter of a class of its own, which computes as others do."""

    def halved(self):
        return self / 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "codegen"])
def test_a_layer_whose_weight_is_of_a_class_of_its_own(backend):
    layer = torch.nn.Linear(3, 3)
    layer.weight = Weight(torch.arange(9.0).reshape(3, 3))
    x = torch.ones(2, 3)

    def program(x):
        return layer(x).relu() + layer.weight.halved().sum()

    compiled = weft.compile(program, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), program(x))
    grads = [torch.autograd.grad(f(x).sum(), layer.weight)[0] for f in (compiled, program)]
    torch.testing.assert_close(*grads)
    assert type(layer.weight) is Weight


def test_a_metaclass_that_decorates_forward():
    class Decorating(type):
        def __init__(cls, name, bases, names):
            super().__init__(name, bases, names)
            plain = cls.forward
            cls.forward = lambda self, x: plain(self, x) * 2

    class Net(nn.Module, metaclass=Decorating):
        def forward(self, x):
            return x + 1

    weft.counters.clear()
    net = Net()
    assert torch.equal(weft.compile(net)(torch.ones(2)), net(torch.ones(2)))
    assert weft.counters["stats"]["unique_graphs"] == 1
