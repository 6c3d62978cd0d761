"""Packed sequences whose lengths are constants.

Packing and padding sequences of known lengths are one node each, which has the lengths as ints
(`weft_core.packed_sequence`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import rnn
from weft_core import packed_sequence

from weft_capture.breaks import Break
from weft_capture.functions.table import rule, rule_of_each
from weft_capture.model.constant import NONE
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.known_numbers import numbers


def ints(tensor: Value, what: str) -> list[int]:
    """Return the numbers of a tensor that is made of constant ints.

    Raises:
        Break: for any other.
    """
    values = numbers(tensor, fix=True)
    if not isinstance(values, list) or not all(type(number) is int for number in values):
        raise Break("data-dependent-value", f"{what} of sequences in a tensor")
    return values


def _tensor(tx: Tracer, values: list[int]) -> Value:
    return tx.builtin(torch.tensor, tx.literal(values))


@rule(torch._pack_padded_sequence)
def _pack(tx: Tracer, input: Value, lengths: Value, batch_first: Value) -> Value:
    counts, shape = ints(lengths, "the lengths"), input.example().shape
    time, batch = (1, 0) if batch_first.nb_bool(tx) else (0, 1)
    if sorted(counts, reverse=True) != counts or not counts or counts[-1] < 1 or 0 in shape:
        raise Break("operator-error", "packing sequences that are empty or not sorted")
    if shape[batch] != len(counts) or shape[time] < counts[0]:
        raise Break("operator-error", "packing other sequences than there are")
    arguments = [input, tx.literal(counts), batch_first]
    data = tx.graph.emit("call_function", packed_sequence.pack, arguments, {})
    return tx.tuple_of([data, _tensor(tx, packed_sequence.batch_sizes_of(counts))])


@rule(torch._pad_packed_sequence)
def _pad(
    tx: Tracer, data: Value, batch_sizes: Value, batch_first: Value,
    padding_value: Value, total_length: Value,
) -> Value:  # fmt: skip
    sizes = ints(batch_sizes, "the sizes")
    if data.example().shape[0] != sum(sizes):
        raise Break("operator-error", "unpacking other sequences than there are")
    arguments = [data, tx.literal(sizes), batch_first, padding_value, total_length]
    padded = tx.graph.emit("call_function", packed_sequence.pad, arguments, {})
    return tx.tuple_of([padded, _tensor(tx, packed_sequence.batch_sizes_of(sizes))])


@rule(rnn.invert_permutation)
def _invert(tx: Tracer, permutation: Value) -> Value:
    return NONE if permutation is NONE else tx.builtin(torch.argsort, permutation)


@rule_of_each(torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)
def _make(function: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    """Create a tensor whose shape may contain values of a constant tensor."""
    sizes = [tx.literal(n) if type(n := numbers(arg)) is int else arg for arg in args]
    return tx.graph.emit("call_function", function, sizes, kwargs)
