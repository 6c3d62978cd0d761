"""Packed sequences of known lengths, as operations whose shapes the lengths tell.

`sizes` is how many sequences reach each step (`PackedSequence.batch_sizes`), as ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft_core.adapters import layer_by_layer

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def batch_sizes_of(lengths: Sequence[int]) -> list[int]:
    """Return how many sequences reach each step; of step counts, how long each sequence is."""
    return [sum(length > step for length in lengths) for step in range(max(lengths))]


def pack(padded: torch.Tensor, lengths: Sequence[int], batch_first: bool) -> torch.Tensor:
    """Return the items of sequences, step by step, without the padding."""
    rows = padded.transpose(0, 1) if batch_first else padded
    sizes, count = batch_sizes_of(lengths), len(lengths)
    places = [step * count + place for step, size in enumerate(sizes) for place in range(size)]
    flat = rows.narrow(0, 0, len(sizes)).flatten(0, 1)
    return flat.index_select(0, torch.tensor(places, device=padded.device))


def pad(
    data: torch.Tensor, sizes: Sequence[int], batch_first: bool, padding: Any, length: int
) -> torch.Tensor:
    """Return packed sequences side by side, padded to a length."""
    rows = torch.cat([data, data.new_full((1, *data.shape[1:]), padding)])
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    places = [[len(data)] * sizes[0] for _ in range(length)]
    for start, size, row in zip(starts, sizes, places, strict=False):
        row[:size] = range(start, start + size)
    steps = rows[torch.tensor(places, device=data.device)]
    return steps.transpose(0, 1) if batch_first else steps


def run_rnn(
    kind: str, data: Any, sizes: Sequence[int], hidden: Any, weights: Any, biases: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool,
) -> Any:  # fmt: skip
    """Return what `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` does for packed sequences."""
    whole = getattr(torch.ops.aten, kind).data.py_kernels[_COMPOSITE]

    def run(data: Any, hidden: Any, *rest: Any) -> Any:
        return whole(data, list(sizes), hidden, *rest[:-1])

    rest = weights, biases, layers, dropout, train, bidirectional, False
    found = layer_by_layer(run, data, hidden, *rest)
    return run(data, hidden, *rest) if found is None else found
