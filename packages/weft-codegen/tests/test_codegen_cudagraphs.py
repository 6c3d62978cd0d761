"""Replays of recorded runs, with a recorder that has no GPU: it runs again and stores results."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from weft_codegen.compile import compile_graph
from weft_codegen.config import Options
from weft_codegen.cudagraphs import CudaGraphPool, CudaGraphRunner
from weft_core.events import counters

GROUP = "cudagraphs"


class Fake(CudaGraphPool):
    """Replays write where the recorded run's outputs are, which nothing may need then."""

    def __init__(self) -> None:
        counters.pop(GROUP, None)
        self.lock, self.lent, self.home, self.now = threading.Lock(), [], None, 1

    def stream(self) -> int | None:
        return self.now

    def record(self, run: Callable[..., Any], args: list[Any]) -> tuple[Callable[[], None], Any]:
        before = [arg.clone() for arg in args]
        outputs = run(*args)
        torch._foreach_copy_(args, before)
        addresses = [arg.data_ptr() for arg in args]  # all that a CUDA graph keeps of its inputs

        def replay() -> None:
            inputs = map(_at_address, addresses, before)
            for output, value in zip(outputs, run(*inputs), strict=True):
                if isinstance(output, torch.Tensor):
                    output.copy_(value)

        return replay, outputs


def _at_address(address: int, like: torch.Tensor) -> torch.Tensor:
    memory = (ctypes.c_char * like.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def test_inputs_that_move_are_copied_and_outputs_in_use_are_kept() -> None:
    weight, held = torch.randn(3), []
    graph = CudaGraphRunner(lambda w, x: [w * x, x + 1], set(), Fake())
    for step in range(8):
        x = torch.full((3,), float(step))
        held.append((x, *graph(weight, x)))
        for x, product, more in held:
            assert torch.equal(product, weight * x)
            assert torch.equal(more, x + 1)
    assert (graph.copied, graph.private, counters[GROUP]) == ({1}, {0, 1}, {"first-call": 1})


def test_a_forward_runs_elsewhere_while_gradients_of_before_are_in_use() -> None:
    memory, x = Fake(), torch.ones(4)
    forward = CudaGraphRunner(lambda x: [x.exp()], set(), memory)
    backward = CudaGraphRunner(lambda y: [y * 2], set(), memory)
    grads = [backward(forward(x)[0])[0] for _ in range(6)]
    assert all(torch.equal(grad, x.exp() * 2) for grad in grads)
    assert (backward.private, forward._left < 15) == ({0}, True)  # recorded anew


def test_what_a_forward_saves_is_not_copied_for_its_backward() -> None:
    memory, weight = Fake(), torch.randn(4)
    forward = CudaGraphRunner(lambda w, x: [(w * x).sum(), w * x], set(), memory)
    backward = CudaGraphRunner(lambda y, t: [y * t], set(), memory)
    for step in range(6):
        x, tangent = torch.full((4,), float(step)), torch.ones(())
        _, saved = forward(weight, x)
        assert torch.equal(backward(saved, tangent)[0], weight * x)
        del saved
    assert (forward.copied, backward.copied) == ({1}, {1})


def test_an_output_that_is_kept_keeps_no_other_alive() -> None:
    memory, x = Fake(), torch.randn(4)
    graph = CudaGraphRunner(lambda x: [x.sum(), x * 2], set(), memory)
    total = saved = None
    for _ in range(3):
        total = saved = None
        total, saved = graph(x)
    large = weakref.ref(saved.untyped_storage())
    del saved, graph
    gc.collect()
    assert large() is None
    assert total == x.sum()
    assert len(memory.lent) == 1  # another recording must not write to the sum
    other = CudaGraphRunner(lambda x: [x.sum() + 1], set(), memory)
    for _ in range(3):
        other(x)
    assert total == x.sum()
    del total
    del other
    assert not memory.lent


def test_inputs_are_given_back_and_written() -> None:
    def run(state: torch.Tensor, x: torch.Tensor) -> list[Any]:
        state.add_(x)
        return [x, state.view(2, 1), None, 3]

    graph, state = CudaGraphRunner(run, {0}, Fake()), torch.zeros(2)
    for step in range(1, 6):
        x, version = torch.ones(2), state._version
        same, view, *rest = graph(state, x)
        assert (same is x, rest) == (True, [None, 3])
        assert view.data_ptr() == state.data_ptr()
        assert torch.equal(state, torch.full((2,), float(step)))
        assert state._version > version


def test_what_cannot_be_replayed_runs_as_usual_and_says_why() -> None:
    memory, x = Fake(), torch.ones(2)
    graph, failing = (CudaGraphRunner(lambda x: [x + 1], set(), memory) for _ in range(2))
    for memory.now in (1, 1, 2, None):
        assert torch.equal(graph(x)[0], x + 1)
    memory.now, memory.record = 1, lambda *_: 1 / 0
    for _ in range(3):
        assert torch.equal(failing(x)[0], x + 1)
    with memory.lock:
        assert torch.equal(graph(x)[0], x + 1)
    traced = make_fx(lambda x: [x * 2])(x)
    run = compile_graph(traced, [x], options=Options(triton_cudagraphs=True))
    assert torch.equal(run(x)[0], x * 2)
    once = ("recording-failed", "recorded-too-often", "not-on-a-gpu", "threads")
    assert counters[GROUP] == dict.fromkeys(once, 1) | {"first-call": 2, "another-stream": 2}
