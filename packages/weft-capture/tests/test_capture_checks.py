"""Checks of conditions in a graph that has written to its inputs before."""

import pytest
import torch
import weft_capture
from capture_check import eager_backend, same


def check_positive(x):
    if not torch._is_all_true(x > 0):
        raise ValueError("not positive")


def of_another_input(state, x):
    state.add_(1)
    check_positive(x.exp() - 1)
    return x * state


def of_a_sample(state, x):
    before = torch.rand(2)
    state.add_(before)
    sample = torch.empty(2).uniform_() + x
    check_positive(sample)
    return sample, torch.rand(2)


def of_two_samples(state, x):
    state.add_(1)
    first = torch.rand(2)
    check_positive(first + x)
    second = torch.rand(2)
    check_positive(second + x)
    return first, second


def of_a_sample_and_its_view(state, x):
    state.mul_(2)
    both = torch.randn(2, 2)
    check_positive(both[0].abs() + x)
    return both


def of_new_memory_written_again(state, x):
    state.mul_(2)
    y = x.clone()
    y.add_(1)
    check_positive(y - 1)
    return y


def of_the_second_sample(state, x):
    state.add_(1)
    first = torch.rand(2)
    second = torch.rand(2)
    check_positive(second + x)
    return first, second


def of_what_is_written(state, x):
    state.add_(x)
    check_positive(state)
    return x + 1


def of_a_view_of_what_is_written(state, x):
    view = state[:1]
    state.add_(x)
    check_positive(view * 2)
    return x + 1


def of_a_product_with_what_is_written(state, x):
    state.add_(1)
    y = x * 2
    check_positive(y * state.data)
    return y


WHOLE = (of_another_input, of_a_sample, of_two_samples, of_a_sample_and_its_view)
BREAKING = (
    *(of_new_memory_written_again, of_the_second_sample, of_what_is_written),
    *(of_a_view_of_what_is_written, of_a_product_with_what_is_written),
)


def run(function, aliased=False):
    """Return the results, states and random numbers of calls of which the third one raises."""
    torch.manual_seed(0)
    state, found = torch.ones(2), []
    for number in (1.0, 2.0, -20.0, 1.0):
        x = state if aliased and number > 0 else torch.full((2,), number)
        try:
            found.append(function(state, x))
        except ValueError as error:
            found.append(str(error))
        found += [state.clone(), torch.rand(2)]
        if number < 0:
            state.fill_(1)
    return found


@pytest.mark.parametrize("program", [*WHOLE, *BREAKING], ids=lambda p: p.__name__)
def test_check_after_a_write_is_made_before_it(program):
    captured = weft_capture.capture(program, eager_backend)
    assert same(run(captured), run(program))
    assert bool(captured._weft_capture.breaks) is (program in BREAKING)


@pytest.mark.parametrize("program", WHOLE, ids=lambda p: p.__name__)
def test_check_of_memory_that_is_written_as_another_input(program):
    captured = weft_capture.capture(program, eager_backend)
    assert same(run(captured, True), run(program, True))


def test_arguments_of_a_distribution_after_a_step_of_another_optimizer():
    def train(wrap):
        torch.manual_seed(0)
        critic, actor = torch.nn.Linear(3, 1), torch.nn.Linear(3, 4)
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (critic, actor)]

        def step(x, shift):
            optimizers[0].zero_grad()
            critic(x).pow(2).mean().backward()
            optimizers[0].step()
            mean, scale = actor(x).chunk(2, -1)
            normal = torch.distributions.Normal(mean + shift, scale.exp(), validate_args=True)
            loss = normal.log_prob(normal.rsample()).mean() + critic(x).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            return loss.detach()

        captured, losses = wrap(step), []
        for shift in (0.0, 0.0, float("nan"), 0.0):
            try:
                losses.append(captured(torch.randn(4, 3), torch.tensor(shift)))
            except ValueError as error:
                losses.append(torch.tensor(len(str(error))))
        return [*losses, *critic.parameters(), *actor.parameters(), torch.rand(1)]

    captured = train(lambda step: weft_capture.capture(step, eager_backend, fullgraph=True))
    torch.testing.assert_close(captured, train(lambda step: step))
