"""Optimizers captured whole: parameters as in eager, one graph while the learning rate changes."""

import copy

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import nn

optim = torch.optim


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


# name -> (class, arguments, graphs: a first one that makes the state, and one for all other steps)
CASES = {
    "sgd": (optim.SGD, {"lr": 0.1}, 1),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, 2),
    "nesterov": (
        optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "maximize": True,
                    "foreach": True}, 2,
    ),
    "adam": (optim.Adam, {"lr": 0.01}, 2),
    "adam_foreach": (
        optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True, "weight_decay": 0.1}, 2,
    ),
    "adam_fused": (optim.Adam, {"lr": 0.01, "fused": True}, 2),
    "adam_tensor": (optim.Adam, {"lr": torch.tensor(0.01)}, 2),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, 2),
    "adamw_foreach": (optim.AdamW, {"lr": 0.01, "foreach": True, "maximize": True}, 2),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}, 2),
    "adagrad": (optim.Adagrad, {"lr": 0.01}, 1),
    "adadelta": (optim.Adadelta, {"lr": 0.5}, 2),
    "nadam": (optim.NAdam, {"lr": 0.01}, 2),
    "rprop": (optim.Rprop, {"lr": 0.01}, 2),
    "adamax": (optim.Adamax, {"lr": 0.01}, 2),
    "radam": (optim.RAdam, {"lr": 0.01, "betas": (0.9, 0.8), "weight_decay": 0.1}, 2),
    "radam_foreach": (optim.RAdam, {"lr": 0.01, "foreach": True, "maximize": True}, 2),
    "asgd": (optim.ASGD, {"lr": 0.01, "weight_decay": 0.1}, 2),
    "asgd_foreach": (optim.ASGD, {"lr": 0.01, "foreach": True}, 2),
}  # fmt: skip


def train(module, optimizer, step, steps):
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for i in range(steps):
        x = torch.linspace(-1, 1 + i, 20, dtype=torch.float64).reshape(5, 4)
        module(x).square().sum().backward()
        step()
        scheduler.step()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_step_is_one_graph_whatever_the_learning_rate(name):
    cls, arguments, graphs = CASES[name]
    eager, captured = model(), model()
    reference = cls(eager.parameters(), **copy.deepcopy(arguments))
    optimizer = cls(captured.parameters(), **copy.deepcopy(arguments))

    def step():
        optimizer.step()
        optimizer.zero_grad()

    def reference_step():
        reference.step()
        reference.zero_grad()

    optimised = weft_capture.capture(step, eager_backend, fullgraph=True)
    train(eager, reference, reference_step, 5)
    train(captured, optimizer, optimised, 5)
    for one, other in zip(eager.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        assert other.grad is None
    for one, other in zip(reference.state.values(), optimizer.state.values(), strict=True):
        assert list(one) == list(other)
        for key in one:
            torch.testing.assert_close(one[key], other[key])
    assert len(optimised._weft_capture.graphs) == graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "arguments", "graphs"),
    [
        (optim.RAdam, {"foreach": True}, 3),  # from the sixth step on it rectifies
        (optim.RAdam, {"foreach": False}, 3),
        (optim.ASGD, {"t0": 2.0, "foreach": False}, 4),  # then it averages
    ],
)
def test_a_counter_of_the_state_decides_a_branch(cls, arguments, graphs):
    eager, captured = model(), model()
    reference = cls(eager.parameters(), **arguments)
    optimizer = cls(captured.parameters(), **arguments)
    step = weft_capture.capture(lambda: optimizer.step(), eager_backend, fullgraph=True)
    train(eager, reference, lambda: reference.step(), 8)
    train(captured, optimizer, step, 8)
    for one, other in zip(eager.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert len(step._weft_capture.graphs) == graphs


def test_two_groups_and_a_setting_that_changes():
    def run(capture):
        module = model()
        groups = [
            {"params": module[0].parameters(), "lr": 0.1},
            {"params": module[2].parameters(), "weight_decay": 0.5},
        ]
        optimizer = optim.SGD(groups, lr=0.01, momentum=0.5)
        step = weft_capture.capture(optimizer.step, eager_backend) if capture else optimizer.step
        for i in range(6):
            optimizer.param_groups[1]["weight_decay"] = 0.5 / (i + 1)
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            module(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            step()
        return [p.detach() for p in module.parameters()], step

    expected, _ = run(False)
    found, step = run(True)
    torch.testing.assert_close(expected, found, rtol=1e-12, atol=1e-14)
    assert len(step._weft_capture.graphs) == 2  # the state is made; any decay


def test_clipping_and_closure():
    def run(capture):
        module = model()
        optimizer = optim.SGD(module.parameters(), lr=0.1)

        def finish():
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return norm

        step = weft_capture.capture(finish, eager_backend, fullgraph=True) if capture else finish
        norms = []
        for _ in range(3):
            module(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
            norms.append(step())
        return (
            norms,
            [p.detach() for p in module.parameters()],
            [p.grad for p in module.parameters()],
        )

    torch.testing.assert_close(run(False), run(True), rtol=1e-12, atol=1e-14)


def replace_gradient(parameter, new):
    old = parameter.grad
    parameter.grad = new
    if old is not None:
        parameter.grad = old + new
        old.mul_(2)
    return old, parameter.grad is new


def drop_gradient(parameter, new):
    parameter.grad = new
    kept = parameter.grad.clone()
    parameter.grad = None
    return kept, parameter.grad


@pytest.mark.parametrize("function", [replace_gradient, drop_gradient])
def test_gradients_read_and_written(function):
    one = nn.Parameter(torch.arange(3.0))
    other = copy.deepcopy(one)
    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    for i in range(4):
        expected, found = function(one, torch.ones(3) * i), optimised(other, torch.ones(3) * i)
        assert str(expected) == str(found)
        assert str(one.grad) == str(other.grad)


def test_gradient_of_wrong_shape_raises_as_in_eager():
    parameter = nn.Parameter(torch.zeros(3))
    optimised = weft_capture.capture(replace_gradient, eager_backend)
    with pytest.raises(RuntimeError, match="size"):
        optimised(parameter, torch.zeros(4))


def float_arguments(x, scale):
    y = x * scale + torch.pow(x, 2.0) * (1 - scale / 3)
    if scale > 1.5:
        y = y - scale**2
    return y.add(x, alpha=-scale), x.long() * scale, scale * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_float_argument_that_changes_is_compiled_for_twice(dtype):
    x = torch.arange(4).to(dtype)
    function = float_arguments if dtype.is_floating_point else lambda x, s: (x * s, x / s)
    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    for scale in (0.5, 0.7, 0.9, 1.2):
        for expected, found in zip(function(x, scale), optimised(x, scale), strict=True):
            torch.testing.assert_close(expected, found) if torch.is_tensor(found) else None
            assert torch.is_tensor(found) or (expected, type(expected)) == (found, type(found))
    assert len(optimised._weft_capture.graphs) == 2
    if dtype.is_floating_point:
        torch.testing.assert_close(function(x, 2.5), optimised(x, 2.5))  # the other branch
        assert len(optimised._weft_capture.graphs) == 3


def read_out(x):
    mean = x.mean().item()
    return x - mean / 2, mean, float(x.sum()) + 1


def test_float_read_out_of_a_tensor():
    optimised = weft_capture.capture(read_out, eager_backend, fullgraph=True)
    for size in (3, 5):
        x = torch.arange(float(size))
        assert str(read_out(x)) == str(optimised(x))


def test_results_of_foreach_are_tuples():
    def function(a, b):
        return (
            torch._foreach_mul([a, b], 2.0),
            torch._foreach_norm([a, b]),
            torch._foreach_add_([a], 1),
        )

    a, b = torch.ones(2), torch.ones(3)
    expected = function(a.clone(), b)
    found = weft_capture.capture(function, eager_backend, fullgraph=True)(a.clone(), b)
    assert [type(r) for r in found] == [type(r) for r in expected] == [tuple, tuple, list]
    torch.testing.assert_close(found, expected)
