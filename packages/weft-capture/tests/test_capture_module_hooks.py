"""Backward hooks of modules in the graph, and forward hooks that run after exceptions."""

import copy

import pytest
import torch
import weft_capture
from capture_check import eager_backend, same

nn = torch.nn
FACTOR = torch.tensor(2.0)
SEEN = []


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden.relu()), hidden


class Mixed(nn.Module):
    """Gets and returns other objects than tensors, too."""

    def forward(self, x, count, y):
        return x * count, x + y, count


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), Mixed()

    def forward(self, x):
        product, total, _ = self.b(self.a(x), 3, x)
        return product + total.sin(), total


def doubled(module, grad_input, grad_output):
    return tuple(None if grad is None else grad * 2 for grad in grad_input)


def positive(module, grad_input, grad_output):
    return (grad_input[0].clamp(min=0) + grad_output[0].sum(), *grad_input[1:])


def tripled(module, grad_output):
    return tuple(None if grad is None else grad * 3 for grad in grad_output)


def unused(module, grad_input, grad_output):
    grad_input[0] + 1


HOOKS = {
    "of a layer": (Layers, lambda m: m.a.register_full_backward_hook(doubled)),
    "of what returns": (Layers, lambda m: m.b.register_full_backward_hook(positive)),
    "before": (Layers, lambda m: m.a.register_full_backward_pre_hook(tripled)),
    "several": (
        Layers,
        lambda m: [
            m.a.register_full_backward_pre_hook(tripled),
            m.a.register_full_backward_hook(positive),
            m.a.register_full_backward_hook(doubled),
            m.b.register_full_backward_hook(unused),
        ],
    ),
    "of several tensors": (Around, lambda m: m.b.register_full_backward_hook(positive)),
}


def train(module, call, x):
    """Results and gradients of a step."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    results = call(x)
    sum(result.square().sum() for result in results).backward()
    return [r.detach() for r in results], x.grad, [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_compute_are_in_the_graph(name):
    torch.manual_seed(0)
    cls, register = HOOKS[name]
    module, x = cls(), torch.randn(2, 3)
    register(module)
    captured = weft_capture.capture(module.forward, eager_backend, fullgraph=True)
    for _ in range(2):
        assert same(train(module, module.forward, x), train(module, captured, x))


def test_hooks_that_come_and_go():
    torch.manual_seed(0)
    module, x = Layers(), torch.randn(2, 3)
    captured = weft_capture.capture(module.forward, eager_backend, fullgraph=True)
    handle = module.a.register_full_backward_hook(doubled)
    with_hook = train(module, captured, x)
    assert same(train(module, module.forward, x), with_hook)
    handle.remove()
    assert same(train(module, module.forward, x), train(module, captured, x))
    module.a.register_full_backward_pre_hook(tripled)
    assert same(train(module, module.forward, x), train(module, captured, x))


def stored(module, grad_input, grad_output):
    SEEN.append(grad_input[0])


def by_value(module, grad_input, grad_output):
    return (grad_input[0] * 2,) if grad_input[0].sum() > 0 else None


def with_other_tensor(module, grad_input, grad_output):
    return (grad_input[0] * FACTOR,)


@pytest.mark.parametrize("hook", [stored, by_value, with_other_tensor])
def test_other_hooks_are_one_break(hook):
    torch.manual_seed(0)
    SEEN.clear()
    module, x = Layers(), torch.randn(2, 3)
    module.a.register_full_backward_hook(hook)
    captured = weft_capture.capture(module.forward, eager_backend)
    expected = train(module, module.forward, x)
    assert same(expected, train(module, captured, x))
    assert len(weft_capture.explain(module.forward)(x.requires_grad_()).breaks) == 1
    assert hook is not stored or same(*SEEN)


def test_a_step_with_hooks_inside():
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    modules = [Layers() for _ in range(2)]
    modules[1] = copy.deepcopy(modules[0])

    def step(module, x):
        module(x)[0].square().sum().backward()

    for module, run in zip(
        modules, (step, weft_capture.capture(step, eager_backend, fullgraph=True)), strict=True
    ):
        module.a.register_full_backward_hook(doubled)
        run(module, x.clone().requires_grad_())
    gradients = [[p.grad for p in module.parameters()] for module in modules]
    assert same(*gradients)


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("not today")


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_that_are_always_called(everywhere):
    seen, module = [], Fails()

    def note(module, args, result):
        seen.append(result)

    if everywhere:
        handle = nn.modules.module.register_module_forward_hook(note, always_call=True)
    else:
        handle = module.register_forward_hook(note, always_call=True)

    def caught(x):
        try:
            return module(x)
        except ValueError:
            return x * 2

    try:
        x = torch.ones(2)
        captured = weft_capture.capture(caught, eager_backend, fullgraph=True)
        assert same(captured(x), caught(x))
        assert seen == [None, None]
    finally:
        handle.remove()


def test_forward_hooks_with_keywords():
    class Scaled(nn.Module):
        def forward(self, x, *, factor=1):
            return x * factor

    module = Scaled()
    module.register_forward_pre_hook(lambda m, args, kw: (args, {"factor": 3}), with_kwargs=True)
    module.register_forward_hook(lambda m, args, kw, out: out + kw["factor"], with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: out * 2, prepend=True)
    captured = weft_capture.capture(module, eager_backend, fullgraph=True)
    assert same(captured(torch.ones(2), factor=2), module(torch.ones(2), factor=2))
