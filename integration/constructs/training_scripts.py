"""What training scripts do beside their models: logs, keys of configurations, frozen parameters."""

import dataclasses

import numpy as np
import torch
from torch import nn

from constructs import case


class Named:
    def __init__(self, name, total=0.0):
        self.name, self.total = name, total

    def __str__(self):
        return "{name} {total:.3f}".format(**self.__dict__)

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return isinstance(other, Named) and self.name == other.name


@case
def numbers_of_tensors_in_texts(x):
    loss = x.mean()
    meter = Named("loss", loss.item())
    print("step %d loss %.4f" % (1, loss), "{:>8.2f}|{n}".format(loss.item(), n=meter.total))
    print("\t".join([str(meter), f"[{meter}]", "%s" % x]) + "!", "loss: " + str(loss.item()))
    shape = "{} {:.1f} {}".format(x.shape, loss.item(), [1, "a"])  # noqa: UP032
    return x * 2, "%s %%" % loss.item(), shape, "%s and %.1f" % (x.sum(), x.sum())


@case
def texts_of_tensors_that_break(x):
    told = []
    try:
        told.append("%d %d" % (x.sum().item(),))  # noqa: F507
    except TypeError as error:
        told.append(str(error))
    y = (x.detach().requires_grad_(True) * 2).sum()
    told += ["%s" % y, "{:d}".format(3), "{}".format(x)]  # noqa: UP032
    x.add_(1)
    return told, y.detach()


@dataclasses.dataclass(frozen=True)
class Key:
    part: object
    sizes: tuple = (1, 2)


@case
def objects_of_the_program_as_keys(x):
    parts = {Key("a"): x, Key(Key("b")): x + 1, Named("c"): x * 2, Named("c"): x * 3}
    parts[Key("a")] = x * 3
    return parts, {Key(n % 2) for n in range(4)}, parts[Key(Key("b"))].sum(), Key(1) in parts


@case(inputs=lambda: (torch.ones(3), {1, 2, 3}, {"a", "b"}, {9}))
def sets_from_outside_with_sets(x, numbers, names, few):
    numbers |= {2, 7}
    names.update({"c"}, ["d"])
    names.difference_update({"a"}, ["z"])
    few ^= {9, 4}
    numbers &= {2, 3, 7}
    few.update(frozenset([5]))
    return x * len(numbers - {3}), sorted(names), sorted(few), sorted(numbers, reverse=True)


@case(inputs=lambda: (torch.ones(3), {1, 2, 3}, {4}))
def sets_from_outside_with_one_another(x, numbers, others):
    numbers.update(made := {20})
    made.add(21)
    others.update(numbers, others)
    return x + 1, made, sorted(numbers), sorted(others)


def _rows():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    return torch.arange(6.0).reshape(2, 3), model


def _state(model):
    return [(p.requires_grad, p.is_leaf, p.grad) for p in model.parameters()]


@case(inputs=_rows)
def layers_frozen_before_and_after_use(x, model):
    model[0].requires_grad_(False)
    loss = model(x).sum()
    loss.backward()
    for parameter in model[2].parameters():
        parameter.requires_grad = False
    return loss, model(x * 2), model(x).requires_grad, _state(model)


@case(inputs=_rows)
def layers_frozen_under_a_history(x, model):
    used = model(x)
    model[0].requires_grad_(False)
    used.sum().backward(retain_graph=True)  # reaches what no longer takes a gradient
    again = model(x)
    model[0].requires_grad_(True)
    return used.detach(), again, model(x), _state(model)


@case(inputs=_rows)
def layers_frozen_and_thawed(x, model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inputs = x.detach().requires_grad_(True)
    (grad,) = torch.autograd.grad(model(inputs).square().sum(), inputs)
    with torch.no_grad():
        model[0].weight.add_(1)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model(x + grad.sign()).square().sum().backward()
    return grad, _state(model), model[0].weight.detach()


@case
def input_that_begins_to_require_grad(x):
    before = x * 2
    x.requires_grad_()
    (grad,) = torch.autograd.grad((x * x).sum() + before.sum(), x)
    return before.requires_grad, grad, (x + before).requires_grad, x.is_leaf


@case(inputs=lambda: (lambda base: (base, base[:2], torch.arange(2)))(torch.ones(4)))
def what_may_not_require_grad(base, view, whole):
    base.requires_grad_(True)
    told = []
    for change in (lambda: view.add_(1), whole.requires_grad_, (base * 2).requires_grad_):
        try:
            change()
        except RuntimeError as error:
            told.append(str(error)[:60])
    return base.detach() * 2, told, whole.requires_grad


@case(inputs=lambda: (torch.arange(12.0).reshape(4, 3), np.array([2, 0]), np.arange(4) > 1))
def rows_picked_by_arrays(x, rows, mask):
    x[mask, 1] = 7.0
    x[rows.astype(np.int32), :2] += 1
    return x[rows], x[rows, rows], x[:, rows], x[rows + 1].sum()


@case(inputs=lambda: (torch.ones(2, 3), nn.Linear(3, 1, bias=False)))
def gradient_penalty(x, critic):
    nn.init.constant_(critic.weight, 0.5)
    mixed = (x * 0.3).requires_grad_(True)
    score = critic(mixed).tanh()
    options = {"create_graph": True, "retain_graph": True, "only_inputs": True}
    (grad,) = torch.autograd.grad(score, mixed, torch.ones_like(score), **options)
    (grad.norm(2, dim=1) - 1).square().mean().backward()
    return grad.detach(), critic.weight.grad


@case(inputs=lambda: (torch.arange(6.0).reshape(2, 3, 1), nn.Linear(1, 1)))
def inner_steps_under_vmap(x, model):
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)

    def error(weights, rows):
        return torch.func.functional_call(model, weights, (rows,)).square().mean()

    def adapted(rows):
        weights = dict(model.named_parameters())
        grads = torch.func.grad(error)(weights, rows)
        return error({name: weights[name] - 0.1 * grads[name] for name in weights}, rows)

    loss = torch.func.vmap(adapted)(x).mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@case
def images_in_other_memory_formats(x):
    images = x.reshape(1, 1, 3, -1).expand(2, 3, 3, -1)
    last, deep = torch.channels_last, images[None].expand(2, 2, 3, 3, -1)
    return (
        images.contiguous(memory_format=last),
        images.clone(memory_format=last),
        images.to(torch.float64, memory_format=last) * 2,
        torch.empty_like(images, memory_format=last).stride(),
        deep.contiguous(memory_format=torch.channels_last_3d) + 1,
    )


TRACED = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU())).requires_grad_(False)


@case
def graph_modules_as_parts(x):
    return TRACED(x[..., :3]) * 2 + TRACED(x[..., :3].sin())
