"""Blocks of torch: autocast with a break inside, forked generators; guards of a breaking call."""

import collections
import random

import pytest
import torch
import weft_capture
from capture_check import check, eager_backend, same
from weft_core.events import counters


def test_guards_of_a_call_that_breaks_do_not_hold_for_the_code_before_it():
    """`sample` reads the length of the growing list before it breaks at its tensors."""
    memory = collections.deque(torch.ones(1) * i for i in range(20))

    def step(x, rng):
        if len(memory) < 10:
            return x
        return x + torch.cat(rng.sample(memory, 3)).sum()

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    captured = weft_capture.capture(step, backend)
    for size in range(20, 32):
        expected = step(torch.ones(2), random.Random(size))
        assert same(captured(torch.ones(2), random.Random(size)), expected)
        memory.append(torch.ones(1) * size)
    codes = [reason.code for reason in captured._weft_capture.breaks]
    assert codes == ["constant-required"] * 2  # the length is a symbol in the second capture
    assert len(graphs) == 2


def autocast_block(x):
    with torch.autocast("cpu"):
        y = x @ x
        weft_capture.graph_break()
    return y, x @ x


def nested_autocast_blocks(x):
    with torch.autocast("cpu"):
        y = x @ x
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ x
            weft_capture.graph_break()
        w = z @ x
        weft_capture.graph_break()
        v = w @ x.to(w.dtype)
    return y, z, w, v, x @ x, torch.is_autocast_enabled("cpu")


def autocast_block_that_raises(x):
    try:
        with torch.autocast("cpu", cache_enabled=False):
            y = x @ x
            weft_capture.graph_break()
            raise ValueError
    except ValueError:
        return y, x @ x, torch.is_autocast_cache_enabled()


def autocast_blocks_in_turn(x):
    with torch.autocast("cpu"):
        weft_capture.graph_break()
        y = x @ x
    with torch.autocast("cpu", dtype=torch.float16):
        z = x @ x
        weft_capture.graph_break()
        w = x @ x
    return y, z, w, x @ x


@pytest.mark.parametrize(
    ("program", "breaks"),
    [
        (autocast_block, 1),
        (nested_autocast_blocks, 2),
        (autocast_block_that_raises, 1),
        (autocast_blocks_in_turn, 2),
    ],
)
def test_autocast_block_with_a_break_is_left_in_a_graph(program, breaks):
    counters["graph_break"].clear()
    check(program, torch.randn(3, 3), fullgraph=False)
    assert counters["graph_break"] == {"graph-break": breaks}
    assert not torch.is_autocast_enabled("cpu")


def test_gradients_after_an_autocast_block_with_a_break():
    weight = torch.nn.Parameter(torch.eye(3))

    def step(x):
        with torch.autocast("cpu"):
            weft_capture.graph_break()
            loss = (x @ weight).sum()
        loss.backward()
        return loss.detach()

    counters["graph_break"].clear()
    x = torch.randn(3, 3)
    expected = step(x), weight.grad.clone()
    weight.grad = None
    assert same((weft_capture.capture(step, eager_backend)(x), weight.grad), expected)
    assert counters["graph_break"] == {"graph-break": 1}


def forked(x):
    with torch.random.fork_rng():
        y = torch.rand(2)
    return x + y


def forked_and_drawn_again(x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        y = torch.rand(2)
    return x + y, torch.rand(2)


def forked_twice(x):
    with torch.random.fork_rng():
        y = torch.rand(2)
    with torch.random.fork_rng():
        return x + y, torch.rand(2)


def drawn_with_one_state(x):
    state = torch.get_rng_state()
    y = torch.rand(2)
    torch.set_rng_state(state)
    return x + y, torch.rand(2), state


def drawn_before_it_is_read(x):
    return x + torch.rand(2), torch.get_rng_state()


@pytest.mark.parametrize(
    ("program", "is_whole"),
    [
        (forked, True),
        (forked_and_drawn_again, False),
        (forked_twice, False),
        (drawn_with_one_state, False),
        (drawn_before_it_is_read, False),
    ],
)
def test_state_of_the_generator_is_read_before_draws_and_set_after_them(program, is_whole):
    captured = weft_capture.capture(program, eager_backend, fullgraph=is_whole)
    found = []
    for run in (program, captured):
        torch.manual_seed(0)
        found.append([run(torch.ones(2)), run(torch.ones(2)), torch.rand(2)])
    assert same(*found)
    assert is_whole is not bool(captured._weft_capture.breaks)
