"""Whether tensors share elements is never judged apart where they do."""

from __future__ import annotations

import random

import pytest
import torch
from weft_core.memory import are_disjoint


def places(tensor):
    every = torch.arange(500).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(every.reshape(-1).tolist())


def test_random_views():
    draw, memory, found = random.Random(0), torch.zeros(500), 0
    for _ in range(2000):
        views = []
        for _ in range(2):
            sizes = [draw.randint(0, 4) for _ in range(draw.randint(0, 3))]
            strides = [draw.choice([0, 1, 2, 3, 4, 6, 8, 12, 24]) for _ in sizes]
            views.append(memory.as_strided(sizes, strides, draw.randint(0, 20)))
        apart = not (places(views[0]) & places(views[1]))
        assert apart or not are_disjoint(*views)
        found += are_disjoint(*views)
    assert found > 1000


@pytest.mark.parametrize(
    ("split", "apart"),
    [
        (lambda x: (x[:, :4], x[:, 4:]), True),
        (lambda x: (x[:, :4].t(), x[:, 5]), True),
        (lambda x: (x[:3], x[3:]), True),
        (lambda x: (x[::2], x[1::2]), True),
        (lambda x: x.view(2, 3, 8).chunk(2, -1), True),
        (lambda x: (x, torch.zeros(6, 8)), True),
        (lambda x: (x[:, :5], x[:, 4:]), False),
        (lambda x: (x[:3], x[2:].view(torch.int32)), False),
        (lambda x: (x, x), False),
    ],
)
def test_parts_of_a_matrix(split, apart):
    assert are_disjoint(*split(torch.zeros(6, 8))) is apart
